"""Hostile frames harm no other client or request: short campaigns of `tools/fuzz`."""

import asyncio
import contextlib

import pytest

from vllm_mp import AsyncLLM
from vllm_mp.testing.engines import answer, greedy
from vllm_mp.testing.fuzzing import attack_client, attack_core, core_under_attack


@pytest.mark.parametrize("over_tcp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ipc", "tcp"])
def test_core_under_attack_serves_other_clients_and_leaks_nothing(tmp_path, over_tcp):
    with core_under_attack(tmp_path, over_tcp=over_tcp) as target:
        report = asyncio.run(attack_core(target, 16_000, seed=5))
    assert not report.breaches, "\n".join(report.breaches)
    assert report.num_sent >= 16_000
    assert report.calm_answers
    for episode in ("raw connection", "fresh identity", "pause", "sleep", "megabytes", "never reads", "flood"):
        assert report.sent[episode], "the campaign was too short for every episode"


def test_other_streams_continue_while_the_core_sends_hostile_frames(tmp_path):
    report = asyncio.run(attack_client(tmp_path, 15_000, seed=5))
    assert not report.breaches
    assert report.num_sent >= 15_000
    assert report.calm_answers
    assert report.answers["victim failed"]


def test_core_survives_more_connections_than_its_soft_limit_of_descriptors(tmp_path):
    with core_under_attack(tmp_path, before="ulimit -S -n 64") as target, contextlib.ExitStack() as stack:
        first = AsyncLLM.connect(target.address)
        stack.callback(first.shutdown)
        for _ in range(200):
            stack.enter_context(target.raw_connection())
        second = AsyncLLM.connect(target.address)
        stack.callback(second.shutdown)
        for engine in (first, second):
            assert asyncio.run(answer(engine, {"prompt_token_ids": [1]}, greedy(3))).finished
