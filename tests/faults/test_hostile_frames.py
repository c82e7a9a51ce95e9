"""Hostile frames hurt nobody: a short run of what `tools/fuzz` does at length."""

import asyncio
import contextlib
import socket

from vllm_mp import AsyncLLM
from vllm_mp.testing.engines import answer, greedy
from vllm_mp.testing.fuzzing.client_campaign import attack_client
from vllm_mp.testing.fuzzing.core_campaign import attack_core, tormented_core


def test_a_core_under_hostile_frames_serves_the_others_and_leaks_nothing(tmp_path):
    with tormented_core(tmp_path) as address:
        report = asyncio.run(attack_core(address, 29_000, seed=5))
    assert not report.breaches
    assert report.num_sent >= 29_000
    assert report.calm_answers
    for episode in ("raw connection", "fresh identity", "pause", "sleep", "megabytes", "never reads", "flood"):
        assert report.sent[episode], "the run was too short for everything"


def test_the_good_streams_of_a_client_of_a_mad_core_go_on(tmp_path):
    report = asyncio.run(attack_client(tmp_path, 20_000, seed=5))
    assert not report.breaches
    assert report.num_sent >= 20_000
    assert report.calm_answers
    assert report.answers["victim failed"]


def test_more_connections_than_a_process_may_have_by_default_do_not_end_the_core(tmp_path):
    with tormented_core(tmp_path, before="ulimit -S -n 64") as address, contextlib.ExitStack() as stack:
        first = AsyncLLM.connect(address)
        stack.callback(first.shutdown)
        for _ in range(200):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(address.removeprefix("ipc://"))
        second = AsyncLLM.connect(address)
        stack.callback(second.shutdown)
        for engine in (first, second):
            assert asyncio.run(answer(engine, {"prompt_token_ids": [1]}, greedy(3))).finished
