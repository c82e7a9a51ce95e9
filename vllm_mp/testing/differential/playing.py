"""Run cases on engines, together and alone, and assemble the outputs that their consumers received."""

import asyncio
import itertools
from typing import Any, NamedTuple

from vllm_mp import AsyncLLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from vllm_mp.errors import EngineError
from vllm_mp.testing.differential.cases import MAX_MODEL_LEN, Case
from vllm_mp.testing.engines import answer, eventually

MAX_STEP_TOKENS = 96
"""The most tokens that a step of the shared engine computes."""
PRIVATE_OPTIONS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "enable_prefix_caching": False,
    "max_logprobs": -1,
}
"""Engine options under which a request shares nothing with any other."""


def shared_options(bytes_per_token: int) -> dict[str, Any]:
    """Return engine options under which requests share a KV cache that is too small, and prompts are chunked.

    `bytes_per_token` is the size of one token's keys and values.
    """
    block_size, num_blocks = 4, 84
    return {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
        "max_num_seqs": 16,
        "max_num_partial_prefills": 3,
        "block_size": block_size,
        "kv_cache_memory_bytes": (num_blocks + 1) * block_size * bytes_per_token,
        "scheduling_policy": "priority",
        "stream_interval": 2,
        "max_logprobs": -1,
        "check_invariants": True,
    }


class FinalCompletion(NamedTuple):
    """One completion at its end, put together from outputs of any kind."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Any
    """The request's, in its first completion; None in all others."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


Outcome = list[FinalCompletion] | str
"""The completions of a case, or the error that refused it."""


async def play_together(engine: AsyncLLM, cases: list[Case]) -> list[Outcome]:
    """Return the outcomes of all cases together.

    Cases that wait for no other are sent while generation is paused, and it is resumed when the core has all of them.
    So the number of requests that run together does not depend on the speed of the machine.
    """
    num_ended, has_ended = 0, asyncio.Condition()

    async def play_case(case: Case) -> Outcome:
        nonlocal num_ended
        async with has_ended:
            await has_ended.wait_for(lambda: num_ended >= case.after)
        outcome = await consume(engine, case)
        async with has_ended:
            num_ended += 1
            has_ended.notify_all()
        return outcome

    await engine.pause_generation("keep", clear_cache=False)
    tasks = {asyncio.create_task(play_case(case)): case for case in cases}

    async def core_has_all() -> bool:
        due = [case for task, case in tasks.items() if case.after <= num_ended and not task.done()]
        num_waiting = (await engine.core_status())["num_waiting"]
        return bool(num_waiting == sum(case.params.get("n", 1) for case in due))

    await eventually(core_has_all)
    await engine.resume_generation()
    return await asyncio.gather(*tasks)


async def play_alone(engine: AsyncLLM, case: Case) -> Outcome:
    """Return the outcome of a case on an engine without other requests; each completion is a request of its own."""
    completions = []
    for index in range(case.params.get("n", 1)):
        own = {**case.params, "n": 1, "seed": case.params["seed"] + index}
        if index:
            own.pop("prompt_logprobs", None)
        try:
            params = SamplingParams(**own, output_kind=RequestOutputKind.FINAL_ONLY)
            output = await answer(engine, case.prompt, params)
        except (ValueError, EngineError) as error:
            return f"{type(error).__name__}: {error}"
        completions.append(_final(output.outputs[0], output))
    return completions


def play(shared: AsyncLLM, private: AsyncLLM, cases: list[Case]) -> list[tuple[Case, Outcome, Outcome]]:
    """Return each case with its outcome together with the others on `shared`, and its outcome alone on `private`."""

    async def run_alone() -> list[Outcome]:
        return [await play_alone(private, case) for case in cases]

    together = asyncio.run(play_together(shared, cases))
    return list(zip(cases, together, asyncio.run(run_alone()), strict=True))


async def consume(engine: Any, case: Case) -> Outcome:
    """Return the outcome of a case; raise AssertionError if outputs of its stream contradict each other.

    `engine` is an `AsyncLLM`, or a wrapper that observes one.
    """
    request_id = f"case-{id(case)}"
    outputs: list[RequestOutput] = []
    try:
        params = SamplingParams(**case.params, output_kind=case.kind)
        stream = engine.generate(case.prompt, params, request_id, lora_request=case.adapter, priority=case.priority)
        async for output in stream:
            outputs.append(output)
            if len(outputs) == case.abort_after:
                await engine.abort(request_id)
    except (ValueError, EngineError) as error:
        return f"{type(error).__name__}: {error}"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True], "finished once, at the end"
    return [_assemble(case.kind, index, outputs) for index in range(case.params.get("n", 1))]


def _final(completion: CompletionOutput, output: RequestOutput) -> FinalCompletion:
    return FinalCompletion(
        output.prompt_token_ids,
        completion.text,
        completion.token_ids,
        completion.cumulative_logprob,
        completion.logprobs,
        completion.finish_reason,
        completion.stop_reason,
        output.prompt_logprobs if completion.index == 0 else None,
        output.num_cached_tokens or 0,
    )


def _assemble(kind: RequestOutputKind, index: int, outputs: list[RequestOutput]) -> FinalCompletion:
    """Put completion `index` together from outputs of `kind`; raise AssertionError if they contradict each other."""
    pieces = [(piece, output) for output in outputs for piece in output.outputs if piece.index == index]
    assert pieces, f"completion {index} was never shown"
    last, output = pieces[-1]
    if kind != RequestOutputKind.DELTA:
        for (earlier, _), (later, _) in itertools.pairwise(pieces):
            assert later.text.startswith(earlier.text), "text was taken back"
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids, "tokens were taken back"
            assert earlier.finish_reason in (None, later.finish_reason), "the end was taken back"
        return _final(last, output)
    is_end = [piece.finish_reason is not None for piece, _ in pieces]
    assert is_end == [False] * (len(pieces) - 1) + [True], "ends once, with the last piece"
    prompt_logprobs = [output.prompt_logprobs for output in outputs]
    assert all(entries is None for entries in prompt_logprobs[1:]), "the prompt's log-probabilities came twice"
    return FinalCompletion(
        output.prompt_token_ids,
        "".join(piece.text for piece, _ in pieces),
        [token for piece, _ in pieces for token in piece.token_ids],
        last.cumulative_logprob,
        None if last.logprobs is None else [entry for piece, _ in pieces for entry in piece.logprobs or ()],
        last.finish_reason,
        last.stop_reason,
        prompt_logprobs[0] if index == 0 else None,
        output.num_cached_tokens or 0,
    )
