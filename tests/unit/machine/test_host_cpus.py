"""The CPUs that a process may use, with made-up machines in place of this one."""

import os
import threading

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.machine import host_cpus
from vllm_mp.machine.host_cpus import CpuList, bind_process, default_threads, describe, divide_cpus, parse_cpus


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with two NUMA nodes of four CPUs."""
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{4 * node}-{4 * node + 3}\n")
    monkeypatch.setattr(host_cpus, "_NODES", tmp_path)
    bound = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(bound))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: (bound.clear(), bound.update(cpus)))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", CpuList(frozenset({3}), frozenset())),
        ("0-2, 8", CpuList(frozenset({0, 1, 2, 8}), frozenset())),
        ("node1,0", CpuList(frozenset({0}), frozenset({1}))),
    ],
)
def test_cpus_are_numbers_ranges_and_nodes(text, expected):
    assert parse_cpus(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "node", "0-", "1" * 9])
def test_text_that_names_no_cpus_is_refused_before_a_core_starts(text):
    with pytest.raises(ValueError, match="give CPU numbers, ranges or NUMA nodes"):
        parse_cpus(text)
    if text:
        with pytest.raises(ValueError, match="give CPU numbers, ranges or NUMA nodes"):
            AsyncEngineArgs(cpus=text).create_engine_config()


def test_each_usable_cpu_gets_one_thread(machine):
    assert default_threads() == 8
    bind_process("node1")
    assert default_threads() == 4


@pytest.mark.parametrize(("limit", "threads"), [(1.5, 2), (0.1, 1), (9.0, 8), (None, 8)])
def test_threads_are_no_more_than_the_cpu_time_of_the_container(machine, monkeypatch, limit, threads):
    monkeypatch.setattr(host_cpus, "cpu_time_limit", lambda: limit)
    assert default_threads() == threads


def test_bound_cpus_are_described_with_their_nodes(machine):
    assert describe(bind_process("node1")) == "CPUs 4-7 (NUMA nodes 1 of 2)"


def test_node_stands_for_the_cpus_of_it_that_the_process_may_use(machine):
    bind_process("1,4-6")
    assert bind_process("node1") == {4, 5, 6}


@pytest.mark.parametrize(
    ("text", "message"),
    [("node7", "no NUMA node 7; the nodes are 0-1"), ("6-9", "may use the CPUs 0-7 only")],
)
def test_cpus_that_the_process_may_not_use_are_refused(machine, text, message):
    with pytest.raises(ValueError, match=message):
        bind_process(text)


def test_threads_that_are_made_later_use_the_same_cpus():
    seen = []

    def bind_and_look() -> None:
        bind_process(str(min(os.sched_getaffinity(0))))
        later = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        later.start()
        later.join()

    thread = threading.Thread(target=bind_and_look)  # so that the thread of the tests stays free
    thread.start()
    thread.join()
    assert seen == [{min(os.sched_getaffinity(0))}]


@pytest.mark.parametrize(
    ("text", "num_parts", "expected"),
    [
        ("", 2, ["0-3", "4-7"]),
        ("", 3, ["0-1", "2-4", "5-7"]),
        ("node1", 2, ["4-5", "6-7"]),
        ("1,3,5,7", 4, ["1", "3", "5", "7"]),
        ("6-7", 3, ["6", "7", "6"]),
    ],
)
def test_cpus_are_divided_among_cores(machine, text, num_parts, expected):
    assert [divide_cpus(text, part, num_parts) for part in range(num_parts)] == expected


def test_cpus_of_a_node_stay_together_when_they_are_divided(machine):
    for node, cpus in enumerate(("0,2,4,6", "1,3,5,7")):
        (machine / f"node{node}" / "cpulist").write_text(cpus)
    assert [divide_cpus("", part, 2) for part in range(2)] == ["0,2,4,6", "1,3,5,7"]


def test_cpus_that_the_process_may_not_use_are_not_divided(machine):
    with pytest.raises(ValueError, match="cpus='8-9': this process may use the CPUs 0-7 only"):
        divide_cpus("8-9", 0, 2)


def test_cores_share_the_cpu_time_of_the_container(machine, monkeypatch):
    monkeypatch.setattr(host_cpus, "cpu_time_limit", lambda: 4.0)
    assert [default_threads(num_cores) for num_cores in (1, 2, 3, 8)] == [4, 2, 2, 1]
