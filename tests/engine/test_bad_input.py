"""A bad request gets a message that names the fault, and does not disturb other requests."""

import asyncio
import contextlib
import re

import pytest

from vllm_mp import EngineError, LoRARequest, SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.testing.engines import answer, eventually, greedy
from vllm_mp.utils import Device

PROMPT = "Hello"


def refusal(llm, prompt, params=None, expected=(ValueError, TypeError, NotImplementedError), **arguments):
    """Return the message with which a request is refused."""

    async def run():
        with pytest.raises(expected) as caught:
            async for _ in llm.generate(prompt, params or greedy(4), **arguments):
                pass
        return str(caught.value)

    return asyncio.run(run())


@pytest.mark.essential
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 2, 49152], "49152"),
        ([1, -1], "-1"),
        ([1, 2**40], "vocabulary"),
        ([1.5], "integers"),
        ([[1], [2]], "one list"),
        (["a"], "token ids"),
        ([True], "integers"),
        (b"bytes", "decode"),
        ("\ud83d", "not valid Unicode"),
        (17, "token ids"),
        ({}, "neither"),
        ({"promt": "x"}, "promt"),
        ({"prompt": 3}, "str"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        (None, "neither"),
        ([1] * 1024, "1024 tokens"),
        ("word " * 5000, "max_model_len=1024"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_prompt_is_refused_by_name(llm, prompt, words):
    assert words in refusal(llm, prompt)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lora_request": object()}, "lora_request"),
        ({"trace_headers": {"traceparent": 7}}, "trace_headers"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"priority": 3}, "scheduling_policy"),
        ({"priority": 1.5}, "priority"),
        ({"request_id": True}, "request_id"),
        ({"request_id": 1.0}, "request_id"),
        ({"request_id": "x" * 2000}, "request_id"),
        ({"arrival_time": "now"}, "arrival_time"),
        ({"arrival_time": float("nan")}, "arrival_time"),
        ({"prompt_text": 3}, "prompt_text"),
        ({"prompt_adapter_request": object()}, "lora_request"),
        ({"session_id": "mine"}, "cache_salt"),
        ({"kv_hints": {"a": 1}}, "kv_hints"),
        ({"reasoning_ended": True}, "reasoning_ended"),
        ({"reasoning_parser_kwargs": {"a": 1}}, "reasoning_parser_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{next(iter(value))} of {type(*value.values()).__name__}",
)
def test_bad_argument_is_refused_by_name(llm, arguments, words):
    assert words in refusal(llm, PROMPT, **arguments)


def test_empty_trace_headers_are_accepted_everywhere(llm):
    async def run():
        outputs = [output async for output in llm.generate(PROMPT, greedy(2), trace_headers={})]
        vectors = [output async for output in llm.encode(PROMPT, trace_headers={})]
        streamed = [output async for output in await llm.add_request(None, PROMPT, greedy(2), trace_headers={})]
        assert outputs[-1].finished
        assert vectors[-1].finished
        assert streamed[-1].finished

    asyncio.run(run())


def test_tokenizer_of_an_adapter_is_refused_because_lora_is_not_enabled(llm):
    assert llm.get_tokenizer(None) is llm.get_tokenizer()
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest"):
        llm.get_tokenizer("adapter")
    with pytest.raises(ValueError, match="'mine', but LoRA is not enabled"):
        llm.get_tokenizer(LoRARequest("mine", 1, "/adapters/mine"))


def test_prefix_cache_is_reset_only_on_the_device_that_holds_it(llm):
    own = llm.vllm_config.device_config.device
    names = {"cpu": ("cpu", Device.CPU, "CPU"), "cuda": ("cuda", Device.GPU, "gpu", "cuda:0")}

    async def run():
        await llm.reset_prefix_cache()
        for device in names[own]:
            await llm.reset_prefix_cache(device)
        await llm.reset_prefix_cache(False, reset_connector=True)
        with pytest.raises(EngineError, match="reset_running_requests must be a bool, got 1"):
            await llm.cores.call("reset_prefix_cache", None, 1)
        for device in (*names["cpu" if own == "cuda" else "cuda"], "disk", 0):
            with pytest.raises(ValueError, match=f"device must be None or '{own}'.*{re.escape(repr(device))}"):
                await llm.reset_prefix_cache(device)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop_token_ids=[49152]), "stop_token_ids"),
        ({"temperature": 0}, "SamplingParams"),
    ],
    ids=["stop_token_ids", "a dict"],
)
def test_parameters_that_no_engine_serves_are_refused_by_name(llm, params, words):
    assert words in refusal(llm, PROMPT, params)


def test_request_id_can_be_used_again_only_after_its_request_has_finished(llm):
    async def run():
        first = await llm.add_request("same", PROMPT, greedy(20))
        with pytest.raises(ValueError, match="same"):
            await llm.add_request("same", PROMPT, greedy(20))
        assert [output.finished async for output in first] == [True]
        assert (await answer(llm, PROMPT, greedy(2), "same")).finished

    asyncio.run(run())


@pytest.mark.essential
def test_bad_request_does_not_disturb_other_requests(llm):
    async def run():
        good = [asyncio.create_task(answer(llm, PROMPT, greedy(30))) for _ in range(4)]
        for prompt in ("", [99999], "\udc00", [1] * 2000):
            with pytest.raises(ValueError):
                await answer(llm, prompt, greedy(4))
        texts = {(await task).outputs[0].text for task in good}
        await llm.check_health()
        return texts

    assert len(asyncio.run(run())) == 1


def test_core_refuses_requests_that_a_client_should_have_refused(llm):
    bad = [
        (b"", SamplingParams(seed=1), "empty"),
        (b"\x01\x00\x00", SamplingParams(seed=1), "multiple"),
        (wire.pack_ids([50_000]), SamplingParams(seed=1), "50000"),
        (wire.pack_ids([-5]), SamplingParams(seed=1), "-5"),
        (wire.pack_ids([1] * 1024), SamplingParams(seed=1), "1024 tokens"),
        (wire.pack_ids([1]), SamplingParams(seed=1, logit_bias={50_000: 1.0}), "logit_bias"),
        (wire.pack_ids([1]), SamplingParams(seed=1, logprobs=21), "logprobs"),
    ]
    with contextlib.closing(CoreConnection(llm.cores.first.supervisor.core.connection.address)) as client:
        welcome, _ = client.greet(10, lambda: None)
        for slot, (ids, params, words) in enumerate(bad):
            client.send(wire.AddRequest(welcome.incarnation, slot, "bad", ids, params))
            message = wire.decode_core_message(client._socket.recv())
            while not message.finished:  # the core looks whether a new client is there with an empty message
                message = wire.decode_core_message(client._socket.recv())
            (end,) = message.finished
            assert (end.slot, end.reason) == (slot, "error")
            assert words in end.error
    assert asyncio.run(answer(llm, PROMPT, greedy(4))).finished


@pytest.mark.essential
def test_garbage_frames_are_counted_and_dropped(llm):
    async def status():
        return (await llm.core_status())["num_dropped_messages"]

    before = asyncio.run(status())
    stranger = CoreConnection(llm.cores.first.supervisor.core.connection.address)
    frames = [
        [b""],
        [b"garbage"],
        [b"\x93\x02\x00\x00"],
        [wire.encode(wire.Call(llm.cores.first.supervisor.core.connection.incarnation, 1, "status"))],  # without hello
        [b"a", b"b", b"c"],
        [b"\x91" * 100_000],
        [wire.encode(wire.Hello(1))[:-1]],
    ]
    for frame in frames:
        stranger._socket.send_multipart(frame)

    async def run():
        async def all_counted():
            return await status() == before + len(frames)

        await eventually(all_counted)
        assert (await answer(llm, PROMPT, greedy(4))).finished

    asyncio.run(run())
    stranger.close()
