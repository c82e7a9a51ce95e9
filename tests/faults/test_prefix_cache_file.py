"""The prefix cache file: prompts that were read before are not read again, however the engine ended."""

import asyncio
import contextlib
import fcntl
import functools
import http.client
import os
import random
import resource
import signal
import threading
import urllib.error
from pathlib import Path

import pytest
from support.engine_fixtures import SLOW_STEPS
from support.server_process import served

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.errors import EngineDeadError
from vllm_mp.testing.engines import ENGINE, answer, eventually, greedy, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The river runs through the old town, past the mill and the bridges, and then to the sea. " * 12
BLOCK = 16


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prefixes"


def with_engine(small_model, ask, **options):
    """Return what the coroutine function `ask` returns for an engine with these options, which then ends."""
    with running_engine(small_model, **options) as engine:
        return asyncio.run(ask(engine))


async def ask_once(engine):
    """Return (output, status of the core) of a request for `PROMPT`."""
    return await answer(engine, PROMPT, greedy(24, ignore_eos=True)), await engine.core_status()


def is_found(output):
    """Whether all of the prompt was found except for its last tokens, which do not fill a block."""
    return output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // BLOCK * BLOCK


@pytest.mark.essential
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"quantization": "int8", "async_scheduling": True, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.extended),
        pytest.param({"recovery": False}, marks=pytest.mark.slow),
        pytest.param({"recover_kv_cache": "never", "block_size": 4}, marks=pytest.mark.slow),
    ],
    ids=["usual", "int8-overlap", "int8-cache", "no-recovery", "never"],
)
def test_prompt_is_not_read_again_by_the_next_engine(small_model, path, options):
    options = {"prefix_cache_file": str(path), **options}
    cold, _ = with_engine(small_model, ask_once, **options)
    warm, status = with_engine(small_model, ask_once, **options)
    size = options.get("block_size", BLOCK)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // size * size
    assert status["num_blocks_from_file"] == warm.num_cached_tokens // size
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert status["free_blocks"] == status["total_blocks"]


@pytest.mark.parametrize("fronts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompt_is_not_read_again_after_the_whole_server_was_killed(small_model, path, tmp_path, fronts):
    answers = []
    flags = ("--prefix-cache-file", str(path), "--api-server-count", str(fronts))
    for _ in range(2):
        with served(small_model, tmp_path, *flags) as server:
            server.wait_until_ready()
            body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            status, found = server.post("/v1/completions", body)
            assert status == 200
            answers.append(found)
            for pid in (server.core_pid(), server.pid):
                os.kill(pid, signal.SIGKILL)
        asyncio.run(eventually(functools.partial(is_let_go, path)))
    cold, warm = answers
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= warm["usage"]["prompt_tokens"] - BLOCK
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


async def block_bytes(engine):
    return (await engine.collective_rpc("get_cache_block_size_bytes"))[0]


def writers_of(pid):
    """Return the process ids of the writers that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"prefix_writer" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


async def is_let_go(path):
    """Whether no engine and no writer has the file, which on a busy machine may take longer than an engine waits."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_answers_are_the_same_after_kills_at_random_moments(small_model, path, tmp_path):
    """The file has room for half of the prompts, and the writer is often killed with the rest."""

    async def ask_all(engine):
        outputs = [await answer(engine, f"{number} {PROMPT}", greedy(8, ignore_eos=True)) for number in range(6)]
        return [output.outputs[0].text for output in outputs]

    rng, num_cached = random.Random(7), 0
    expected = with_engine(small_model, ask_all)
    size = 30_000 + 60 * with_engine(small_model, block_bytes)
    flags = ("--prefix-cache-file", str(path), "--prefix-cache-file-bytes", str(size))
    for _ in range(8):
        with served(small_model, tmp_path, *flags) as server:
            server.wait_until_ready()
            pids = [*writers_of(server.pid)[: rng.randrange(2)], server.core_pid(), server.pid]
            killer = threading.Timer(rng.random() * 1.5, kill, [pids])
            killer.start()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, http.client.HTTPException):
                for number in rng.sample(range(6), 6):
                    body = {"prompt": f"{number} {PROMPT}", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                    status, found = server.post("/v1/completions", body)
                    assert status == 200
                    assert found["choices"][0]["text"] == expected[number]
                    num_cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
            killer.join()
    assert num_cached > 0


def test_blocks_that_the_cache_has_evicted_are_read_from_the_file(small_model, path):
    """The KV cache has room for one of these prompts at a time."""
    size = with_engine(small_model, block_bytes)

    async def run(engine):
        return [await answer(engine, start + PROMPT, greedy(4, ignore_eos=True)) for start in ("A ", "B ", "C ")]

    async def run_twice(engine):
        outputs = [*await run(engine), *await run(engine)]
        return outputs, await engine.core_status()

    options = {"prefix_cache_file": str(path), "max_model_len": 512}
    cold = with_engine(small_model, run, **options)
    outputs, status = with_engine(small_model, run_twice, **options, kv_cache_memory_bytes=34 * size)
    assert all(is_found(output) for output in outputs)
    assert status["num_blocks_from_file"] > status["total_blocks"]
    assert [output.outputs[0].token_ids for output in outputs] == 2 * [output.outputs[0].token_ids for output in cold]


def test_file_stays_within_its_size_and_keeps_what_was_read_last(small_model, path):
    num_bytes = 30_000 + 30 * with_engine(small_model, block_bytes)

    async def fill(engine):
        for start in ("A ", "B ", "C "):
            await answer(engine, start + PROMPT, greedy(4, ignore_eos=True))

    options = {"prefix_cache_file": str(path), "prefix_cache_file_bytes": num_bytes}
    with_engine(small_model, fill, **options)
    assert path.stat().st_size <= num_bytes
    last = with_engine(small_model, lambda engine: answer(engine, "C " + PROMPT, greedy(4)), **options)
    assert is_found(last)


def test_reset_and_sleep_without_weights_empty_the_file_and_light_sleep_keeps_it(small_model, path):
    def with_call(call):
        async def run(engine):
            await ask_once(engine)
            await call(engine)

        with_engine(small_model, run, prefix_cache_file=str(path))
        return is_found(with_engine(small_model, ask_once, prefix_cache_file=str(path))[0])

    async def sleep(engine, level):
        await engine.sleep(level)
        await engine.wake_up()

    with_engine(small_model, ask_once, prefix_cache_file=str(path))
    assert with_call(lambda engine: sleep(engine, 1))
    assert not with_call(lambda engine: engine.reset_prefix_cache())
    assert not with_call(lambda engine: sleep(engine, 2))


def test_other_salt_model_and_damage_find_nothing(small_model, path):
    options = {"prefix_cache_file": str(path)}
    cold, _ = with_engine(small_model, ask_once, **options)

    async def ask_salted(engine):
        return await answer(engine, {"prompt": PROMPT, "cache_salt": "mine"}, greedy(24, ignore_eos=True))

    assert with_engine(small_model, ask_salted, **options).num_cached_tokens == 0
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content), 1000):
        content[place] ^= 1
    path.write_bytes(content)
    damaged, _ = with_engine(small_model, ask_once, **options)
    assert damaged.num_cached_tokens < len(cold.prompt_token_ids) - BLOCK
    assert damaged.outputs[0].token_ids == cold.outputs[0].token_ids
    for change in ({"dtype": "bfloat16"}, {"max_model_len": 512}):
        with_engine(small_model, ask_once, **options)
        other, _ = with_engine(small_model, ask_once, **options, **change)
        assert other.num_cached_tokens == 0


def test_second_engine_on_the_file_serves_without_it(small_model, path, caplog):
    async def both(first):
        with running_engine(small_model, prefix_cache_file=str(path)) as second:
            return [await ask_once(engine) for engine in (first, second)]

    (first, _), (second, status) = with_engine(small_model, both, prefix_cache_file=str(path))
    assert "another engine uses it" in caplog.text
    assert status["num_blocks_from_file"] == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_what_a_crashing_core_has_computed_is_not_kept(small_model, path):
    options = {**ENGINE, "prefix_cache_file": str(path), "fault_injection": "abort@step=3", "max_core_restarts": 0}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(small_model), **options))
    try:
        with pytest.raises(EngineDeadError):
            asyncio.run(answer(engine, PROMPT, greedy(24, ignore_eos=True)))
    finally:
        engine.shutdown()
    output, _ = with_engine(small_model, ask_once, prefix_cache_file=str(path))
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_core_is_followed_by_another_that_writes_on(small_model, path, strike):
    async def run(engine):
        running = asyncio.create_task(ask_once(engine))

        async def has_run():
            return (await engine.core_status())["step"] > 8

        await eventually(has_run)
        os.kill(engine.cores.first.supervisor.core.process.pid, strike)
        return await running

    options = {"prefix_cache_file": str(path), "fault_injection": SLOW_STEPS}
    cold, _ = with_engine(small_model, run, **options)
    warm, _ = with_engine(small_model, ask_once, prefix_cache_file=str(path))
    assert is_found(warm)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.slow
def test_each_of_several_cores_finds_what_it_had_read(small_model, path):
    async def ask_both(engine):
        outputs = []
        for number in range(2):
            stream = engine.generate(f"{number} {PROMPT}", greedy(4), str(number), data_parallel_rank=number)
            outputs.append([output async for output in stream][-1])
        return outputs

    options = {"prefix_cache_file": str(path), "data_parallel_size": 2}
    with_engine(small_model, ask_both, **options)
    assert all(map(is_found, with_engine(small_model, ask_both, **options)))


def test_file_that_cannot_grow_costs_the_cache_alone(small_model, path, capfd):
    size = with_engine(small_model, block_bytes)
    options = {"prefix_cache_file": str(path), "prefix_cache_file_bytes": 2**22}
    room = 30_000 + 2**22 // size * 80 + 3 * size  # header and entries, and a few blocks

    async def run(engine):
        resource.prlimit(writers_of(os.getpid())[0], resource.RLIMIT_FSIZE, (room, room))
        return await ask_once(engine)

    cold, _ = with_engine(small_model, run, **options)
    assert path.stat().st_size <= room
    assert "does not grow" in capfd.readouterr().err
    warm, _ = with_engine(small_model, ask_once, **options)
    assert 0 < warm.num_cached_tokens < len(warm.prompt_token_ids) - BLOCK
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_killed_writer_costs_the_cache_alone(small_model, path):
    async def run(engine):
        launcher = engine.cores.first.supervisor._source
        launcher._cache._prefix_file._writer.kill()
        return await ask_once(engine)

    output, _ = with_engine(small_model, run, prefix_cache_file=str(path))
    assert len(output.outputs[0].token_ids) == 24
