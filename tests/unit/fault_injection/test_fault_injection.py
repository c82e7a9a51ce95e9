"""The syntax of the option `fault_injection`, and the steps at which injected faults strike."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_mp import EngineArgs, SamplingParams
from vllm_mp.core.fault_hooks import device_faults
from vllm_mp.core.fault_hooks.hooks import FaultHooks
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.fault_injection import Fault, parse_faults


def test_places_and_conditions_are_parsed():
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
        (
            "exit@nowhere",
            "one of load, step, seal, publish, image, compile, adapter, call, message, once, got 'nowhere'",
        ),
        ("exit@stop=1", "condition must be one of incarnation, .*'stop'"),
        ("exit@step=0", "step must be a number from 1, or \\*, got '0'"),
        ("exit@step=x", "step must be a number"),
        ("exit@step=1,step=2", "'step' is given twice"),
        ("exit@load,publish", "'point' is given twice"),
        ("exit@load,step=3", "step is a condition at step, publish, not at 'load'"),
        ("nan@load", "nan is possible at step, not at 'load'"),
        ("exit@step=1,seconds=2", "seconds is a condition of slow, busy, clock, not of 'exit'"),
        ("exit@step=1,probability=2", "probability must be a number from 0 to 1"),
        ("slow@step=1,seconds=nan", "seconds must be a number"),
        ("slow@step=1,seconds=-1", "must not be negative"),
        ("busy@step=1,seconds=-1", "must not be negative for busy, got -1"),
    ],
)
def test_invalid_text_is_refused_when_engine_args_are_made(text, match):
    with pytest.raises(ValueError, match=match) as caught:
        EngineArgs(fault_injection=text)
    assert str(caught.value).startswith("fault_injection: ")
    assert text.strip() in str(caught.value)


@pytest.mark.parametrize("action", ["device_oom", "illegal_access", "device_assert"])
def test_device_fault_is_refused_without_a_cuda_device_as_soon_as_the_device_is_known(action):
    text = f"slow@step=1; {action}@step=2"
    for make in (lambda: EngineArgs(fault_injection=text, device="cpu"), lambda: Core(text)):
        with pytest.raises(ValueError, match=rf"^fault_injection: {action} in '{action}@step=2' .*set device='cuda'"):
            make()
    EngineArgs(fault_injection=text)  # device="auto": the core finds out which device there is


class Core:
    """A core with installed hooks and two requests: "alpha" decodes, "beta" computes the second half of its prompt."""

    def __init__(self, text, incarnation=1, folder=None, device="cpu"):
        self.batch = Batch(4, 16, 4, [])
        for slot, (name, tokens, num_computed) in enumerate((("alpha", [1, 2, 3, 4], 3), ("beta", [5, 6, 7, 8], 2))):
            request = Request(
                0, slot, name, SamplingParams(), np.array(tokens, np.int32), 4 - 2 * (slot == 0), 16, (0, slot)
            )
            self.batch.add(request, np.array([slot + 1], np.int32), num_computed)
        self.step = ScheduledStep(
            np.array([0, 1]), np.array([1, 2]), 1, np.array([True, True]), np.array([False, False])
        )
        self.sent = []
        self.number = 0
        self.memory = self  # of the runner, which this also stands in for
        self._model = lambda *_: torch.ones(3, 2)
        liveness = SimpleNamespace(fault_injection=text)
        launch = SimpleNamespace(
            config=SimpleNamespace(liveness_config=liveness, device_config=SimpleNamespace(device=device)),
            number=incarnation,
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

    def step_outputs(self, step, result, computed):
        return iter([(0, "first"), (0, "second")])

    def _send_to(self, client, message):
        self.sent.append(message)

    def run(self):
        """Run one step. Return for each of its three tokens whether the hidden states are finite."""
        self.number += 1
        hidden = self.launch(self.step, self.batch, None)
        self.publish(self.number, None, None)
        return torch.isfinite(hidden).all(-1).tolist()

    def num_steps_until_strike(self, max_steps=10):
        """Return the number of steps up to the first injected fault, or None if there is none."""
        for count in range(max_steps):
            try:
                self.run()
            except RuntimeError as error:
                assert str(error).startswith("injected fault: ")  # noqa: PT017 - any of the steps may raise
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
def test_fault_strikes_at_the_first_step_at_which_its_conditions_hold(conditions, strikes_at):
    assert Core(f"raise@{conditions}").num_steps_until_strike() == strikes_at


def test_fault_marked_once_spares_later_incarnations(tmp_path):
    text = "raise@step=2,once;raise@step=4,once"
    assert Core(text, 1, tmp_path).num_steps_until_strike() == 2
    assert Core(text, 2, tmp_path).num_steps_until_strike() == 4
    assert Core(text, 3, tmp_path).num_steps_until_strike() is None


@pytest.mark.parametrize(
    ("action", "strike"),
    [
        ("device_oom", "run_out_of_memory"),
        ("illegal_access", "access_illegally"),
        ("device_assert", "fail_an_assertion"),
    ],
)
def test_device_fault_strikes_before_the_step_is_launched(monkeypatch, action, strike):
    core = Core(f"{action}@step=2", device="cuda")
    monkeypatch.setattr(device_faults, strike, lambda: done.append(action))
    core._model = lambda *_: done.append("step") or torch.ones(3, 2)
    done = []
    core.run()
    core.run()
    assert done == ["step", action, "step"]


def test_nan_reaches_only_the_tokens_of_the_named_request():
    core = Core("nan@request=beta,step=2")
    assert [core.run() for _ in range(3)] == [[True] * 3, [True, False, False], [True] * 3]


def test_fault_of_loading_strikes_once_its_share_is_loaded():
    hooks = Core("raise@load,share=0.5").hooks
    hooks.while_loading(0.4)
    with pytest.raises(RuntimeError, match="injected"):
        hooks.while_loading(0.6)


@pytest.mark.parametrize(("messages", "sent"), [(0, []), (1, ["first"]), (5, ["first", "second"])])
def test_publish_fault_strikes_between_the_messages_of_a_step(messages, sent):
    core = Core(f"raise@publish,step=2,messages={messages}")
    core.run()
    with pytest.raises(RuntimeError, match="injected"):
        core.run()
    assert core.sent == ["all", *sent]


def test_steps_are_not_wrapped_for_faults_of_other_places_or_incarnations():
    core = Core("raise@load;raise@step=1,incarnation=7")
    assert "launch" not in vars(core)
    assert "publish" not in vars(core)
