"""Graphs that a start leaves out are captured while the core serves, and no stream notices but for the time."""

import logging

import pytest
import torch
from support.local_engine import LocalEngine

from vllm_mp.core.worker.cuda_graphs import DeviceError, StepShape, first_shapes, step_shapes
from vllm_mp.core.worker.late_captures import LateCaptures
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPTS = random_prompts((9, 3, 30, 1, 12, 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(CONFIGS["llama"], folder)
    return folder


class Captures:
    """A stand-in for captures, which keeps the number of tokens of each; `fail` is raised in place of the next."""

    def __init__(self):
        self.sizes = []
        self.fail = None

    def __call__(self, device):
        def capture(compute):
            if self.fail is not None:
                raise self.fail
            self.sizes.append(len(compute()))
            return compute

        return capture


@pytest.fixture
def captures():
    return Captures()


def serving(folder, captures, **options):
    engine = LocalEngine(folder, make_capture=captures, captures_late=True, **options)
    return engine, engine.runner.memory.late_captures


def shapes(engine):
    return [(shape.num_tokens, shape.only_decodes) for shape in step_shapes(engine.config)]


def test_start_captures_the_largest_of_either_kind_and_the_smallest(folder, captures):
    engine, late = serving(folder, captures)
    assert captures.sizes == [12, 1, 40], "12 rows are also the largest size of up to 16"
    assert late.num_left
    assert engine.runner.memory.graphs.num_graphs == 3


def test_steps_of_few_rows_have_a_first_graph_of_few_rows():
    decodes = [StepShape(size, size, True) for size in (256, 128, 24, 16, 8, 1)]
    prefills = [StepShape(size, 8, False) for size in (512, 128, 64, 32, 16)]
    assert [(s.num_tokens, s.only_decodes) for s in first_shapes([*decodes, *prefills])] == [
        *[(size, True) for size in (256, 16, 1)],
        *[(size, False) for size in (512, 64)],
    ]


def test_core_without_work_captures_all_others_small_decodes_first(folder, captures):
    engine, late = serving(folder, captures)
    del captures.sizes[:]
    while late.is_due(is_idle=True):
        late.capture_next()
    assert captures.sizes == [2, 4, 8, 16, 32]
    assert late.num_left == 0
    assert engine.runner.memory.graphs.num_graphs == len(shapes(engine))


def test_step_is_padded_to_a_captured_shape_until_its_own_is_captured(folder, captures):
    engine, late = serving(folder, captures)
    graphs = engine.runner.memory.graphs
    for slot in range(3):
        engine.add(slot, PROMPTS[slot], max_tokens=20)
    while (step := engine.step()).num_decodes < 3:
        pass
    assert graphs.shape_of(step) == (12, 12, True)
    assert graphs.missing == (4, 4, True)
    assert late.is_due(is_idle=False)
    late.capture_next()
    assert captures.sizes[-1] == 4
    assert graphs.shape_of(step) == (4, 4, True)
    assert not late.is_due(is_idle=False), "the steps under way lack no graph"
    assert late.is_due(is_idle=True)


def test_captures_take_a_tenth_of_the_time_of_a_core_with_work(folder, captures):
    engine, late = serving(folder, captures)
    now = [100.0]

    def capture(compute):
        now[0] += 0.05
        return compute

    graphs = engine.runner.memory.graphs
    late = LateCaptures(graphs, capture, lambda: True, lambda: now[0])
    graphs.missing = graphs.late[0]
    assert late.is_due(is_idle=False)
    late.capture_next()
    graphs.missing = graphs.late[0]
    assert not late.is_due(is_idle=False)
    assert late.is_due(is_idle=True)
    now[0] += 0.449
    assert not late.is_due(is_idle=False)
    now[0] += 0.002
    assert late.is_due(is_idle=False)


def test_outputs_are_the_same_to_the_bit_while_graphs_are_captured(folder, captures):
    def play(engine, late=None):
        for slot, prompt in enumerate(PROMPTS):
            engine.add(slot, prompt, max_tokens=4 + 5 * slot)
        while engine.scheduler.has_work:
            engine.step()
            if late is not None and late.is_due(is_idle=True):
                late.capture_next()
        return engine.tokens, engine.logprobs

    assert play(*serving(folder, captures)) == play(LocalEngine(folder))
    assert {2, 4, 8} <= set(captures.sizes)


def test_late_capture_writes_to_the_padding_block_alone(folder, captures):
    """Before it, the buffers hold the cells of the requests of the latest step."""
    engine, late = serving(folder, captures)
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, max_tokens=8)
    while engine.step().num_decodes < len(PROMPTS):
        pass
    caches = [cache for pair in engine.runner.memory.kv_caches for cache in pair]
    with torch.inference_mode():
        for cache in caches:
            cache.fill_(7.0)
    while late.num_left:
        late.capture_next()
    assert all((cache[1:] == 7.0).all() for cache in caches)
    assert not all((cache[0] == 7.0).all() for cache in caches), "the captures wrote nothing"


@pytest.mark.parametrize("cause", ["failure", "no room"])
def test_core_goes_on_with_the_graphs_it_has_when_a_late_capture_fails(folder, captures, cause, caplog, monkeypatch):
    engine, late = serving(folder, captures)
    if cause == "failure":
        captures.fail = RuntimeError("out of memory")
    else:
        monkeypatch.setattr(late, "_has_room", lambda: False)
    with caplog.at_level(logging.WARNING):
        late.capture_next()
    assert "no graphs for 5 shapes of steps, of which 2 rows: " in caplog.text
    assert not late.is_due(is_idle=True)
    engine.add(0, PROMPTS[0], max_tokens=5)
    engine.run()
    assert len(engine.tokens[0]) == 5
    assert engine.runner.memory.graphs.missing is None


def test_core_ends_when_the_device_fails_during_a_late_capture(folder, captures):
    _, late = serving(folder, captures)
    captures.fail = DeviceError("illegal memory access")
    with pytest.raises(DeviceError):
        late.capture_next()


def test_late_shapes_with_prefills_are_left_out_when_steps_with_prefills_cannot_be_captured(folder, captures):
    def make(device):
        capture = captures(device)

        def only_decodes(compute):
            replay = capture(compute)
            if captures.sizes[-1] == 40:
                raise RuntimeError("operation not permitted when stream is capturing")
            return replay

        return only_decodes

    engine = LocalEngine(folder, make_capture=make, captures_late=True)
    assert [shape.only_decodes for shape in engine.runner.memory.graphs.late] == [True] * 3


def test_graphs_are_captured_late_again_after_a_sleep(folder, captures):
    engine, late = serving(folder, captures)
    memory = engine.runner.memory
    memory.drop_cache()
    assert memory.late_captures is None
    memory.restore_cache()
    memory.prepare()
    assert memory.late_captures.num_left
    assert memory.late_captures is not late
