"""`AsyncLLM.start` and `AsyncLLM.aconnect` in a running event loop, which goes on meanwhile."""

import asyncio
import contextlib
import subprocess
import sys

import psutil
import pytest

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineStartError
from vllm_mp.client.prompts.tokenizer import load_tokenizer
from vllm_mp.model_store import cache_root
from vllm_mp.testing.engines import ENGINE, answer, eventually, greedy, replay_core

PROMPT = {"prompt_token_ids": [300, 301]}


CLIENT = """
import asyncio, sys
from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=1)

async def main():
    llm = await AsyncLLM.start(AsyncEngineArgs(model=sys.argv[1], max_model_len=256))
    async for output in llm.generate("The capital of France is", PARAMS):
        pass
    text = await llm.chat_template.render([{"role": "user", "content": "hi"}])
    print(len(output.outputs[0].token_ids), bool(text), sorted({"torch", "transformers"} & sys.modules.keys()))
    assert isinstance(llm.get_tokenizer(), __import__("transformers").PreTrainedTokenizerBase)
    llm.shutdown()

asyncio.run(main())
"""


def core_processes():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def new_processes(before):
    """Return the children that are not among `before`, of which some may have ended since."""
    return core_processes() - before


async def as_result(value):
    return value


def test_other_tasks_run_while_an_engine_starts_and_its_block_ends_the_core(small_model):
    args = AsyncEngineArgs(model=str(small_model), **ENGINE)
    before = core_processes()

    async def run():
        num_turns = 0
        starting = asyncio.create_task(AsyncLLM.start(args))
        while not starting.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        async with await starting as llm:
            assert len((await answer(llm, "Hello", greedy(4, ignore_eos=True))).outputs[0].token_ids) == 4
            assert new_processes(before)
        assert not new_processes(before)
        return num_turns

    assert asyncio.run(run()) > 10


def test_cancelled_start_leaves_no_core(small_model):
    args = AsyncEngineArgs(model=str(small_model), **ENGINE)
    before = core_processes()

    async def is_cancelled():
        """Cancel a start once there is a process; return False if the start was faster."""
        starting = asyncio.create_task(AsyncLLM.start(args))
        await eventually(lambda: as_result(new_processes(before) or starting.done()))
        starting.cancel()
        try:
            (await starting).shutdown()
        except asyncio.CancelledError:
            return True
        return False

    async def run():
        for _ in range(10):
            if await is_cancelled():
                return
        pytest.fail("all starts were faster")

    asyncio.run(run())
    assert not new_processes(before)


def test_other_tasks_run_while_a_connection_waits_for_a_core(default_model, tmp_path):
    async def run():
        with contextlib.ExitStack() as stack:
            connecting = asyncio.create_task(AsyncLLM.aconnect(f"ipc://{tmp_path}/replay.sock", timeout=60))
            await asyncio.sleep(0)
            # The core starts only if this task runs while the connection waits.
            stack.enter_context(replay_core(tmp_path))
            async with await connecting as llm:
                assert len((await answer(llm, PROMPT, greedy(4, ignore_eos=True))).outputs[0].token_ids) == 4

    asyncio.run(run())


def test_connection_that_waits_for_a_core_can_be_cancelled_and_a_core_that_is_not_there_is_an_error(tmp_path):
    address = f"ipc://{tmp_path}/no.sock"

    async def run():
        connecting = asyncio.create_task(AsyncLLM.aconnect(address, timeout=3600))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        with pytest.raises(EngineStartError, match=r"did not answer|no core"):
            await AsyncLLM.aconnect(address, timeout=0)
        with pytest.raises(TypeError, match="tokeniser"):
            await AsyncLLM.aconnect(address, tokeniser="x")

    asyncio.run(run())


def test_client_answers_without_transformers_once_the_tokenizer_was_loaded(default_model):
    load_tokenizer(default_model, cache_dir=cache_root())
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(default_model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["4 True []"], done.stderr
