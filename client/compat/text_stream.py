"""The new text of a request, piece by piece."""

from collections.abc import AsyncGenerator

from vllm_mp.client.engine_client import EngineClient
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams


async def stream_generate(
    engine: EngineClient, prompt: str, sampling_params: SamplingParams, request_id: str
) -> AsyncGenerator[str, None]:
    """Yield the text of a completion as it grows: each piece once, none empty. Leaving early aborts the request.

    The `output_kind` of `sampling_params` has no effect. Raises what `AsyncLLM.generate` raises, and ValueError for
    several completions, whose texts could not be told apart.
    """
    if sampling_params.n != 1:
        raise ValueError(f"n must be 1, got {sampling_params.n}; call generate() for several completions")
    params = sampling_params.clone()
    params.output_kind = RequestOutputKind.DELTA
    outputs = engine.generate(prompt, params, request_id)
    try:
        async for output in outputs:
            for completion in output.outputs:
                if completion.text:
                    yield completion.text
    finally:
        await outputs.aclose()
