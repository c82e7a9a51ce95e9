"""A core that dies of what it does outside of steps: the request or call that it did it for fails alone."""

import asyncio
import contextlib

import pytest
from support.lora_engines import save_adapters

from vllm_mp import AsyncLLM, EngineError, EngineGenerateError, SamplingParams, StructuredOutputsParams
from vllm_mp.testing.engines import answer, greedy, running_engine, standalone_core

pytestmark = pytest.mark.usefixtures("forked_programs", "forked_cores")

SLOW = "slow@step=*,seconds=0.02"
NUM_TOKENS = 40
PLACES = {
    "a constraint": "segv@compile,about=fatal",
    "an adapter": "segv@adapter,about=adapter-2",
    "a message": "segv@message,about=fatal-id",
    "a call": "segv@call,about=collective_rpc",
    "an added adapter": "segv@adapter,about=adapter-2",
}


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    return save_adapters(small_model, tmp_path_factory.mktemp("adapters"))


@contextlib.contextmanager
def private(model, faults, folder, operators):
    with running_engine(model, fault_injection=f"{SLOW};{faults}", enable_lora=True, max_core_restarts=6) as engine:
        yield engine, engine


@contextlib.contextmanager
def shared(model, faults, folder, operators):
    """Yield a client with innocent streams, and another client that sends the culprit."""
    address = f"ipc://{folder}/core.sock"
    flags = ["--fault-injection", f"{SLOW};{faults}", "--enable-lora", "--num-threads", "1", *operators]
    with standalone_core(model, address, *flags), contextlib.ExitStack() as stack:
        clients = [AsyncLLM.connect(address, operator_key_file=operators[1]) for _ in range(2)]
        for client in clients:
            stack.callback(client.shutdown)
        yield clients[0], clients[1]


def culprit(engine, place, adapters):
    """Send the request, or make the call, of which a core dies."""
    params = {"max_tokens": 4, "temperature": 0.0}
    if place == "a constraint":
        params["structured_outputs"] = StructuredOutputsParams(regex="fatal[0-9]")
        return answer(engine, "Say it:", SamplingParams(**params))
    if place == "an adapter":

        async def with_adapter():
            async for output in engine.generate("Say it:", SamplingParams(**params), lora_request=adapters[2]):
                last = output
            return last

        return with_adapter()
    if place == "a message":
        return answer(engine, "Say it:", SamplingParams(**params), "fatal-id")
    if place == "an added adapter":
        return engine.add_lora(adapters[2])
    return engine.collective_rpc("check_health")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("running", [private, pytest.param(shared, marks=pytest.mark.slow)])
def test_only_the_culprit_fails(small_model, tmp_path, adapters, operators, running, place):
    prompts = [f"Number {number} is" for number in range(3)]
    params = greedy(NUM_TOKENS, ignore_eos=True)

    async def run(innocent, other):
        outputs = await asyncio.gather(*(answer(innocent, prompt, params) for prompt in prompts))
        expected = [output.outputs[0].token_ids for output in outputs]
        streams = [asyncio.create_task(answer(innocent, prompt, params)) for prompt in prompts]
        await asyncio.sleep(0)
        with pytest.raises(EngineError) as failure:
            await culprit(other, place, adapters)
        assert [(await stream).outputs[0].token_ids for stream in streams] == expected
        if place in ("a call", "an added adapter"):
            assert "2 cores died while they carried it out" in str(failure.value)
        else:
            assert isinstance(failure.value, EngineGenerateError)
            assert "alone in the last" in str(failure.value)
        if innocent is other:
            assert 2 <= (await other.core_status())["restarts"] <= 4
        assert (await answer(other, prompts[0], params)).outputs[0].token_ids == expected[0]

    with running(small_model, PLACES[place], tmp_path, operators) as clients:
        asyncio.run(run(*clients))
