"""After which deaths the next core is told to use the KV cache that was left."""

import os

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


def test_memory_is_given_back_after_two_deaths_for_want_of_it(files_with):
    files = files_with()
    assert files.for_successor_of(death(1, "out_of_memory")).adopts
    assert not files.for_successor_of(death(2, "out_of_memory")).adopts
    assert files.for_successor_of(death(3, is_from_outside=True)).adopts


@pytest.mark.parametrize("options", [{"recovery": False}, {"device": "cuda"}, {"recover_kv_cache": "never"}])
def test_engine_that_cannot_use_a_cache_again_keeps_none(files_with, options):
    assert files_with(**options).descriptors == []


def test_each_rank_has_a_file_which_a_new_program_does_not_inherit(files_with):
    descriptors = files_with(tensor_parallel_size=3).descriptors
    assert len(descriptors) == 3
    assert not any(map(os.get_inheritable, descriptors))
