"""After which deaths the next core is told to use the KV cache that was left."""

import os
import socket

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.client.cores.sources.kept_cache_files import KeptCacheFiles
from vllm_mp.core_link.core_launch import Predecessor


@pytest.fixture
def files_with(small_config):
    made = []

    def make(**options):
        made.append(KeptCacheFiles(small_config(**options)))
        return made[-1]

    yield make
    for files in made:
        files.close()


@pytest.fixture
def small_config(default_model):
    return lambda **options: AsyncEngineArgs(str(default_model), **options).create_engine_config()


def death(incarnation=1, kind="signal", is_from_outside=False):
    return Predecessor(incarnation=incarnation, cause="it died", kind=kind, is_from_outside=is_from_outside, in_step=[])


@pytest.mark.parametrize(
    ("kind", "is_from_outside", "is_trusted"),
    [
        ("signal", True, True),
        ("out_of_memory", False, True),
        ("hang", False, True),
        ("signal", False, False),
        ("exit", False, False),
        ("connection", False, False),
    ],
)
def test_cause_of_a_death_decides_whether_the_cache_is_used(files_with, kind, is_from_outside, is_trusted):
    last = death(kind=kind, is_from_outside=is_from_outside)
    assert files_with().for_successor_of(last).adopts == is_trusted
    assert files_with(recover_kv_cache="always").for_successor_of(last).adopts
    assert files_with(recover_kv_cache="never").for_successor_of(last) is None


def test_first_core_and_the_second_attempt_to_start_a_successor_use_no_cache(files_with):
    files = files_with()
    assert not files.for_successor_of(None).adopts
    first = death(1, is_from_outside=True)
    assert [files.for_successor_of(first).adopts for _ in range(3)] == [True, False, False]
    assert files.for_successor_of(death(2, is_from_outside=True)).adopts


def test_second_attempt_uses_the_cache_if_another_process_has_killed_the_first(files_with):
    files, dead = files_with(), death(1, is_from_outside=True)
    assert files.for_successor_of(dead).adopts
    files.excuse_successor()
    assert [files.for_successor_of(dead).adopts for _ in range(2)] == [True, False]


def test_memory_is_given_back_after_two_deaths_for_want_of_it(files_with):
    files = files_with()
    assert files.for_successor_of(death(1, "out_of_memory")).adopts
    assert not files.for_successor_of(death(2, "out_of_memory")).adopts
    assert files.for_successor_of(death(3, is_from_outside=True)).adopts


@pytest.mark.parametrize("options", [{"recovery": False}, {"recover_kv_cache": "never"}])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_that_cannot_use_a_cache_again_keeps_none(files_with, device, options):
    assert files_with(device=device, **options).inherited == []


def leave_descriptor(kept):
    """Do what a core does that leaves memory of a device; return the end of a pipe that ends when it is given back."""
    reader, writer = os.pipe()
    [(sends, _)] = kept.mailboxes
    with socket.socket(fileno=os.dup(sends)) as end:
        socket.send_fds(end, [b"name"], [writer])
    os.close(writer)
    os.set_blocking(reader, False)
    return reader


def is_given_back(reader):
    try:
        return os.read(reader, 1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_memory_of_a_device_waits_for_a_trusted_successor_and_is_given_back_before_another_starts(files_with, device):
    files = files_with(device=device)
    reader = leave_descriptor(files.for_successor_of(None))
    assert files.for_successor_of(death(is_from_outside=True)).adopts
    assert not is_given_back(reader)
    assert not files.for_successor_of(death(2)).adopts
    assert is_given_back(reader)
    os.close(reader)


def test_memory_of_a_device_ends_with_the_parent(files_with):
    files = files_with(device="cuda")
    reader = leave_descriptor(files.for_successor_of(None))
    files.close()
    assert is_given_back(reader)
    os.close(reader)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_process_that_takes_over_has_the_same_files_and_mailboxes(files_with, small_config, device, ranks):
    options = {"device": device, "tensor_parallel_size": ranks}
    files = files_with(**options)
    assert len(files.mailboxes) == (0 if device == "cpu" else ranks)
    given = [os.dup(each) for each in files.inherited]
    heir = KeptCacheFiles(small_config(**options), given)
    kept = heir.for_replacement()
    assert [*kept.descriptors, *(end for mailbox in kept.mailboxes for end in mailbox)] == given
    heir.close()
    files.close()


@pytest.mark.parametrize(("device", "num_files"), [("cpu", 1), ("cuda", 3)])
def test_process_of_another_number_of_ranks_takes_no_files_over(files_with, small_config, device, num_files):
    files = files_with(device=device, tensor_parallel_size=3)
    heir = KeptCacheFiles(small_config(device=device), [os.dup(each) for each in files.inherited])
    assert len(heir.inherited) == num_files
    own, others = ({os.fstat(each).st_ino for each in one.inherited} for one in (heir, files))
    assert not own & others
    heir.close()


def test_process_on_cpus_takes_over_what_one_that_chose_the_device_kept(files_with, small_config):
    given = [os.dup(each) for each in files_with(device="auto").inherited]
    heir = KeptCacheFiles(small_config(device="cpu"), given)
    assert heir.descriptors == given[:1]
    heir.close()


def test_each_rank_has_a_file_which_a_new_program_does_not_inherit(files_with):
    descriptors = files_with(tensor_parallel_size=3).descriptors
    assert len(descriptors) == 3
    assert not any(map(os.get_inheritable, descriptors))
