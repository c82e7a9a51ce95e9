"""Released weights and caches are freed, and after their return the engine computes the same."""

import gc
import weakref

import pytest
import torch
from support.local_engine import LocalEngine
from torch import nn
from transformers import GPTNeoXConfig

from vllm_mp.core.worker.memory import model_memory, offload
from vllm_mp.core.worker.memory.offload import OffloadedWeights
from vllm_mp.core.worker.memory.sleep import Sleep
from vllm_mp.core_link.core_status import AWAKE
from vllm_mp.kernels.cpu.library import library
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE
from vllm_mp.testing.random_models import CONFIGS, SIZES, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


PROMPTS = random_prompts((9, 3, 30, 1))
KINDS = {
    "packed": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "transformers": {},
    "graphs": {"make_capture": lambda device: lambda compute: compute},
}


class Module(nn.Module):
    """A module whose tensors share storages, as in models."""

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


@pytest.mark.parametrize("buffer_bytes", [1, 1000, 2**28])
def test_offloaded_weights_take_no_device_memory_and_are_restored_in_place(monkeypatch, buffer_bytes):
    monkeypatch.setattr(offload, "_BUFFER_BYTES", buffer_bytes)
    module, beats = Module(), []
    if buffer_bytes == 1:
        module.table = module.original = torch.arange(3)
    tensors = module.tensors()
    before = [tensor.detach().clone() for tensor in tensors]
    offloaded = OffloadedWeights(module, lambda: beats.append(1))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
    assert sum(len(buffer) for buffer in offloaded._buffers) == 100 * 7 * 4 + module.table.numel() * 8
    assert beats
    offloaded.restore()
    assert all(tensor is other for tensor, other in zip(tensors, module.tensors(), strict=True))
    assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, before, strict=True))
    module.embedding.data.fill_(3)
    assert (module.rows == 3).all()


def test_failed_restore_takes_no_device_memory_and_can_be_repeated(monkeypatch):
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


def test_weights_stay_on_the_device_when_they_do_not_fit_in_host_memory(monkeypatch):
    module = Module()
    before = module.embedding.detach().clone()

    def fail(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(OffloadedWeights, "_wait", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        OffloadedWeights(module, lambda: None)
    assert torch.equal(module.embedding, before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    configs = {"llama": CONFIGS["llama"], "transformers": GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"])}
    made = {name: tmp_path_factory.mktemp(name) for name in configs}
    for name, folder in made.items():
        save_random_model(configs[name], folder)
    return made


def sleeper(folders, kind):
    """Return an engine and its `Sleep`."""
    folder = folders.get(kind, folders["llama"])
    engine = LocalEngine(folder, load_format="auto", **KINDS[kind])
    return engine, Sleep(engine.scheduler, engine.runner.memory, lambda ends: None, lambda state: None)


def play(engine, num_steps=None):
    """Add a request for each prompt, make `num_steps` steps or all steps, and return the tokens by slot."""
    for slot, prompt in enumerate(PROMPTS):
        sampled = {"temperature": 1.0, "top_k": 20} if slot % 2 else {}
        engine.add(slot, prompt, max_tokens=8, **sampled)
    for _ in range(num_steps or 0):
        engine.step()
    if num_steps is None:
        engine.run()
    return engine.tokens


def carry_out(sleep, done):
    """Carry out the call of `sleep` or `wake_up` that returned `done`, and return its result."""
    sleep.settle()
    return done.result(0)


@pytest.mark.parametrize(("kind", "level"), [("packed", 1), ("graphs", 1), *((kind, 2) for kind in KINDS)])
def test_tokens_are_the_same_with_a_sleep_between_steps(folders, kind, level):
    if kind == "int8" and library() is None:
        pytest.skip("weights of 8 bits need the C++ kernels")
    undisturbed, _ = sleeper(folders, kind)
    expected = play(undisturbed)
    engine, sleep = sleeper(folders, kind)
    num_blocks = engine.pool.num_blocks
    play(engine, 3)
    parts = [weakref.ref(tensor) for pair in engine.runner.memory.kv_caches for tensor in pair]
    if level == 2:
        parts += [weakref.ref(engine.runner.memory.model)]
        parts += [weakref.ref(weight) for weight in engine.runner.memory.model.parameters()]
    carry_out(sleep, sleep.sleep(level))
    assert [part() for part in parts] == [None] * len(parts), "released memory is freed"
    for tag in ("kv_cache", "weights"):
        assert not engine.scheduler.has_work
        carry_out(sleep, sleep.wake_up(tag))
    assert engine.runner.memory.kv_caches[0][0].shape[0] == num_blocks + 1
    assert (engine.runner.memory.graphs is not None) == (kind == "graphs")
    engine.run()
    assert engine.tokens == expected


def test_tokens_are_the_same_after_weights_were_in_host_memory(folders, monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "none")
    library.cache_clear()
    try:
        engine, sleep = sleeper(folders, "packed")
        expected = [list(tokens) for tokens in play(engine).values()]
        weights = list(engine.runner.memory.model.parameters())
        carry_out(sleep, sleep.sleep(1))
        # As on a device that is not the host.
        engine.runner.memory._offloaded = OffloadedWeights(engine.runner.memory.model, lambda: None)
        assert sum(weight.untyped_storage().nbytes() for weight in weights) == 0
        carry_out(sleep, sleep.wake_up())
        assert list(play(engine).values()) == expected
    finally:
        library.cache_clear()


def test_engine_stays_asleep_while_the_weight_file_is_missing(folders):
    engine, sleep = sleeper(folders, "packed")
    expected = {slot: list(tokens) for slot, tokens in play(engine).items()}
    play(engine, 3)
    carry_out(sleep, sleep.sleep(2))
    weights = folders["llama"] / "model.safetensors"
    hidden = weights.rename(weights.with_name("hidden"))
    try:
        with pytest.raises(RuntimeError, match=r"the core stays asleep.*holds no .safetensors file"):
            carry_out(sleep, sleep.wake_up())
    finally:
        hidden.rename(weights)
    assert engine.runner.memory.kv_caches == []
    assert engine.step() is None
    carry_out(sleep, sleep.wake_up())
    engine.run()
    assert engine.tokens == expected


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_released_again_when_the_cache_does_not_fit(folders, monkeypatch, level):
    engine, sleep = sleeper(folders, "packed")
    expected = {slot: list(tokens) for slot, tokens in play(engine).items()}
    play(engine, 3)
    carry_out(sleep, sleep.sleep(level))
    loaded = []
    load = engine.runner.memory._load

    def watch():
        model = load()
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(engine.runner.memory, "_load", watch)
    with monkeypatch.context() as patch:
        patch.setattr(model_memory, "available_memory", lambda: 1000)
        with pytest.raises(RuntimeError, match=r"cannot restore weights and kv_cache.*bytes, and 1,000 are free"):
            carry_out(sleep, sleep.wake_up())
    assert [model() for model in loaded] == [None] * (level - 1)
    carry_out(sleep, sleep.wake_up())
    assert sleep.state == AWAKE
    engine.run()
    assert engine.tokens == expected


def test_engine_stays_asleep_when_graphs_cannot_be_captured_again(folders, monkeypatch):
    engine, sleep = sleeper(folders, "graphs")
    expected = {slot: list(tokens) for slot, tokens in play(engine).items()}
    carry_out(sleep, sleep.sleep(1))
    make = engine.runner.memory._make_capture

    def fail(device):
        def capture(compute):
            raise torch.OutOfMemoryError("no memory")

        return capture

    monkeypatch.setattr(engine.runner.memory, "_make_capture", fail)
    with pytest.raises(RuntimeError, match=r"CaptureError: .*no memory"):
        carry_out(sleep, sleep.wake_up())
    assert engine.runner.memory.graphs is None
    monkeypatch.setattr(engine.runner.memory, "_make_capture", make)
    carry_out(sleep, sleep.wake_up())
    assert engine.runner.memory.graphs is not None
    assert play(engine) == expected


def test_release_memory_frees_cycles_of_objects():
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
