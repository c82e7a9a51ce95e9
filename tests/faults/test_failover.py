"""One client of several shared cores: its streams go on with another core when theirs dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_mp import AsyncLLM, EngineStartError, RequestOutputKind, SamplingParams
from vllm_mp.testing.engines import eventually, make_keys, replay_core, rest
from vllm_mp.testing.faults import Baseline, run_parallel_soak

pytestmark = pytest.mark.usefixtures("forked_cores")

RATE = "200"


@contextlib.contextmanager
def replay_cores(tmp_path, count, *flags):
    """Run replay cores, and yield their addresses."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for i in range(count):
            folder = tmp_path / str(i)
            folder.mkdir()
            addresses.append(stack.enter_context(replay_core(folder, "--rate", RATE, *flags)))
        yield addresses


def start_again(address):
    """Start another replay core at an address."""
    return subprocess.Popen([sys.executable, "-m", "vllm_mp.replay_core", "--listen", address, "--rate", RATE])


def test_client_of_three_cores_loses_and_gets_cores_back_while_streams_run(default_model, tmp_path):
    async def stream(engine, index, **options):
        params = SamplingParams(max_tokens=400, ignore_eos=True, seed=index, output_kind=RequestOutputKind.DELTA)
        return [
            token
            async for output in engine.generate([index + 1] * 100, params, **options)
            for token in output.outputs[0].token_ids
        ]

    async def run(engine, addresses):
        expected = await asyncio.gather(*(stream(engine, i) for i in range(9)))
        tasks = [asyncio.create_task(stream(engine, i)) for i in range(9)]

        async def all_run():
            return all(len(client.requests.streams()) == 3 for client in engine.cores.clients)

        await eventually(all_run)
        cores = (await engine.core_status())["cores"]
        assert [core["rank"] for core in cores] == [0, 1, 2]
        os.kill(cores[1]["pid"], signal.SIGKILL)

        async def is_moved():
            return [len(client.requests.streams()) for client in engine.cores.clients][1] == 0

        await eventually(is_moved)
        again = start_again(addresses[1])
        try:

            async def is_back():
                return engine.cores.client(1).has_core

            await eventually(is_back)
            assert await asyncio.gather(*tasks) == expected
            assert await stream(engine, 5, data_parallel_rank=1) == expected[5]
            assert engine.stats.recovered_requests.value == 3
        finally:
            again.terminate()
            again.wait(30)

    with replay_cores(tmp_path, 3) as addresses:
        engine = AsyncLLM.connect(addresses)
        try:
            asyncio.run(run(engine, addresses))
        finally:
            engine.shutdown()


def test_cores_of_different_models_are_refused(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    with replay_core(first) as one, replay_core(second, "--max-model-len", "512") as other:
        with pytest.raises(EngineStartError, match="have different models: max_model_len 512 instead of"):
            AsyncLLM.connect(f"{one},{other}")
        engine = AsyncLLM.connect(one)
        try:
            with pytest.raises(EngineStartError, match="have different models"):
                asyncio.run(engine.add_core(other))
        finally:
            engine.shutdown()


def test_client_of_one_core_adds_and_removes_another(tmp_path):
    async def run(engine, address):
        path = Path(address.removeprefix("ipc://"))
        link = tmp_path / "link"
        link.symlink_to(path.parent)
        added = await asyncio.gather(engine.add_core(address), engine.add_core(address), return_exceptions=True)
        assert sorted(map(str, added))[1].startswith(f"address={address!r}: the core with rank ")
        for other in (address, f"ipc://{link}/../{path.parent.name}/{path.name}", f"ipc://{link}/{path.name}"):
            with pytest.raises(ValueError, match="is there already; give the address of another core"):
                await engine.add_core(other)
        (_, added) = engine.core_ranks
        params = SamplingParams(max_tokens=100, ignore_eos=True, seed=3)
        streams = [asyncio.create_task(rest(engine.generate([7] * 20, params))) for _ in range(4)]

        async def both_run():
            return all(len(client.requests.streams()) == 2 for client in engine.cores.clients)

        await eventually(both_run)
        await engine.remove_core(0)
        answers = await asyncio.gather(*streams)
        assert all(each.token_ids == answers[0].token_ids for each in answers)
        with pytest.raises(ValueError, match="no other core"):
            await engine.remove_core(added)

    with replay_cores(tmp_path, 2) as (one, other):
        engine = AsyncLLM.connect(one)
        try:
            asyncio.run(run(engine, other))
        finally:
            engine.shutdown()


def test_number_of_key_files_must_fit(tmp_path):
    _, client = make_keys(tmp_path)
    with pytest.raises(ValueError, match="must be one file, or one for each of 2 addresses"):
        AsyncLLM.connect(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], key_file=[client] * 3)


@pytest.mark.parametrize("kills", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_no_output_is_lost_when_either_of_two_cores_is_killed_again_and_again(small_model, kills, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)  # where everything that is left was left by this engine
        baseline = Baseline(small_model, {"num_threads": 1}, streams=12, max_tokens=40, pace_s=0.01)
        result = run_parallel_soak(baseline, kills=kills, fault_injection=baseline.pace)
    assert result.broken == []
    assert result.kills == kills
    assert result.moved > 0
