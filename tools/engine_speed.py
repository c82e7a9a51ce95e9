"""How fast real engines with random weights are, and what the device would allow at best."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_mp import AsyncLLM

# vllm_mp is imported where it is used: without a package that it needs, the rest of a report is still made.

MEASUREMENT_LIMIT_S = 60
START_LIMIT_S = 120

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TINY = {
    **QWEN3_0_6B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Workload(NamedTuple):
    """What is measured. Lengths are in tokens."""

    models: dict[str, dict[str, Any]]
    """By name: the model's config.json."""
    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    prefill_lens: tuple[int, ...]
    rounds: int
    """After one to warm up; the median counts."""
    max_model_len: int
    num_threads: int
    """Of the core on a CPU; 0: as many as there are."""
    copy_bytes: int
    matrix_size: int


FULL = Workload(
    models={"Qwen3-0.6B": QWEN3_0_6B, "Llama-3.1-8B": LLAMA_3_1_8B},
    batches=(1, 16, 64, 256),
    prompt_len=128,
    output_len=128,
    prefill_lens=(128, 512, 2048),
    rounds=3,
    max_model_len=4096,
    num_threads=0,
    copy_bytes=4 * 2**30,
    matrix_size=8192,
)
QUICK = Workload(
    models={"tiny": TINY},
    batches=(1, 4),
    prompt_len=16,
    output_len=200,
    prefill_lens=(16, 64),
    rounds=2,
    max_model_len=256,
    num_threads=1,
    copy_bytes=64 * 2**20,
    matrix_size=256,
)


class Cost(NamedTuple):
    """What a step must at least do: bytes through the device's memory, and operations of matrix products."""

    memory_bytes: float
    flops: float

    def shares(self, seconds: float, ceilings: dict[str, Any]) -> dict[str, float | None]:
        """How near a step of `seconds` comes to either limit of the device; 1 is the limit."""
        if not ceilings:
            return {"share_of_bandwidth": None, "share_of_matrix_rate": None}
        return {
            "share_of_bandwidth": self.memory_bytes / ceilings["copy_bytes_per_s"] / seconds,
            "share_of_matrix_rate": self.flops / ceilings["matmul_flops_per_s"] / seconds,
        }


def step_cost(engine: "AsyncLLM", batch: int, new_tokens: int, context: float) -> Cost:
    """Of a step in which each of `batch` requests computes `new_tokens` that see `context` tokens on average.

    The weights are read once, the keys and values of a request once, and each request needs one row of logits.
    """
    arch = engine.model_config.architecture
    itemsize = 4 if engine.model_config.dtype == "float32" else 2
    layer = arch.hidden_size * arch.head_dim * (2 * arch.num_heads + 2 * arch.num_kv_heads)
    layer += 3 * arch.hidden_size * arch.intermediate_size
    body, head = arch.num_layers * layer, arch.vocab_size * arch.hidden_size
    attention = 4 * arch.num_layers * arch.num_heads * arch.head_dim * context
    return Cost(
        memory_bytes=itemsize * (body + head) + batch * context * arch.kv_bytes_per_token(itemsize),
        flops=batch * (new_tokens * (2 * body + attention) + 2 * head),
    )


Arrivals = list[tuple[float, int]]
"""(time in seconds, new tokens) of each output of one stream."""


async def stream_batch(engine: "AsyncLLM", batch: int, prompt_len: int, output_len: int) -> list[Arrivals]:
    """Run `batch` requests with random prompts at once."""
    from vllm_mp import RequestOutputKind, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    vocabulary = range(engine.model_config.get_vocab_size())

    async def one() -> Arrivals:
        outputs = engine.generate(random.choices(vocabulary, k=prompt_len), params)
        return [(time.perf_counter(), len(output.outputs[0].token_ids)) async for output in outputs]

    return await asyncio.gather(*(one() for _ in range(batch)))


def steady_tokens_per_s(streams: list[Arrivals]) -> float:
    """Tokens per second while all streams decode.

    Counted on the stream that began last, up to the first end of any: in each of its steps all had a token.
    """
    latest = max(streams, key=lambda arrivals: arrivals[0][0])
    first_end = min(arrivals[-1][0] for arrivals in streams)
    together = [(moment, count) for moment, count in latest[1:] if moment <= first_end]
    if not together:
        raise ValueError("the streams never all decoded at once: some ended before others began")
    return len(streams) * sum(count for _, count in together) / (together[-1][0] - latest[0][0])


async def measure(
    kind: str, size: int, engine: "AsyncLLM", workload: Workload, ceilings: dict[str, Any]
) -> dict[str, Any]:
    """A figure of the given kind: "decode" at batch `size`, or "prefill" of `size` tokens.

    `ceilings` are what tools/device_ceilings.py found, or empty. Raises TimeoutError after MEASUREMENT_LIMIT_S.
    """
    run = {"decode": measure_decode, "prefill": measure_prefill}[kind]
    try:
        async with asyncio.timeout(MEASUREMENT_LIMIT_S):
            figure, cost = await run(engine, workload, size)
    except TimeoutError as error:
        raise TimeoutError(f"not done within {MEASUREMENT_LIMIT_S} s") from error
    return {**figure, **cost.shares(size / figure["tokens_per_s"], ceilings)}


async def measure_decode(engine: "AsyncLLM", workload: Workload, batch: int) -> tuple[dict[str, Any], Cost]:
    """Tokens per second of `batch` requests: while all decode, and from the first request to the last token."""
    steady, whole = [], []
    for _ in range(1 + workload.rounds):
        begun = time.perf_counter()
        streams = await stream_batch(engine, batch, workload.prompt_len, workload.output_len)
        whole.append(batch * workload.output_len / (time.perf_counter() - begun))
        steady.append(steady_tokens_per_s(streams))
    figure = {
        "batch": batch,
        "prompt_len": workload.prompt_len,
        "output_len": workload.output_len,
        "tokens_per_s": statistics.median(steady[1:]),
        "rounds": steady[1:],
        "tokens_per_s_with_prefill": statistics.median(whole[1:]),
    }
    return figure, step_cost(engine, batch, 1, workload.prompt_len + workload.output_len / 2)


async def measure_prefill(engine: "AsyncLLM", workload: Workload, prompt_len: int) -> tuple[dict[str, Any], Cost]:
    """Prompt tokens per second of a lone request, from sending it to its first token."""
    rates = []
    for _ in range(1 + workload.rounds):
        begun = time.perf_counter()
        (arrivals,) = await stream_batch(engine, 1, prompt_len, 1)
        rates.append(prompt_len / (arrivals[0][0] - begun))
    figure = {"prompt_len": prompt_len, "tokens_per_s": statistics.median(rates[1:]), "rounds": rates[1:]}
    return figure, step_cost(engine, 1, prompt_len, prompt_len / 2)


@contextlib.contextmanager
def running_engine(folder: Path, workload: Workload, device: str, dtype: str) -> Iterator["AsyncLLM"]:
    """An engine of the configuration in `folder`."""
    from vllm_mp import AsyncEngineArgs, AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            device=device,
            dtype=dtype,
            max_model_len=workload.max_model_len,
            num_threads=workload.num_threads,
            start_timeout_s=START_LIMIT_S,
            disable_log_requests=True,
        )
    )
    try:
        yield engine
    finally:
        engine.shutdown()
