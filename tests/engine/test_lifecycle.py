"""How engines start and end. They leave no process, folder or open file behind."""

import asyncio
import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineDeadError, EngineStartError, SamplingParams, UsageContext
from vllm_mp.arguments import unserved_arguments
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, rest

pytestmark = pytest.mark.usefixtures("forked_cores")

SCRIPT_OPTIONS = "dtype='float32', max_model_len=256, kv_cache_memory_bytes=2**26"


def run_script(default_model, code, cwd, **options):
    """Run `code` as a user's script, in which `ARGS` are the engine's options."""
    script = cwd / "app.py"
    args = f"AsyncEngineArgs(model={str(default_model)!r}, {SCRIPT_OPTIONS})"
    script.write_text(
        "import asyncio, os, sys\nfrom vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams\n"
        f"ARGS = {args}\n" + textwrap.dedent(code)
    )
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=cwd, check=False, **options
    )


def wait_until_gone(pid):
    try:
        psutil.Process(pid).wait(60)
    except psutil.NoSuchProcess:
        return


@pytest.fixture
def runtime_folders(monkeypatch):
    """Returns the runtime folders of engines in a folder for temporary files that no other program uses."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, for the sockets in it
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield lambda: list(Path(folder).glob("vllm_mp-*"))


def test_app_that_makes_its_engine_at_import_needs_no_main_guard(default_model, tmp_path, runtime_folders):
    done = run_script(
        default_model,
        """
        llm = AsyncLLM.from_engine_args(ARGS)
        print("made", os.getpid())

        async def main():
            async for output in llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=5)):
                pass
            print(output.outputs[0].text)

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("made") == 1, "the script ran again in the core"
    assert "Paris" in done.stdout
    assert done.stderr == ""
    assert runtime_folders() == [], "the runtime folder outlived the interpreter"


def test_engine_can_be_made_in_a_running_loop_and_as_a_context_manager(default_model, tmp_path):
    done = run_script(
        default_model,
        """
        async def main():
            async with AsyncLLM.from_engine_args(ARGS) as llm:
                print((await llm.core_status())["pid"])
                async for output in llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=6)):
                    pass
                print(output.outputs[0].text)
            assert llm.is_stopped and not llm.is_running
            print(sorted(os.listdir("/proc/self/fd")))

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    pid, text = done.stdout.splitlines()[:2]
    assert "4, 5" in text
    assert not psutil.pid_exists(int(pid))


@pytest.mark.essential
def test_core_ends_when_its_client_is_killed(small_model, tmp_path, runtime_folders):
    done = run_script(
        small_model,
        """
        llm = AsyncLLM.from_engine_args(ARGS)

        async def main():
            stream = llm.generate("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            print((await llm.core_status())["pid"], flush=True)
            os.kill(os.getpid(), 9)

        asyncio.run(main())
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL
    wait_until_gone(int(done.stdout))
    assert runtime_folders() == []


def test_core_ends_when_its_engine_is_garbage_collected(small_model):
    async def run():
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(small_model), max_model_len=256, kv_cache_memory_bytes=2**26)
        )
        assert (await answer(engine, "Hi", greedy(3))).finished
        pid = (await engine.core_status())["pid"]
        del engine
        gc.collect()
        await asyncio.to_thread(wait_until_gone, pid)

    asyncio.run(run())


def test_shutdown_is_idempotent_and_ends_live_and_later_requests_with_an_error(make_small_engine):
    engine = make_small_engine(max_model_len=256)

    async def run():
        stream = engine.generate("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        pid = (await engine.core_status())["pid"]
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="shut down"):
            await answer(engine, "Hello", greedy(3))
        for call in (
            engine.tokenize("Hello"),
            engine.detokenize([1]),
            engine.prompt_tokens("Hello"),
            engine.has_room("Hello", 3),
        ):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call
        return pid

    pid = asyncio.run(run())
    engine.shutdown()
    assert not psutil.pid_exists(pid)
    assert engine.is_stopped
    assert not engine.errored


@pytest.mark.essential
def test_64_streams_with_random_aborts_leave_nothing_behind(make_small_engine):
    # Its steps take long enough for streams to receive most tokens separately.
    engine = make_small_engine(
        max_num_seqs=32,
        kv_cache_memory_bytes=2**22,
        max_model_len=128,
        fault_injection="slow@step=*,seconds=0.01",
    )
    rng = random.Random(5)
    word_ids = engine.get_tokenizer()("one two three four five six seven eight").input_ids

    async def play(i):
        ids = [rng.choice(word_ids) for _ in range(rng.randrange(1, 50))]
        params = SamplingParams(max_tokens=rng.randrange(1, 30), seed=i, ignore_eos=True)
        fate = i % 4
        if fate == 0:
            return await answer(engine, ids, params)
        stream = engine.generate(ids, params, f"request-{i}")
        leave_after = rng.randrange(0, 12)
        count = 0
        async for output in stream:
            count += 1
            if count > leave_after and not output.finished:
                if fate == 1:
                    break
                if fate == 2:
                    await engine.abort(f"request-{i}")
                else:
                    raise asyncio.CancelledError
        await stream.aclose()
        return None

    async def run():
        await answer(engine, word_ids, SamplingParams(max_tokens=2))  # starts the threads that compute steps
        process = psutil.Process()
        core = psutil.Process((await engine.core_status())["pid"])
        before = process.num_fds(), core.num_fds(), core.num_threads(), len(asyncio.all_tasks())
        for _ in range(2):
            results = await asyncio.gather(*(play(i) for i in range(64)), return_exceptions=True)
            errors = [result for result in results if isinstance(result, Exception)]
            assert not errors, errors
            await eventually(lambda: is_empty(engine))
        gc.collect()
        await asyncio.sleep(0)
        assert await engine.get_num_unfinished_requests() == 0
        assert engine.output_processor.num_slots_in_use == 0
        await eventually(lambda: _has_settled(process, core, before))

    asyncio.run(run())


async def _has_settled(process, core, before):
    """Return whether both processes have no more open files, threads and tasks than `before`."""
    tasks = [task for task in asyncio.all_tasks() if "microbatch" not in repr(task)]
    now = process.num_fds(), core.num_fds(), core.num_threads(), len(tasks)
    return all(a <= b for a, b in zip(now, before, strict=True))


def test_background_loop_stops_and_starts_again_while_the_core_lives(small_model, caplog):
    config = AsyncEngineArgs(model=str(small_model), max_model_len=256, fault_injection=SLOW_STEPS)
    engine = AsyncLLM.from_vllm_config(
        config.create_engine_config(),
        False,
        UsageContext.LLM_CLASS,
        None,
        disable_log_stats=True,
        disable_log_requests=False,
    )

    async def run():
        pid = (await engine.core_status())["pid"]
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="start_background_loop"):
            await answer(engine, "Hi", greedy(2))
        await engine.check_health()
        await engine.abort("unknown")
        await engine.start_background_loop()
        assert engine.is_running
        with pytest.raises(RuntimeError, match="runs already"):
            engine.start_background_loop()
        stream = engine.generate("Hi", SamplingParams(max_tokens=200, ignore_eos=True), "long")
        early = await anext(stream)
        engine.shutdown_background_loop()
        await engine.shutdown_background_loop()
        assert not engine.is_running
        assert not engine.errored
        end = await rest(stream)
        assert end.finish_reason == "abort"
        assert end.token_ids[: len(early.outputs[0].token_ids)] == early.outputs[0].token_ids
        with pytest.raises(EngineDeadError, match="start_background_loop"):
            await answer(engine, "Hi", greedy(2))
        await eventually(lambda: is_empty(engine))
        assert (await engine.core_status())["pid"] == pid
        engine.start_background_loop()
        assert (await answer(engine, "Hi", greedy(2), "short")).finished
        await engine.check_health()

    try:
        with caplog.at_level(logging.INFO):
            asyncio.run(run())
        lines = [record.getMessage() for record in caplog.records]
        for begin in ("Added request long: ", "Aborted request long: ", "Added request short: "):
            assert len([line for line in lines if line.startswith(begin)]) == 1
        assert "Finished request short: 2 tokens generated" in lines
    finally:
        engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.start_background_loop()


def test_request_starts_a_stopped_background_loop_unless_that_was_left_to_the_caller(make_small_engine):
    engine = make_small_engine(max_model_len=256)

    async def run():
        stream = engine.generate("Hi", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        being_admitted = asyncio.create_task(answer(engine, "word " * 100, greedy(2)))
        await asyncio.sleep(0)
        engine.shutdown_background_loop()
        assert (await rest(stream)).finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="start_background_loop"):
            await being_admitted
        assert not engine.is_running
        await engine.check_health()
        assert (await answer(engine, "Hi", greedy(2))).finished
        assert engine.is_running

    asyncio.run(run())


def test_engine_returns_its_configuration_tokenizer_and_status(llm):
    async def run():
        assert (await llm.get_vllm_config()).cache_config.num_blocks > 0
        assert (await llm.get_model_config()).max_model_len == 1024
        assert (await llm.get_scheduler_config()).max_num_seqs == 256
        assert (await llm.get_parallel_config()).world_size == 1
        assert await llm.get_lora_config() is None
        assert (await llm.get_decoding_config()) is not None
        assert await llm.get_tokenizer() is llm.get_tokenizer()
        status = await llm.core_status()
        assert status["incarnation"] == 1
        assert status["heartbeat_age"] < 5
        await llm.check_health()

    asyncio.run(run())
    assert llm.is_running
    assert not llm.errored
    assert llm.dead_error is None


def test_options_of_memory_that_a_cpu_does_not_use_are_told(small_model, monkeypatch, caplog):
    monkeypatch.setattr(unserved_arguments, "_told", set())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    options = {"model": str(small_model), "device": "cpu", "num_threads": 1, "gpu_memory_utilization": 0.25}
    for size in (2**24, None):
        AsyncLLM.from_engine_args(AsyncEngineArgs(**options, kv_cache_memory_bytes=size)).shutdown()
        told = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
        assert len(told) == (0 if size else 2)
    assert told[0].startswith("VLLM_CPU_KVCACHE_SPACE='2' has no effect: on a CPU kv_cache_memory_bytes sets")
    assert told[1].startswith("gpu_memory_utilization=0.25 has no effect: on a CPU kv_cache_memory_bytes sets")


def test_engine_without_a_tokenizer_takes_and_returns_token_ids(make_small_engine):
    engine = make_small_engine(skip_tokenizer_init=True, max_model_len=128)
    output = asyncio.run(answer(engine, [504, 3575, 282], greedy(4)))
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""
    with pytest.raises(ValueError, match="tokenizer"):
        asyncio.run(answer(engine, "text", greedy(4)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory_bytes": 1000}, "no space for the cache"),
        ({"kv_cache_memory_bytes": 2**22}, "max_model_len"),
        ({"device": "cuda"}, "device='cuda'"),
    ],
    ids=str,
)
def test_error_says_why_a_core_cannot_start(default_model, options, words, runtime_folders):
    with pytest.raises(EngineStartError, match=re.escape(words)):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(default_model), max_model_len=1024, **options))
    assert runtime_folders() == []


def test_error_at_start_names_broken_weights(default_model, tmp_path):
    for file in default_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = next(default_model.glob("*.safetensors"))
    (tmp_path / weights.name).write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises((EngineStartError, ValueError), match=weights.name):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path)))


def test_error_at_start_names_a_config_json_that_cannot_be_read_or_served(default_model, tmp_path):
    for file in default_model.iterdir():
        os.symlink(file, tmp_path / file.name)
    config = tmp_path / "config.json"
    config.unlink()
    config.write_text("{ not json")
    with pytest.raises(ValueError, match=r"config\.json"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path)))
    config.write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path)))


def test_forked_child_is_refused_at_once_and_its_end_does_not_harm_the_engine_of_its_parent(small_model, tmp_path):
    done = run_script(
        small_model,
        """
        import atexit, ctypes, gc, inspect, signal

        llm = AsyncLLM.from_engine_args(ARGS)
        PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        loop = asyncio.new_event_loop()

        async def begin():
            stream = llm.generate("Hello", PARAMS)
            await anext(stream)
            return stream

        async def finish(stream):
            async for output in stream:
                pass
            return output.outputs[0].token_ids

        async def use(call):
            result = call()
            if inspect.isasyncgen(result) or hasattr(result, "__anext__"):
                result = anext(result)
            return await result if inspect.isawaitable(result) else result

        def check_child(stream):
            signal.alarm(60)
            arguments = {
                "generate": ["Hello"], "encode": ["Hello"], "add_request": [None, "Hello"], "abort": ["x"],
                "abort_request": ["x"], "collective_rpc": ["check_health"],
                "tokenize": ["Hello"], "detokenize": [[1]], "ping": [1.0], "has_room": ["Hello", 1],
                "prompt_tokens": ["Hello"],
                "add_logger": ["x", None], "remove_logger": ["x"], "chat": [[]], "take_images": [[]],
                "add_lora": [None], "remove_lora": [1], "pin_lora": [1],
                "drain_core": [0], "resume_core": [0], "remove_core": [0], "give_up_core": ["x", "it died", True],
            }
            usable = {"shutdown", "aclose"}
            for name, method in inspect.getmembers(type(llm), inspect.isfunction):
                if name.startswith("_") or name in usable or name.endswith("_config"):
                    continue
                try:
                    asyncio.run(use(lambda: getattr(llm, name)(*arguments.get(name, []))))
                except RuntimeError as error:
                    assert "make an engine after the fork" in str(error), (name, error)
                else:
                    raise AssertionError(f"{name} was not refused")
            try:
                asyncio.run(finish(stream))
            except RuntimeError as error:
                assert "make an engine after the fork" in str(error)
            else:
                raise AssertionError("a stream of the parent was not refused")

        whole = loop.run_until_complete(finish(loop.run_until_complete(begin())))
        stream = loop.run_until_complete(begin())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                check_child(stream)
                llm.shutdown()
                asyncio.run(llm.aclose())
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(loop))  # its end would take the parent's descriptors away
                other = AsyncLLM.from_engine_args(ARGS)  # the remedy
                print(len(asyncio.run(finish(other.generate("Hello", PARAMS)))), "tokens in the child", flush=True)
                del stream, llm, other
                gc.collect()
                atexit._run_exitfuncs()
                code = 0
            finally:
                if code:
                    import traceback
                    traceback.print_exc()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert loop.run_until_complete(finish(stream)) == whole
        assert loop.run_until_complete(finish(loop.run_until_complete(begin()))) == whole
        print(len(whole), "tokens in the parent")
        assert llm.last_core_status()["restarts"] == 0
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["200 tokens in the child", "200 tokens in the parent"]


def stopped_core(engine):
    """Stop the engine's core by a signal, so that it must be killed to end; return its process id."""
    pid = engine.last_core_status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_other_tasks_progress_while_an_engine_closes_and_a_second_call_waits_for_the_first(make_small_engine):
    engine = make_small_engine(max_model_len=256)

    async def run():
        stream = engine.generate("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        pid = stopped_core(engine)
        closing = [asyncio.create_task(engine.aclose(timeout=2)) for _ in range(2)]
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        num_turns = 0
        while not any(task.done() for task in closing):
            assert psutil.pid_exists(pid) or num_turns
            num_turns += 1
            await asyncio.sleep(0.001)
        await asyncio.gather(*closing)
        assert not psutil.pid_exists(pid)
        await engine.aclose()
        return num_turns

    assert asyncio.run(run()) > 10
    engine.shutdown()


def test_core_ends_although_the_call_that_closes_its_engine_is_cancelled(make_small_engine):
    engine = make_small_engine(max_model_len=256)
    folder = engine.cores.first.supervisor._source.folder

    async def run():
        pid = stopped_core(engine)
        closing = asyncio.create_task(engine.aclose(timeout=0.5))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        return pid

    pid = asyncio.run(run())
    engine.shutdown()  # waits for the call that was cancelled
    assert not psutil.pid_exists(pid)
    assert not folder.exists()
