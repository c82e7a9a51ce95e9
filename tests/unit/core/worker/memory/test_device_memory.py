"""The KV cache in memory of a device that outlives a core, with a stand-in for CUDA's driver."""

import contextlib
import os
import resource
import signal
import socket
from types import SimpleNamespace

import msgspec
import pytest
import torch
from support import stand_in_cuda
from support.stand_in_cuda import DEVICE, EXPORTS_NOTHING, FAILS, mapped_bytes

from vllm_mp.core.worker.memory import kept_memory as module
from vllm_mp.core.worker.memory import model_memory
from vllm_mp.core.worker.memory.cuda_driver import CudaDriver
from vllm_mp.core.worker.memory.kept_memory import kept_memory
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.core_link.mailbox import new_mailbox

SHAPES = [((2, 8), (2, 4))] * 3
BLOCK = 4
IDENTITY = ("model", torch.bfloat16, SHAPES)
CPU = torch.device("cpu")
MAPS = ("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")


@pytest.fixture(scope="module")
def library():
    return stand_in_cuda.library()


@pytest.fixture
def kept(library, monkeypatch):
    """What the parent of the cores keeps for them."""
    monkeypatch.setattr(module, "driver_of", lambda device: stand_in_cuda.driver())
    mailbox, descriptor = new_mailbox(), os.memfd_create("test")
    yield KeptCache(descriptors=[descriptor], mailboxes=[mailbox], adopts=True)
    while _started:
        _started.pop().empty()
    for each in (*mailbox, descriptor):
        os.close(each)


_started = []
"""Memory of the core in this process, if there is one; its end would give it back."""


def start(kept, identity=IDENTITY):
    """Return the memory of a core in this process, and the number of blocks that it finds."""
    memory = kept_memory(kept, 0, CPU)
    _started.append(memory)
    return memory, memory.num_blocks(BLOCK, identity)


def caches(kept, value=0, num_blocks=6):
    """Start a core that writes `value` to its caches if it finds none; return its memory and its caches."""
    memory, found = start(kept)
    made = memory.caches(found or num_blocks, SHAPES, torch.bfloat16)
    if not found:
        fill(made, value)
    return memory, made


def fill(made, value):
    for layer, (keys, values) in enumerate(made):
        keys.fill_(value + layer)
        values.fill_(value + 10 + layer)


def killed_core(kept, value=0, action=lambda memory, made: None):
    """Run a core in another process, which does `action` with what `caches` returns and is killed."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            action(*caches(kept, value))
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


def holds(made, value):
    return all(
        (keys == value + layer).all() and (values == value + 10 + layer).all()
        for layer, (keys, values) in enumerate(made)
    )


def is_waiting(kept):
    """Return whether a descriptor of memory waits for the next core."""
    [(_, receives)] = kept.mailboxes
    with socket.socket(fileno=os.dup(receives)) as end, contextlib.suppress(BlockingIOError):
        return bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_caches_of_a_killed_core_are_found_by_one_successor_after_another(kept):
    killed_core(kept, 3)
    for _ in range(2):
        killed_core(kept, 50)
    _, made = caches(kept)
    assert [(keys.shape, values.shape) for keys, values in made] == [((6, BLOCK, 2, 8), (6, BLOCK, 2, 4))] * 3
    assert holds(made, 3)
    assert os.fstat(kept.descriptors[0]).st_size < 2**16, "the caches are in the file"


@pytest.mark.parametrize("adopts", [True, False])
def test_memory_of_another_model_or_that_is_not_trusted_is_given_back(kept, adopts):
    killed_core(kept, 3)
    before = num_descriptors()
    identity = ("another model", *IDENTITY[1:]) if adopts else IDENTITY
    memory, found = start(msgspec.structs.replace(kept, adopts=adopts), identity)
    assert found == 0
    assert not is_waiting(kept)
    made = memory.caches(6, SHAPES, torch.bfloat16)
    assert not any(keys.any() or values.any() for keys, values in made)
    assert num_descriptors() == before + 3  # the file and both ends of the mailbox
    assert is_waiting(kept)


def test_memory_that_other_ranks_do_not_have_is_given_back(kept):
    killed_core(kept, 3)
    memory, found = start(kept)
    assert found == 6
    assert mapped_bytes(os.getpid())
    memory.empty()
    assert not is_waiting(kept)
    assert not mapped_bytes(os.getpid())
    [(keys, _), *_] = memory.caches(5, SHAPES, torch.bfloat16)
    assert len(keys) == 5
    assert not keys.any()


def test_memory_is_not_taken_for_that_of_another_header(kept):
    killed_core(kept, 3)
    file = os.pread(kept.descriptors[0], 2**20, 0)
    killed_core(msgspec.structs.replace(kept, adopts=False), 4)
    os.pwrite(kept.descriptors[0], file, 0)
    assert start(kept)[1] == 0
    assert not is_waiting(kept)


def test_sleep_gives_memory_back_and_what_a_woken_core_writes_is_found(kept):
    def sleep(memory, made):
        del made
        memory.release()
        assert not is_waiting(kept)
        assert not mapped_bytes(os.getpid())

    def sleep_and_wake_up(memory, made):
        sleep(memory, made)
        fill(memory.caches(6, SHAPES, torch.bfloat16), 7)

    killed_core(kept, 3, sleep_and_wake_up)

    def look(memory, made):
        assert holds(made, 7)

    killed_core(kept, 50, look)
    killed_core(kept, 50, sleep)
    assert start(kept)[1] == 0


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemExportToShareableHandle", *MAPS])
def test_memory_that_cannot_be_made_is_an_error_and_nothing_of_it_stays(kept, monkeypatch, function):
    memory, _ = start(kept)
    before = num_descriptors()
    monkeypatch.setenv(FAILS, function)
    for _ in range(2):
        with pytest.raises(OSError, match=f"{function}: out of memory"):
            memory.caches(6, SHAPES, torch.bfloat16)
        assert not memory.is_in_use
        assert not is_waiting(kept)
        assert not mapped_bytes(os.getpid())
        assert num_descriptors() == before
    monkeypatch.delenv(FAILS)
    assert not memory.caches(6, SHAPES, torch.bfloat16)[0][0].any()


@pytest.mark.parametrize("function", ["cuMemImportFromShareableHandle", *MAPS])
def test_memory_that_cannot_be_mapped_is_given_back(kept, monkeypatch, caplog, function):
    killed_core(kept, 3)
    monkeypatch.setenv(FAILS, function)
    memory, found = start(kept)
    assert found == 0
    assert "prompts are read again" in caplog.text
    assert not is_waiting(kept)
    assert not mapped_bytes(os.getpid())
    monkeypatch.delenv(FAILS)
    assert not memory.caches(6, SHAPES, torch.bfloat16)[0][0].any()


def test_memory_whose_descriptor_the_system_refuses_is_given_back(kept, monkeypatch, caplog):
    killed_core(kept, 3)
    memory = kept_memory(kept, 0, CPU)
    _started.append(memory)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = memory.num_blocks(BLOCK, IDENTITY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == 0
    assert "can open no more descriptors" in caplog.text
    assert not is_waiting(kept)


def test_core_whose_memory_was_taken_in_its_sleep_can_try_again(kept, monkeypatch):
    memory, made = caches(kept, 3)
    del made
    memory.release()
    monkeypatch.setenv(FAILS, "cuMemCreate")
    with pytest.raises(OSError, match="out of memory"):
        memory.caches(6, SHAPES, torch.bfloat16)
    assert memory.is_in_use
    monkeypatch.delenv(FAILS)
    fill(memory.caches(6, SHAPES, torch.bfloat16), 7)
    assert is_waiting(kept)


def test_core_that_cannot_have_the_file_gives_the_memory_of_the_core_before_back(kept, monkeypatch):
    killed_core(kept, 3)
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.0)
    first = kept_memory(kept, 0, CPU)
    assert first is not None
    assert kept_memory(kept, 0, CPU) is None
    assert not is_waiting(kept)


def test_memory_that_torch_cannot_use_is_given_back(kept, monkeypatch):
    memory, _ = start(kept)
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    with pytest.raises(OSError, match="torch cannot use memory that it has not allocated"):
        memory.caches(6, SHAPES, torch.bfloat16)
    assert not memory.is_in_use
    assert not is_waiting(kept)
    assert not mapped_bytes(os.getpid())


def test_descriptor_that_the_system_does_not_let_wait_costs_no_memory(kept, monkeypatch):
    memory, _ = start(kept)

    def refuse(*_):
        raise OSError("too many references")

    monkeypatch.setattr(socket, "send_fds", refuse)
    with pytest.raises(OSError, match="too many references"):
        memory.caches(6, SHAPES, torch.bfloat16)
    assert not mapped_bytes(os.getpid())


def test_driver_says_why_it_cannot_share_memory(library, monkeypatch):
    with pytest.raises(OSError, match=r"libcuda\.so\.none"):
        CudaDriver(DEVICE, "libcuda.so.none")
    with pytest.raises(OSError, match=r"the CUDA driver is too old: .*cu"):
        CudaDriver(DEVICE, "libc.so.6")
    with pytest.raises(OSError, match="cuDeviceGet: invalid argument"):
        CudaDriver(DEVICE + 1, library)
    monkeypatch.setenv(EXPORTS_NOTHING, "1")
    with pytest.raises(OSError, match="GPU 1 cannot export its memory"):
        CudaDriver(DEVICE, library)


def test_cache_ends_with_a_core_on_a_machine_without_such_a_driver(kept, monkeypatch, caplog):
    caplog.set_level("INFO")

    def missing(device):
        assert device == torch.device("cuda", 0)
        raise OSError("no driver")

    monkeypatch.setattr(module, "driver_of", missing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert kept_memory(kept, 0, torch.device("cuda")) is None
    assert "the KV cache ends with this core: no driver" in caplog.text


def test_caches_of_another_gpu_and_of_other_code_are_of_another_model(monkeypatch):
    def code(uuid="0", digest="a"):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="a GPU", uuid=uuid))
        monkeypatch.setattr(model_memory, "code_digest", lambda: digest)
        return model_memory._code_of(torch.device("cuda"))

    assert len({code(), code(uuid="1"), code(digest="b"), model_memory._code_of(CPU)}) == 4
