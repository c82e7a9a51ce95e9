"""The text that says which faults a core brings about itself, and when they strike."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_mp import EngineArgs, SamplingParams
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.fault_injection import device_faults
from vllm_mp.fault_injection.faults import Fault, parse_faults
from vllm_mp.fault_injection.hooks import FaultHooks


def test_conditions_are_read():
    text = "exit@step=20,incarnation=1; slow@step=*,seconds=0.2;exit@publish,messages=0,once ;exit@load,share=0.5"
    assert parse_faults(text, "cpu") == [
        Fault("exit@step=20,incarnation=1", "exit", step=20, incarnation=1),
        Fault("slow@step=*,seconds=0.2", "slow", seconds=0.2),
        Fault("exit@publish,messages=0,once", "exit", "publish", messages=0, once=True),
        Fault("exit@load,share=0.5", "exit", "load", share=0.5),
    ]
    assert parse_faults("", "cpu") == []


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("boom@step=1", r"action must be one of exit, .*'boom'"),
        ("exit", "must be followed"),
        ("exit@", "must be followed"),
        ("exit@step=1,", "must be followed"),
        ("exit@nowhere", "one of load, step, publish, once, got 'nowhere'"),
        ("exit@stop=1", "condition must be one of incarnation, .*'stop'"),
        ("exit@step=0", "step must be a number from 1, or \\*, got '0'"),
        ("exit@step=x", "step must be a number"),
        ("exit@step=1,step=2", "'step' is given twice"),
        ("exit@load,publish", "'place' is given twice"),
        ("exit@load,step=3", "step is a condition at step, publish, not at 'load'"),
        ("nan@load", "nan is possible at step, not at 'load'"),
        ("exit@step=1,seconds=2", "seconds is for slow, clock, not for 'exit'"),
        ("exit@step=1,probability=2", "probability must be a number from 0 to 1"),
        ("slow@step=1,seconds=nan", "seconds must be a number"),
        ("slow@step=1,seconds=-1", "must not be negative"),
    ],
)
def test_what_is_not_of_the_grammar_is_refused_when_the_options_are_made(text, match):
    with pytest.raises(ValueError, match=match) as caught:
        EngineArgs(fault_injection=text)
    assert str(caught.value).startswith("fault_injection: ")
    assert text.strip() in str(caught.value)


@pytest.mark.parametrize("action", ["device_oom", "illegal_access", "device_assert"])
def test_a_fault_of_a_device_is_refused_where_there_is_none_as_soon_as_that_is_known(action):
    text = f"slow@step=1; {action}@step=2"
    for refuse in (lambda: EngineArgs(fault_injection=text, device="cpu"), lambda: Core(text)):
        with pytest.raises(ValueError, match=rf"^fault_injection: {action} in '{action}@step=2' .*set device='cuda'"):
            refuse()
    EngineArgs(fault_injection=text)  # the core finds out which device there is


class Core:
    """What the hooks are installed in: two requests, "alpha" in decode and "beta" at the second half of its prompt."""

    def __init__(self, text, incarnation=1, folder=None, device="cpu"):
        self.batch = Batch(4, 16, 4, [])
        for slot, (name, known, computed) in enumerate((("alpha", [1, 2, 3, 4], 3), ("beta", [5, 6, 7, 8], 2))):
            request = Request(
                0, slot, name, SamplingParams(), np.array(known, np.int32), 4 - 2 * (slot == 0), 16, (0, slot)
            )
            self.batch.add(request, np.array([slot + 1], np.int32), computed)
        self.step = ScheduledStep(
            np.array([0, 1]), np.array([1, 2]), 1, np.array([True, True]), np.array([False, False])
        )
        self.sent = []
        self.number = 0
        self._model = lambda *_: torch.ones(3, 2)
        liveness = SimpleNamespace(fault_injection=text)
        launch = SimpleNamespace(
            config=SimpleNamespace(liveness_config=liveness, device_config=SimpleNamespace(device=device)),
            incarnation=incarnation,
            runtime_dir=None if folder is None else str(folder),
        )
        self.hooks = FaultHooks(launch)
        self.hooks.install(self, self)

    def latest_token(self, row):
        return int(self.batch.token_ids[row, self.batch.num_tokens[row] - 1])

    def wrap_model(self, wrap):
        self._model = wrap(self._model)

    def launch(self, step, batch, sampler):
        return self._model()

    def publish(self, step, result, computed):
        self.sent.append("all")

    def run(self):
        """One step; which of its three tokens have hidden states that are numbers."""
        self.number += 1
        hidden = self.launch(self.step, self.batch, None)
        self.publish(self.number, None, None)
        return torch.isfinite(hidden).all(-1).tolist()

    def steps_until_it_strikes(self, most=10):
        for count in range(most):
            try:
                self.run()
            except RuntimeError as error:
                assert str(error).startswith("injected fault: ")  # noqa: PT017 - one of many steps raises
                return count + 1
        return None


@pytest.mark.parametrize(
    ("conditions", "strikes_at"),
    [
        ("step=3", 3),
        ("step=*", 1),
        ("step=3,incarnation=2", None),
        ("request=alp", 1),
        ("request=gamma", None),
        ("request=alpha,step=2", 2),
        ("token=4", 1),
        ("token=3", None),
        ("token=7", 1),
        ("token=4,request=beta", None),
        ("position=2", 1),
        ("position=2,request=beta", None),
        ("position=0,request=beta", 1),
        ("computed=3", 1),
        ("computed=3,request=beta", None),
        ("step=*,probability=0", None),
        ("step=*,probability=0.3,seed=1", 2),
    ],
)
def test_a_fault_strikes_at_the_step_that_its_conditions_name(conditions, strikes_at):
    assert Core(f"raise@{conditions}").steps_until_it_strikes() == strikes_at


def test_a_fault_that_strikes_once_spares_the_later_incarnations(tmp_path):
    text = "raise@step=2,once;raise@step=4,once"
    assert Core(text, 1, tmp_path).steps_until_it_strikes() == 2
    assert Core(text, 2, tmp_path).steps_until_it_strikes() == 4
    assert Core(text, 3, tmp_path).steps_until_it_strikes() is None


@pytest.mark.parametrize(
    ("action", "strike"),
    [
        ("device_oom", "run_out_of_memory"),
        ("illegal_access", "access_illegally"),
        ("device_assert", "fail_an_assertion"),
    ],
)
def test_a_fault_of_the_device_comes_before_what_the_step_launches(monkeypatch, action, strike):
    core = Core(f"{action}@step=2", device="cuda")
    monkeypatch.setattr(device_faults, strike, lambda: done.append(action))
    core._model = lambda *_: done.append("step") or torch.ones(3, 2)
    done = []
    core.run()
    core.run()
    assert done == ["step", action, "step"]


def test_nan_reaches_the_tokens_of_the_request_alone():
    core = Core("nan@request=beta,step=2")
    assert [core.run() for _ in range(3)] == [[True] * 3, [True, False, False], [True] * 3]


def test_a_fault_while_loading_waits_for_its_share():
    hooks = Core("raise@load,share=0.5").hooks
    hooks.while_loading(0.4)
    with pytest.raises(RuntimeError, match="injected"):
        hooks.while_loading(0.6)


@pytest.mark.parametrize(("messages", "sent"), [(0, []), (1, ["first"]), (5, ["first", "second"])])
def test_a_fault_of_messages_strikes_between_them(monkeypatch, messages, sent):
    monkeypatch.setattr(
        "vllm_mp.fault_injection.hooks.step_outputs", lambda *_: iter([(0, "first"), (0, "second")]), raising=True
    )
    core = Core(f"raise@publish,step=2,messages={messages}")
    core._send_to = lambda _, message: core.sent.append(message)
    core.run()
    with pytest.raises(RuntimeError, match="injected"):
        core.run()
    assert core.sent == ["all", *sent]


def test_nothing_stands_in_the_way_of_faults_of_other_places():
    core = Core("raise@load;raise@step=1,incarnation=7")
    assert "launch" not in vars(core)
    assert "publish" not in vars(core)
