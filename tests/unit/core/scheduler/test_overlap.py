"""A step is scheduled while the step before is pending: no token is lost, repeated or sent after the end.

The random interleavings of `test_invariants` also run with a pending step.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zmq
from support.stand_in_engine import BLOCK, EOS, Engine

from vllm_mp import AsyncEngineArgs, SamplingParams, wire
from vllm_mp.core import engine_core
from vllm_mp.core.engine_core import EngineCore
from vllm_mp.core.ipc.step_messages import step_outputs
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ModelOutput, StepUpdate
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core_link.core_status import SleepState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.testing.random_models import CONFIGS, save_config


def overlapping(**options):
    return Engine(ahead=1, **options)


def test_step_is_scheduled_before_its_input_tokens_are_known():
    engine = overlapping()
    engine.add(0, num_prompt_tokens=5, max_tokens=8)
    engine.step()
    step = engine.step()
    assert step.awaits.tolist() == [0]
    assert engine.outputs[0] == [7]
    engine.run()
    assert engine.outputs == {0: [7] * 8}
    assert engine.ends == {0: "length"}


def test_no_token_is_computed_past_the_length_of_a_request():
    engine = overlapping(max_model_len=16)
    engine.add(0, num_prompt_tokens=10, max_tokens=1000)
    engine.add(1, num_prompt_tokens=5, max_tokens=3)
    computed = {0: 0, 1: 0}
    while (step := engine.scheduler.schedule()) is not None or engine.scheduler.pending_steps:
        if step is not None:
            for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True):
                computed[engine.batch.request(row).slot] += count
            engine.launch(step, lambda slot, position: 7, ())
        engine.process_all_but(step is not None)
    assert engine.ends == {0: "length", 1: "length"}
    assert computed == {0: 10 + 6 - 1, 1: 5 + 3 - 1}, "the last output token is not computed"


def test_last_output_token_takes_no_block():
    engine = overlapping()
    engine.add(0, num_prompt_tokens=BLOCK, max_tokens=BLOCK + 1)
    for _ in range(BLOCK + 1):
        engine.step()
    assert engine.scheduler.schedule() is None, "its last token is awaited"
    assert engine.pool.num_blocks - engine.pool.num_free == 2
    engine.run()
    assert len(engine.outputs[0]) == BLOCK + 1


def test_token_computed_after_the_end_of_sequence_is_discarded():
    engine = overlapping(max_num_seqs=1)
    engine.add(0)
    engine.add(1, ignore_eos=True, max_tokens=3)
    engine.step(token=lambda slot, position: EOS)
    step = engine.step()
    assert step.awaits.tolist() == [0], "the end is not known yet"
    assert engine.ends == {0: "stop"}
    engine.run()
    assert engine.outputs == {0: [EOS], 1: [7] * 3}


def test_row_gets_a_new_request_while_a_step_of_its_former_request_is_pending():
    engine = overlapping(max_num_seqs=1)
    engine.add(0)
    engine.step(token=EOS)
    late = engine.step(token=9)
    second = engine.add(1, max_tokens=2)
    step = engine.step(token=8)
    assert late.rows.tolist() == step.rows.tolist() == [0]
    assert second.row == 0
    engine.run(token=8)
    assert engine.outputs == {0: [EOS], 1: [8, 8]}


def test_abort_counts_the_tokens_that_were_sent_and_no_token_follows():
    engine = overlapping()
    engine.add(0)
    for _ in range(3):
        engine.step()
    end = engine.scheduler.abort(0, 0)
    assert end.num_output_tokens == len(engine.outputs[0]) == 2
    assert engine.step() is not None, "the pending step is processed"
    assert engine.outputs[0] == [7, 7]
    assert engine.step() is None


def test_failed_sampling_ends_the_request_with_the_tokens_before():
    engine = overlapping()
    for slot in range(2):
        engine.add(slot)
    engine.step()
    engine.step(failing=[0])
    engine.run()
    assert (engine.outputs[0], engine.ends[0]) == ([7], "error")
    assert (engine.outputs[1], engine.ends[1]) == ([7] * 8, "length")


def test_only_logits_processors_that_read_the_output_let_sampling_wait_for_its_last_token():
    for params, waits in (
        ({"presence_penalty": 1.0}, True),
        ({"repetition_penalty": 1.5}, True),
        ({"logit_bias": {5: 1.0}}, False),
        ({"min_tokens": 3}, False),
    ):
        engine = overlapping()
        engine.add(0, **params)
        engine.step()
        step = engine.scheduler.schedule()
        assert step.samples_after_update == waits


def test_pending_step_is_processed_before_a_request_is_preempted():
    engine = overlapping(num_blocks=4, max_num_seqs=2, max_model_len=16)
    for slot in range(2):
        engine.add(slot, num_prompt_tokens=BLOCK, max_tokens=8)
    ends_early = {(0, 0): 7, (0, 1): 7, (0, 2): 7, (0, 3): EOS}
    engine.run(token=lambda slot, position: ends_early.get((slot, position), 7))
    assert engine.outputs == {0: [7, 7, 7, EOS], 1: [7] * 8}
    assert engine.scheduler.num_preemptions == 0, "the first had ended when the second needed its third block"


def test_preempted_request_loses_no_pending_token():
    engine = overlapping(num_blocks=8, max_num_seqs=4, max_model_len=32)
    for slot in range(4):
        engine.add(slot, prompt=[slot] * 4, max_tokens=20)
    engine.run(token=lambda slot, position: 20 * slot + 5 + position)
    assert engine.scheduler.num_preemptions > 0
    assert engine.outputs == {slot: [20 * slot + 5 + position for position in range(20)] for slot in range(4)}


def test_block_is_found_once_its_tokens_are_known():
    engine = overlapping()
    engine.add(0, prompt=[1, 2], max_tokens=20, ignore_eos=True)
    for _ in range(3):
        engine.step(token=lambda slot, position: 30 + position)
    assert engine.batch.num_computed_tokens[0] == BLOCK
    early = engine.add(1, prompt=[1, 2, 30, 0, 5], max_tokens=1)
    engine.step(token=lambda slot, position: 30 + position)
    assert early.num_cached_tokens == 0, "the placeholder of the awaited token is not mistaken for the token"
    late = engine.add(2, prompt=[1, 2, 30, 31, 5], max_tokens=1)
    engine.step(token=lambda slot, position: 30 + position)
    assert late.num_cached_tokens == BLOCK


@pytest.mark.parametrize("ahead", [0, 1])
def test_last_block_that_an_output_fills_is_found_by_the_next_turn(ahead):
    for max_tokens in range(8, 14):
        engine = Engine(budget=64, ahead=ahead)
        engine.add(0, prompt=list(range(100, 110)), max_tokens=max_tokens)
        engine.run(token=7)
        second = engine.add(1, prompt=[*range(100, 110), *[7] * max_tokens, 50, 51])
        engine.step()
        assert second.num_cached_tokens == (10 + max_tokens - 1) // BLOCK * BLOCK


def test_suspect_is_alone_on_the_device():
    engine = overlapping()
    engine.add(0)
    engine.step()
    engine.add(1, isolate_until_num_tokens=2)
    assert engine.scheduler.schedule() is None
    engine.process_all_but(0)
    steps = []
    while len(engine.outputs.get(1, [])) < 2:
        step = engine.scheduler.schedule()
        if step is None:
            engine.process_all_but(0)
        else:
            assert not engine.scheduler.pending_steps
            steps.append([engine.batch.request(row).slot for row in step.rows.tolist()])
            engine.launch(step, lambda slot, position: 7, ())
    assert steps == [[1], [0], [1]]
    engine.run()
    assert [len(engine.outputs[slot]) for slot in range(2)] == [8, 8]


def test_nothing_is_sent_about_a_request_that_ended_while_the_step_was_pending():
    none = np.zeros(0, np.uint32)
    logprobs = [(client, wire.TokenLogprobs(slot, 0, b"", b"", b"")) for client, slot in ((0, 1), (0, 2), (1, 1))]
    update = StepUpdate(none, none, none, none, [], [], [], gone={(0, 1)})
    output = ModelOutput(none, prompt_logprobs=logprobs)
    sent = {
        (client, prompt_logprobs.slot)
        for client, message in step_outputs(1, 1, update, output)
        for prompt_logprobs in message.prompt_logprobs
    }
    assert sent == {(0, 2), (1, 1)}


class StandInMemory:
    """Logs what is released and restored."""

    late_captures = None

    def __init__(self, log):
        self.log = log

    def __getattr__(self, name):
        return lambda: self.log.append(name)

    def cover_ahead(self):
        return False


class StandInRunner:
    """A model that takes no time; it logs what the core does, and which requests are on the status page."""

    def __init__(self, page):
        self.page = page
        self.log = []
        self.memory = self.released_memory = StandInMemory(self.log)
        self.draft = self.images = self.encodings = None
        self.on_page = {}
        self.token = 7
        self.processed_before_sampling = {}
        """By step, the steps that were waited for when it was sampled."""

    def seal_table(self):
        return None

    def prefix_reader(self):
        return None

    def note(self, event):
        self.log.append(event)
        self.note_page(event)

    def note_page(self, event):
        self.on_page[event] = {slot: num_output_tokens for _, slot, num_output_tokens in self.page.read().step_requests}

    def launch(self, step, batch, sampler):
        number = sum(event.startswith("launch") for event in self.log) + 1
        self.note(f"launch {number}")
        tokens = np.full(int(step.samples.sum()), self.token)

        def wait():
            self.note(f"wait {number}")
            return ModelOutput(tokens)

        def sample():
            waits = [event for event in self.log if event.startswith("wait")]
            self.processed_before_sampling[number] = len(waits)

        return SimpleNamespace(sample=sample, wait=wait)


class StandInHandler:
    """Has no clients; runs one of `actions` between two steps, and stops the core when there is no work."""

    num_dropped = num_clients = 0
    is_shared = False

    def __init__(self):
        self.published = []
        self.actions = []
        self.stop = None
        self.note = None

    def serve(self, scheduler, calls, page):
        self.scheduler, self.calls = scheduler, calls

    def tell_model(self, model):
        pass

    def drop_embeddings(self):
        pass

    def tell_pause(self, is_paused):
        self.is_paused = is_paused

    def send_ends(self, ends):
        self.published += [("ends", end.slot) for _, end in ends]

    def publish(self, number, update, output):
        self.published.append((number, update.slots.tolist(), update.positions.tolist()))
        self.note(f"publish {number}")

    def receive_replays(self):
        pass

    def receive(self, admit):
        if self.actions:
            self.actions.pop(0)()
        elif not self.scheduler.has_work:
            self.stop.set()


@pytest.fixture
def make_core(tmp_path):
    """Return a function that makes a core that runs until there is no work: (core, runner, handler, add)."""
    context = zmq.Context()

    def make(async_scheduling):
        folder = save_config(CONFIGS["llama"], tmp_path)
        config = AsyncEngineArgs(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            async_scheduling=async_scheduling,
            check_invariants=True,
        ).create_engine_config()
        config.cache_config.num_blocks = 50
        config.model_config.hf_config["architectures"] = ["LlamaForCausalLM"]
        config.scheduler_config.max_num_batched_tokens = 64
        page = StatusPage.create(None, 1)
        runner, handler, stop = StandInRunner(page), StandInHandler(), StopSignal()
        handler.stop, handler.note = stop, runner.note_page
        core = EngineCore(config, torch.device("cpu"), runner, handler, context.socket(zmq.ROUTER), stop, page)

        def add(slot, num_prompt_tokens=5, max_tokens=3, **fields):
            tokens = np.arange(num_prompt_tokens, dtype=np.int32)
            params = SamplingParams(max_tokens=max_tokens, seed=1, **fields)
            request = Request(
                0,
                slot,
                str(slot),
                params,
                tokens,
                num_prompt_tokens,
                num_prompt_tokens + max_tokens,
                handler.scheduler.order_of(0),
                logits_processors=LogitsProcessors.from_params(params, ()),
            )
            handler.scheduler.add(request)

        return core, runner, handler, add

    yield make
    context.destroy(0)


def test_with_overlap_each_step_is_launched_before_the_step_before_is_waited_for(make_core):
    core, runner, handler, add = make_core(True)
    add(0)
    core.run()
    assert runner.log == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert handler.published == [(1, [0], [0]), (2, [0], [1]), (3, [0], [2])]


class StandInCaptures:
    """Has graphs to capture: those of `wanted` while there is work, and `num_left` in all."""

    def __init__(self, log, num_left, wanted=0):
        self.log, self.num_left, self.wanted = log, num_left, wanted

    def is_due(self, *, is_idle):
        return self.num_left > 0 and (is_idle or self.wanted > 0)

    def capture_next(self):
        self.log.append("capture")
        self.num_left -= 1
        self.wanted -= 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_graph_that_a_step_lacks_is_captured_when_no_step_is_pending(make_core, overlaps):
    core, runner, handler, add = make_core(overlaps)
    late = runner.memory.late_captures = StandInCaptures(runner.log, num_left=2)
    add(0)
    handler.actions = [lambda: None, lambda: setattr(late, "wanted", 1)]
    core.run()
    steps = [event for event in runner.log if event.startswith(("launch", "wait", "capture"))]
    before = steps[: steps.index("capture")]
    assert sum(event.startswith("launch") for event in before) == sum(event.startswith("wait") for event in before) > 0
    assert [positions for _, _, positions in handler.published] == [[0], [1], [2]]


def test_core_without_work_captures_one_graph_between_two_looks_at_its_messages(make_core):
    core, runner, handler, add = make_core(True)
    runner.memory.late_captures = StandInCaptures(runner.log, num_left=3)
    handler.actions = [lambda: None, lambda: None, lambda: add(0)]
    core._poller = Mock(wraps=core._poller)
    core.run()
    assert runner.log[:3] == ["capture", "capture", "launch 1"], "the request does not wait for the third"
    assert {call.args for call in core._poller.poll.call_args_list} == {(0,)}, "the core does not wait for messages"


def test_step_whose_logits_depend_on_an_awaited_token_is_launched_early_and_sampled_late(make_core):
    core, runner, handler, add = make_core(True)
    add(0, presence_penalty=1.0)
    core.run()
    assert runner.log == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert runner.processed_before_sampling == {1: 0, 2: 1, 3: 2}
    assert [positions for _, _, positions in handler.published] == [[0], [1], [2]]
    core, runner, _, add = make_core(True)
    add(0)
    core.run()
    assert runner.processed_before_sampling == {1: 0, 2: 0, 3: 1}, "other steps are sampled as soon as launched"


def test_without_overlap_each_step_is_processed_before_the_next_is_launched(make_core):
    core, runner, handler, add = make_core(False)
    add(0)
    core.run()
    assert runner.log == ["launch 1", "wait 1", "launch 2", "wait 2", "launch 3", "wait 3"]
    assert handler.published == [(1, [0], [0]), (2, [0], [1]), (3, [0], [2])]


def test_status_page_names_the_requests_of_every_pending_step_and_their_output_tokens(make_core):
    core, runner, _, add = make_core(True)
    add(0, max_tokens=2)
    add(1, max_tokens=4)
    core.run()
    assert runner.on_page["launch 1"] == {0: -5, 1: -5}, "five tokens of each prompt are left"
    assert runner.on_page["launch 2"] == runner.on_page["wait 1"] == {0: 1, 1: 1}
    assert runner.on_page["publish 1"] == {0: 1, 1: 1}, "the second step is pending"
    assert runner.on_page["publish 2"] == {1: 2}
    assert runner.on_page["launch 3"] == runner.on_page["wait 2"] == {0: 1, 1: 2}, (
        "request 0 is still in the second step"
    )
    assert runner.on_page["launch 4"] == runner.on_page["wait 3"] == {1: 3}
    assert runner.page.read().step_requests == []


def test_idle_core_does_not_count_aborted_requests_on_the_status_page(make_core, monkeypatch):
    monkeypatch.setattr(engine_core, "_BEAT_MS", 0)
    core, _, handler, add = make_core(False)
    add(0, max_tokens=30)
    counts = []

    def abort():
        counts.append(core._page.read().num_running)
        handler.scheduler.abort(0, 0)

    handler.actions = [lambda: None, abort]
    core.run()
    status = core._page.read()
    assert counts == [1]
    assert (status.num_running, status.free_blocks) == (0, status.total_blocks)


def test_aborted_request_is_not_on_the_status_page_while_its_step_is_pending(make_core):
    core, runner, handler, add = make_core(True)
    add(0, max_tokens=5)
    add(1, max_tokens=5)
    handler.actions = [lambda: None, lambda: None, lambda: handler.scheduler.abort(0, 0)]
    core.run()
    assert runner.on_page["wait 1"] == {0: 1, 1: 1}
    assert runner.on_page["launch 3"] == {1: 2}


def test_pending_step_is_processed_before_the_core_waits_for_messages(make_core):
    core, runner, handler, add = make_core(True)
    add(0, max_tokens=9)
    runner.token = core._batch.eos_token_ids[0]
    polls = []
    core._poller = SimpleNamespace(poll=lambda timeout: polls.append(len(core._scheduler.pending_steps)))
    handler.actions = [lambda: None] * 4
    core.run()
    assert runner.log == ["launch 1", "launch 2", "wait 1", "wait 2"], "the output of the second step is discarded"
    assert [number for number, slots, _ in handler.published if slots] == [1]
    assert polls
    assert not any(polls)


def test_pause_takes_effect_after_all_pending_steps_are_published(make_core):
    core, runner, handler, add = make_core(True)
    add(0, max_tokens=9)
    seen = []

    def pause():
        assert handler.calls["pause"]("keep", True).done()
        seen.extend(handler.published)
        handler.calls["resume"]()

    handler.actions = [lambda: None, lambda: None, pause]
    core.run()
    assert seen == [(1, [0], [0]), (2, [0], [1])]
    assert [position for _, _, positions in handler.published for position in positions] == list(range(9))
    assert runner.log[:5] == ["launch 1", "launch 2", "wait 1", "wait 2", "launch 3"]


def test_sleep_takes_effect_between_two_steps_and_a_sleeping_core_waits_for_messages(make_core):
    core, runner, handler, add = make_core(True)
    add(0, max_tokens=4)
    polls, calls = [], []
    core._poller = SimpleNamespace(poll=lambda timeout: polls.append(core.status()["is_sleeping"]) or ["news"])
    handler.actions = [
        *[lambda: None] * 2,
        lambda: calls.append(handler.calls["sleep"](1)),
        *[lambda: None] * 3,
        lambda: calls.append(handler.calls["wake_up"]("weights")),
        lambda: calls.append(handler.calls["wake_up"]("kv_cache")),
    ]
    core.run()
    assert all(call.done() for call in calls)
    assert runner.log[:6] == ["launch 1", "launch 2", "wait 1", "wait 2", "offload_weights", "drop_cache"]
    assert runner.log[6:10] == ["restore_weights", "restore_cache", "prepare", "launch 3"]
    assert polls == [*[True] * 5, False], "a core with work does not wait"
    assert [position for _, _, positions in handler.published for position in positions] == list(range(4))


def test_repeated_sleep_and_wake_up_loses_no_token(make_core):
    core, runner, handler, add = make_core(True)
    add(0, max_tokens=6)

    def call():
        handler.calls["sleep"](2)
        handler.calls["wake_up"]()

    handler.actions = [lambda: None, lambda: None, call, lambda: None, call, call, lambda: None]
    core.run()
    assert runner.log.count("drop_cache") == runner.log.count("prepare") == 3
    assert [position for _, _, positions in handler.published for position in positions] == list(range(6))


def test_core_stops_while_it_wakes_up(make_core):
    core, runner, handler, add = make_core(False)
    add(0)
    memory = runner.memory

    def stop():
        handler.stop.set()
        raise StopSignal.Stopped  # as loading weights does

    memory.restore_weights = stop
    handler.actions = [lambda: handler.calls["sleep"](2), lambda: handler.calls["wake_up"]()]
    core.run()
    assert runner.log == ["drop_weights", "drop_cache"]
    assert runner.page.read().suspension.sleep == SleepState(2, ("weights", "kv_cache"))


@pytest.mark.parametrize("drains", [False, True])
def test_sleeping_core_stops_at_once(make_core, drains):
    core, _, handler, add = make_core(True)
    add(0)

    def stop():
        handler.stop.drain = drains
        handler.stop.set()

    handler.actions = [lambda: handler.calls["sleep"](1), stop]
    core.run()
    assert handler.published == []
