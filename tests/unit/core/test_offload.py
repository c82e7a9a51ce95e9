"""Weights and cache that are given up are gone, and what computes with them again computes the same."""

import gc
import weakref

import pytest
import torch
from support.local_engine import LocalEngine
from torch import nn
from transformers import GPTNeoXConfig

from vllm_mp.core.worker import model_runner, offload
from vllm_mp.core.worker.offload import OffloadedWeights
from vllm_mp.core.worker.sleep import Sleep
from vllm_mp.kernels.cpu.library import VARIABLE, library
from vllm_mp.status_page import AWAKE
from vllm_mp.testing.random_models import CONFIGS, SIZES, one_thread, random_prompts, save_random_model

PROMPTS = random_prompts((9, 3, 30, 1))
KINDS = {
    "packed": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "transformers": {},
    "graphs": {"make_capture": lambda device: lambda compute: compute},
}


class Module(nn.Module):
    """Tensors that share storages, as those of models do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(100, 7))
        self.head = nn.Linear(7, 100, bias=False)
        self.head.weight = self.embedding
        self.rows = nn.Parameter(self.embedding.detach()[3:50])
        self.register_buffer("table", torch.arange(1000), persistent=False)
        self.original = self.table
        self.empty = nn.Parameter(torch.empty(0))

    def tensors(self):
        return [self.embedding, self.head.weight, self.rows, self.table, self.original, self.empty]


@pytest.mark.parametrize("stretch", [1, 1000, 2**28])
def test_offloaded_weights_take_no_memory_of_the_device_and_come_back_in_place(monkeypatch, stretch):
    monkeypatch.setattr(offload, "_BUFFER_BYTES", stretch)
    module, beats = Module(), []
    if stretch == 1:
        module.table = module.original = torch.arange(3)
    tensors = module.tensors()
    before = [tensor.detach().clone() for tensor in tensors]
    offloaded = OffloadedWeights(module, lambda: beats.append(1))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
    assert sum(len(buffer) for buffer in offloaded._buffers) == 100 * 7 * 4 + module.table.numel() * 8
    assert beats
    offloaded.restore()
    assert all(one is other for one, other in zip(tensors, module.tensors(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    module.embedding.data.fill_(3)
    assert (module.rows == 3).all()


def test_a_device_without_room_is_left_alone_and_may_have_room_later(monkeypatch):
    module = Module()
    before = module.embedding.detach().clone()
    offloaded = OffloadedWeights(module, lambda: None)

    def fail():
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(offloaded, "_wait", fail)
        with pytest.raises(torch.OutOfMemoryError):
            offloaded.restore()
    assert not any(tensor.untyped_storage().nbytes() for tensor in module.tensors())
    offloaded.restore()
    assert torch.equal(module.embedding, before)


def test_a_host_without_room_leaves_the_weights_where_they_are(monkeypatch):
    module = Module()
    before = module.embedding.detach().clone()

    def fail(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(OffloadedWeights, "_wait", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        OffloadedWeights(module, lambda: None)
    assert torch.equal(module.embedding, before)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    configs = {"llama": CONFIGS["llama"], "transformers": GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"])}
    made = {name: tmp_path_factory.mktemp(name) for name in configs}
    for name, folder in made.items():
        save_random_model(configs[name], folder)
    return made


def sleeper(folders, kind):
    """An engine, and what puts it to sleep."""
    folder = folders.get(kind, folders["llama"])
    engine = LocalEngine(folder, load_format="auto", **KINDS[kind])
    return engine, Sleep(engine.scheduler, engine.runner, lambda ends: None, lambda state: None)


def play(engine, num_steps=None):
    """Begin the prompts, and make `num_steps` steps or all of them."""
    for slot, prompt in enumerate(PROMPTS):
        sampled = {"temperature": 1.0, "top_k": 20} if slot % 2 else {}
        engine.add(slot, prompt, max_tokens=8, **sampled)
    for _ in range(num_steps or 0):
        engine.step()
    if num_steps is None:
        engine.run()
    return engine.tokens


def carry_out(sleep, done):
    sleep.settle()
    return done.result(0)


@pytest.mark.parametrize(("kind", "level"), [("packed", 1), ("graphs", 1), *((kind, 2) for kind in KINDS)])
def test_answers_are_those_of_an_engine_that_has_not_slept(folders, kind, level):
    if kind == "int8" and library() is None:
        pytest.skip("weights of 8 bits need the C++ kernels")
    undisturbed, _ = sleeper(folders, kind)
    expected = play(undisturbed)
    engine, sleep = sleeper(folders, kind)
    num_blocks = engine.pool.num_blocks
    play(engine, 3)
    parts = [weakref.ref(tensor) for pair in engine.runner._kv_caches for tensor in pair]
    if level == 2:
        parts += [weakref.ref(engine.runner._model)]
        parts += [weakref.ref(one) for one in engine.runner._model.parameters()]
    carry_out(sleep, sleep.sleep(level))
    assert [part() for part in parts] == [None] * len(parts), "what was given up is gone"
    for tag in ("kv_cache", "weights"):
        assert not engine.scheduler.has_work
        carry_out(sleep, sleep.wake_up(tag))
    assert engine.runner._kv_caches[0][0].shape[0] == num_blocks + 1
    assert (engine.runner._graphs is not None) == (kind == "graphs")
    engine.run()
    assert engine.tokens == expected


def test_weights_that_were_in_host_memory_give_the_same_answers(folders, monkeypatch):
    monkeypatch.setenv(VARIABLE, "none")
    library.cache_clear()
    try:
        engine, sleep = sleeper(folders, "packed")
        expected = [list(tokens) for tokens in play(engine).values()]
        weights = list(engine.runner._model.parameters())
        carry_out(sleep, sleep.sleep(1))
        # As on a device that is not the host.
        engine.runner._offloaded = OffloadedWeights(engine.runner._model, lambda: None)
        assert sum(one.untyped_storage().nbytes() for one in weights) == 0
        carry_out(sleep, sleep.wake_up())
        assert list(play(engine).values()) == expected
    finally:
        library.cache_clear()


def test_weights_that_are_gone_leave_the_engine_asleep_until_they_are_back(folders):
    engine, sleep = sleeper(folders, "packed")
    expected = {slot: list(tokens) for slot, tokens in play(engine).items()}
    play(engine, 3)
    carry_out(sleep, sleep.sleep(2))
    weights = folders["llama"] / "model.safetensors"
    hidden = weights.rename(weights.with_name("hidden"))
    try:
        with pytest.raises(RuntimeError, match=r"the core stays asleep.*has neither model.safetensors nor"):
            carry_out(sleep, sleep.wake_up())
    finally:
        hidden.rename(weights)
    assert engine.runner._kv_caches == []
    assert engine.step() is None
    carry_out(sleep, sleep.wake_up())
    engine.run()
    assert engine.tokens == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_cache_that_finds_no_room_leaves_nothing_behind(folders, monkeypatch, level):
    engine, sleep = sleeper(folders, "packed")
    expected = {slot: list(tokens) for slot, tokens in play(engine).items()}
    play(engine, 3)
    carry_out(sleep, sleep.sleep(level))
    loaded = []
    load = engine.runner._load

    def watch():
        model = load()
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(engine.runner, "_load", watch)
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "available_memory", lambda: 1000)
        with pytest.raises(RuntimeError, match=r"cannot restore weights and kv_cache.*bytes, and 1,000 are free"):
            carry_out(sleep, sleep.wake_up())
    assert [model() for model in loaded] == [None] * (level - 1)
    carry_out(sleep, sleep.wake_up())
    assert sleep.state == AWAKE
    engine.run()
    assert engine.tokens == expected


def test_a_graph_that_cannot_be_captured_again_leaves_the_engine_asleep(folders, monkeypatch):
    engine, sleep = sleeper(folders, "graphs")
    expected = {slot: list(tokens) for slot, tokens in play(engine).items()}
    carry_out(sleep, sleep.sleep(1))
    make = engine.runner._make_capture

    def fail(device):
        def capture(compute):
            raise torch.OutOfMemoryError("no memory")

        return capture

    monkeypatch.setattr(engine.runner, "_make_capture", fail)
    with pytest.raises(RuntimeError, match=r"CaptureError: .*no memory"):
        carry_out(sleep, sleep.wake_up())
    assert engine.runner._graphs is None
    monkeypatch.setattr(engine.runner, "_make_capture", make)
    carry_out(sleep, sleep.wake_up())
    assert engine.runner._graphs is not None
    assert play(engine) == expected


def test_memory_that_is_released_holds_no_cycle_of_objects():
    module = Module()
    module.itself = [module]
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        offload.release_memory(torch.device("cpu"))
    finally:
        gc.enable()
    assert gone() is None
