"""Measure the speed of real engines with random weights, and compare it with the limits of the device."""

import asyncio
import contextlib
import gzip
import json
import random
import shutil
import statistics
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_mp import AsyncLLM, RequestOutput

# Other modules of vllm_mp are imported where they are used: if a package that they need is missing, other parts of a
# report are still made.

MEASUREMENT_LIMIT_S = 60
LOAD_LIMIT_S = 180
IDLE_STEPS = 50
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


class Load(NamedTuple):
    """Requests that arrive all at once. Lengths are in tokens, drawn from ranges that include both ends."""

    num_requests: int
    prompt_len: tuple[int, int]
    output_len: tuple[int, int]
    published: float | None = None
    """Output tokens per second that NVIDIA publishes for TensorRT-LLM with FP8 on one H200."""


class Subject(NamedTuple):
    """An engine that is measured. Sizes are in tokens and requests."""

    stages: tuple[str, ...]
    """The stages of tools/gpu_check.py that measure it."""
    config: dict[str, Any]
    """The model's config.json."""
    options: dict[str, Any]
    """Engine arguments."""
    batches: tuple[int, ...]
    """Requests that decode together."""
    prefill_lens: tuple[int, ...]
    loads: dict[str, Load]
    starts: int = 1
    idle: bool = False
    """Measure how long the device is idle between the steps of a lone request."""
    beside: bool = False
    """Measure transformers too."""


class Workload(NamedTuple):
    """What is measured. Lengths are in tokens."""

    models: dict[str, Subject]
    prompt_len: int
    output_len: int
    rounds: int
    """Measured rounds after one to warm up; medians count. Loads have one round."""
    num_threads: int
    """Threads of a core on a CPU; 0: all."""
    copy_bytes: int
    matrix_size: int


def _fixed(num_requests: int, prompt_len: int, output_len: int, published: float) -> Load:
    return Load(num_requests, (prompt_len, prompt_len), (output_len, output_len), published)


_LONG_ANSWERS = {"128/2048": _fixed(512, 128, 2048, 26_221)}
_PUBLISHED = {
    **_LONG_ANSWERS,
    "1000/1000": _fixed(512, 1000, 1000, 17_744),
    "128/128": _fixed(1024, 128, 128, 27_911),
    "2048/128": _fixed(256, 2048, 128, 3_538),
}
_THROUGHPUT = {"max_model_len": 4096, "max_num_seqs": 512, "max_num_batched_tokens": 8192}
FULL = Workload(
    models={
        "Llama-3.1-8B": Subject(
            ("bf16",),
            LLAMA_3_1_8B,
            _THROUGHPUT,
            batches=(1, 16, 64, 256),
            prefill_lens=(128, 512, 2048),
            loads=_LONG_ANSWERS,
            idle=True,
            beside=True,
        ),
        "Llama-3.1-8B-FP8": Subject(
            ("fp8",),
            LLAMA_3_1_8B,
            {**_THROUGHPUT, "quantization": "fp8", "kv_cache_dtype": "fp8"},
            batches=(1, 64, 256),
            prefill_lens=(2048,),
            loads=_PUBLISHED,
        ),
        "Qwen3-0.6B": Subject(
            ("small",),
            QWEN3_0_6B,
            _THROUGHPUT,
            batches=(1, 16, 64, 256),
            prefill_lens=(128, 512, 2048),
            loads={"256 of 100-1024/100-1024": Load(256, (100, 1024), (100, 1024))},
            starts=3,
            idle=True,
            beside=True,
        ),
    },
    prompt_len=128,
    output_len=128,
    rounds=3,
    num_threads=0,
    copy_bytes=4 * 2**30,
    matrix_size=8192,
)
QUICK = Workload(
    models={
        "tiny": Subject(
            ("fp8", "bf16", "small"),
            TINY,
            {"max_model_len": 256, "kv_cache_memory_bytes": 2**26},
            batches=(1, 4),
            prefill_lens=(16, 64),
            loads={"8 of 8-16/8-16": Load(8, (8, 16), (8, 16))},
            starts=2,
            idle=True,
            beside=True,
        )
    },
    prompt_len=16,
    output_len=200,
    rounds=2,
    num_threads=1,
    copy_bytes=64 * 2**20,
    matrix_size=256,
)


class Cost(NamedTuple):
    """The least that a step must do: bytes through the device's memory, and operations of matrix products."""

    memory_bytes: float
    flops: float

    def shares(self, seconds: float, ceilings: dict[str, Any]) -> dict[str, float | None]:
        """Return the share of each limit of the device that a step of `seconds` reaches; 1 is the limit."""
        if not ceilings:
            return {"share_of_bandwidth": None, "share_of_matrix_rate": None}
        return {
            "share_of_bandwidth": self.memory_bytes / ceilings["copy_bytes_per_s"] / seconds,
            "share_of_matrix_rate": self.flops / ceilings["matmul_flops_per_s"] / seconds,
        }


def step_cost(engine: "AsyncLLM", batch: int, new_tokens: int, context: float) -> Cost:
    """Return the cost of a step in which `batch` requests compute `new_tokens` each, with `context` tokens on average.

    The weights are read once, the keys and values of each request once, and each request needs one row of logits.
    """
    from vllm_mp.model_config.architecture import NativeArchitecture

    arch = engine.model_config.architecture
    assert isinstance(arch, NativeArchitecture)
    itemsize = 4 if engine.model_config.dtype == "float32" else 2
    weight_bytes = 1 if engine.model_config.quantization else itemsize
    cache_bytes = 1 if engine.vllm_config.cache_config.cache_dtype == "fp8" else itemsize
    layer = arch.hidden_size * arch.head_dim * (2 * arch.num_heads + 2 * arch.num_kv_heads)
    layer += 3 * arch.hidden_size * arch.intermediate_size
    body, head = arch.num_layers * layer, arch.vocab_size * arch.hidden_size
    attention = 4 * arch.num_layers * arch.num_heads * arch.head_dim * context
    return Cost(
        memory_bytes=weight_bytes * body + itemsize * head + batch * context * arch.kv_bytes_per_token(cache_bytes),
        flops=batch * (new_tokens * (2 * body + attention) + 2 * head),
    )


Arrivals = list[tuple[float, int]]
"""(time in seconds, new tokens) of each output of one stream."""


def generate(engine: "AsyncLLM", prompt_len: int, output_len: int) -> "AsyncGenerator[RequestOutput, None]":
    """Return the stream of a request with a random prompt; each output holds the new tokens."""
    from vllm_mp import RequestOutputKind, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    prompt = random.choices(range(engine.model_config.get_vocab_size()), k=prompt_len)
    return engine.generate(prompt, params)


async def stream_one(engine: "AsyncLLM", prompt_len: int, output_len: int) -> Arrivals:
    """Run a request to its end. Return its arrivals."""
    outputs = generate(engine, prompt_len, output_len)
    return [(time.perf_counter(), len(output.outputs[0].token_ids)) async for output in outputs]


async def stream_batch(engine: "AsyncLLM", batch: int, prompt_len: int, output_len: int) -> list[Arrivals]:
    """Run `batch` requests with random prompts at once. Return the arrivals of each."""
    return await asyncio.gather(*(stream_one(engine, prompt_len, output_len) for _ in range(batch)))


def steady_tokens_per_s(streams: list[Arrivals]) -> float:
    """Return the tokens per second while all streams decode.

    Steps are counted on the stream that began last, up to the first end of any stream: each of them gives every stream
    a token. Raises ValueError if the streams never all decode at once.
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
    """Return a figure of the given kind: "decode" at batch `size`, or "prefill" of `size` tokens.

    `ceilings` are the figures of tools/gpu/device_ceilings.py, or empty. Raises TimeoutError after MEASUREMENT_LIMIT_S.
    """
    run = {"decode": measure_decode, "prefill": measure_prefill}[kind]
    try:
        async with asyncio.timeout(MEASUREMENT_LIMIT_S):
            figure, cost = await run(engine, workload, size)
    except TimeoutError as error:
        raise TimeoutError(f"not done within {MEASUREMENT_LIMIT_S} s") from error
    return {**figure, **cost.shares(size / figure["tokens_per_s"], ceilings)}


async def measure_decode(engine: "AsyncLLM", workload: Workload, batch: int) -> tuple[dict[str, Any], Cost]:
    """Measure tokens per second of `batch` requests: while all decode, and from the first request to the last token."""
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
    """Measure prompt tokens per second of a lone request, from sending it to its first token."""
    rates = []
    for _ in range(1 + workload.rounds):
        begun = time.perf_counter()
        (arrivals,) = await stream_batch(engine, 1, prompt_len, 1)
        rates.append(prompt_len / (arrivals[0][0] - begun))
    figure = {"prompt_len": prompt_len, "tokens_per_s": statistics.median(rates[1:]), "rounds": rates[1:]}
    return figure, step_cost(engine, 1, prompt_len, prompt_len / 2)


async def measure_load(engine: "AsyncLLM", load: Load) -> dict[str, Any]:
    """Measure tokens per second of all requests together, from the first request to the last token."""
    lengths = random.Random(0)
    sizes = [(lengths.randint(*load.prompt_len), lengths.randint(*load.output_len)) for _ in range(load.num_requests)]
    # A small load first, so that no kernel is compiled during the measurement.
    await asyncio.gather(*(stream_one(engine, prompt_len, 2) for prompt_len, _ in sizes[: load.num_requests // 8]))
    begun = time.perf_counter()
    async with asyncio.timeout(LOAD_LIMIT_S):
        await asyncio.gather(*(stream_one(engine, *size) for size in sizes))
    spent = time.perf_counter() - begun
    generated = sum(output_len for _, output_len in sizes)
    return {
        "num_requests": load.num_requests,
        "seconds": spent,
        "output_tokens_per_s": generated / spent,
        "total_tokens_per_s": (generated + sum(prompt_len for prompt_len, _ in sizes)) / spent,
        "num_preemptions": (await engine.core_status())["num_preemptions"],
        "of_published": None if load.published is None else generated / spent / load.published,
    }


async def measure_idle(engine: "AsyncLLM") -> dict[str, Any]:
    """Measure by PyTorch's profiler which share of its time the device is idle while a lone request decodes."""
    count, folder = 0, None
    async for output in generate(engine, 16, 4 * IDLE_STEPS):
        before, count = count, count + len(output.outputs[0].token_ids)
        if before < IDLE_STEPS <= count:
            await engine.start_profile()
        elif before < 2 * IDLE_STEPS <= count:
            folder = Path(await engine.stop_profile())
    assert folder is not None
    (trace,) = folder.iterdir()
    share = idle_share(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    shutil.rmtree(folder)
    return {"steps": IDLE_STEPS, "idle_share": share}


def idle_share(events: list[dict[str, Any]]) -> float | None:
    """Return the share without any event of the time from the device's first to its last event; None without events."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not spans:
        return None
    busy, end = 0.0, float(spans[0][0])
    for begin, stop in spans:
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return float(1 - busy / (end - spans[0][0]))


@contextlib.contextmanager
def running_engine(folder: Path, subject: Subject, num_threads: int, device: str, dtype: str) -> Iterator["AsyncLLM"]:
    """Run an engine of the configuration in `folder`, with random weights."""
    from vllm_mp import AsyncEngineArgs, AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            device=device,
            dtype=dtype,
            num_threads=num_threads,
            start_timeout_s=START_LIMIT_S,
            disable_log_requests=True,
            max_prefill_slowdown=0,  # all streams must decode at once
            **subject.options,
        )
    )
    try:
        yield engine
    finally:
        engine.shutdown()
