"""Engines compute with the weights of a mapped GGUF file where they lie, and survive what happens to the file."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quantize as quantize_array
from support.model_templates import model_template_of
from support.paged_steps import run_in_chunks
from support.tiny_gguf import rewrite_tensors, separated_experts, split, write_random_gguf, write_tiny_gguf
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineDeadError, SamplingParams
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.block_linear import IN_PLACE_VARIABLE
from vllm_mp.kernels.cpu.library import library
from vllm_mp.model_store import gguf, resolve_model
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import GreedyReference, assert_greedy, generate_all

pytestmark = pytest.mark.usefixtures("forked_cores")

SIZES = {
    "vocab_size": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=False),
    "llama with biases": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gemma2": Gemma2Config(
        **SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=9, attn_logit_softcapping=2.0
    ),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=9,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": GraniteConfig(
        **SIZES,
        attention_multiplier=0.5,
        embedding_multiplier=3.0,
        residual_multiplier=0.25,
        logits_scaling=2.0,
    ),
    "olmo2": Olmo2Config(**SIZES, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=160,
    ),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "phi3": Phi3Config(
        **SIZES,
        pad_token_id=0,
        sliding_window=9,
        tie_word_embeddings=False,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.25,
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "short_factor": [1.0, 1.0, 1.25, 1.25, 1.5, 1.5],
        },
    ),
}
PROMPTS = [[3, 4, 5, 9, 7, 8], [10], [11, 3, 6] * 15]
KINDS = [GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1")]


def name_in_files(architecture: str) -> str:
    """Return the name in GGUF files of one of `CONFIGS`."""
    return {"mixtral": "llama", "llama with biases": "llama"}.get(architecture, architecture)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def _no_tokenizer(monkeypatch):
    """Leave out the conversion of the tokenizer, which takes seconds."""
    monkeypatch.setattr(gguf, "_convert_tokenizer", lambda _, target, *__: target.mkdir())


def load(path: Path, **options):
    config = AsyncEngineArgs(model=str(path), device="cpu", **options).create_engine_config().model_config
    return load_model(config, torch.float32, torch.device("cpu"))


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("architecture", CONFIGS)
def test_mapped_file_gives_the_logits_of_its_dequantized_weights(architecture, tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    weights = write_random_gguf(path, name_in_files(architecture), CONFIGS[architecture], kinds=KINDS)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[architecture], attn_implementation="eager").eval()
    theirs.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=False)
    theirs.tie_weights()

    def assert_equal(model, tolerance: float) -> None:
        for prompt, got in zip(PROMPTS, run_in_chunks(model, PROMPTS, block_size=4), strict=True):
            expected = theirs(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(got, expected, atol=tolerance * float(expected.std()), rtol=0)

    with one_thread(), torch.inference_mode():
        monkeypatch.setattr(ops, "computes_blocks", lambda *_: False)
        assert_equal(load(path), 1e-4)
        monkeypatch.setattr(ops, "computes_blocks", lambda *_: True)
        if library() is not None:
            # Rows have 8 bits, so that a token may choose another expert.
            assert_equal(load(path), 1.0 if hasattr(CONFIGS[architecture], "num_experts_per_tok") else 0.2)
        monkeypatch.setattr(ops, "library", lambda: None)
        assert_equal(load(path), 1e-4)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("architecture", ["phi3", "qwen3"])
def test_split_file_gives_the_logits_of_the_whole_file(architecture, tmp_path):
    whole = tmp_path / "whole.gguf"
    write_random_gguf(whole, name_in_files(architecture), CONFIGS[architecture], kinds=KINDS)
    parts = split(whole, tmp_path / "parts.gguf", 4, first_has_tensors=False)
    with one_thread(), torch.inference_mode():
        expected, got = (run_in_chunks(load(path), PROMPTS, block_size=4) for path in (whole, parts[-1]))
        assert all(map(torch.equal, expected, got))


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3moe"])
def test_older_files_have_a_tensor_for_each_expert(architecture, tmp_path):
    stacked, separate = tmp_path / "stacked.gguf", tmp_path / "separate.gguf"
    write_random_gguf(stacked, name_in_files(architecture), CONFIGS[architecture], kinds=KINDS)
    rewrite_tensors(stacked, separate, separated_experts)
    with one_thread(), torch.inference_mode():
        expected, got = (run_in_chunks(load(path), PROMPTS, block_size=4) for path in (stacked, separate))
        assert all(map(torch.equal, expected, got))


@pytest.mark.usefixtures("_no_tokenizer")
def test_weights_of_a_mapped_file_take_no_memory_of_their_own(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "qwen2", CONFIGS["qwen2"], kinds=KINDS)
    if not ops.computes_blocks(torch.device("cpu"), torch.float32):
        pytest.skip("the C++ kernels are not built")
    model = load(path)
    kept = sum(parameter.numel() for parameter in model.parameters())
    assert kept <= (2 * 2 + 1) * 64  # norms
    assert model.num_parameters > 50_000


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("kind", ["Q4_0", "TQ2_0"])
def test_file_stays_quantized_whatever_its_types_and_its_embedding_are(kind, tmp_path):
    path = tmp_path / "tiny.gguf"
    type = GGMLQuantizationType[kind]
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 1500}
    config = Gemma2Config(**sizes, head_dim=64, query_pre_attn_scalar=64)
    write_random_gguf(path, "gemma2", config, kinds=[type], unquantized="token_embd")  # most bytes of the file
    if not ops.computes_blocks(torch.device("cpu"), torch.float32):
        pytest.skip("the C++ kernels are not built")
    assert all(parameter.dim() == 1 for parameter in load(path).parameters())


@pytest.mark.usefixtures("_no_tokenizer")
def test_floats_that_were_rounded_do_not_stay_in_memory(tmp_path):
    path = tmp_path / "tiny.gguf"
    config = Qwen2Config(**{**SIZES, "hidden_size": 256, "vocab_size": 3000}, tie_word_embeddings=False)
    write_random_gguf(path, "qwen2", config, kinds=[GGMLQuantizationType.Q8_0], unquantized="output")
    if not ops.computes_blocks(torch.device("cpu"), torch.float32):
        pytest.skip("the C++ kernels are not built")
    model = load(path)
    (_, *entries) = Path("/proc/self/smaps").read_text().partition(str(path))[2].splitlines()
    resident = next(int(entry.split()[1]) * 1024 for entry in entries if entry.startswith("Rss:"))
    assert resident < path.stat().st_size / 2  # the head alone has more
    assert model.num_parameters > 1_500_000


@pytest.mark.usefixtures("_no_tokenizer")
def test_quantized_tensor_with_one_dimension_is_read_as_such(tmp_path):
    plain, path = tmp_path / "plain.gguf", tmp_path / "tiny.gguf"
    write_random_gguf(plain, "qwen2", CONFIGS["qwen2"], kinds=KINDS)
    wanted = "blk.1.attn_norm.weight"

    def quantize(tensor):
        name, data, _ = tensor
        if name != wanted:
            return [tensor]
        return [(name, quantize_array(data, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)]

    rewrite_tensors(plain, path, quantize)
    with one_thread(), torch.inference_mode():
        expected, got = (run_in_chunks(load(file), PROMPTS, block_size=4) for file in (plain, path))
    assert all(float((a - b).std() / a.std()) < 0.2 for a, b in zip(expected, got, strict=True))
    wanted = "blk.1.attn_q.weight"
    rewrite_tensors(
        plain, path, lambda tensor: [(tensor[0], tensor[1][0] if tensor[0] == wanted else tensor[1], tensor[2])]
    )
    with pytest.raises(ValueError, match=r"tiny\.gguf: .*layers\.1\.self_attn\.q_proj\.weight has shape \[64\], not"):
        load(path)


@pytest.mark.usefixtures("_no_tokenizer")
def test_error_names_the_tensor_that_a_mapped_file_lacks(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "qwen3", CONFIGS["qwen3"], omitted="blk.1.attn_output")
    with pytest.raises(ValueError, match=r"tiny\.gguf: .* missing layers\.1\.self_attn\.o_proj\.weight; convert"):
        load(path)


ENGINE = {"skip_tokenizer_init": True, "device": "cpu", "max_model_len": 128, "num_threads": 1}


async def tokens_of(engine, prompt: list[int], count: int = 8, kill_at: int | None = None) -> list[int]:
    """Return the greedy tokens of an answer; kill the core with SIGKILL after `kill_at` tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params):
        tokens = list(output.outputs[0].token_ids)
        if kill_at is not None and len(tokens) >= kill_at:
            os.kill((await engine.core_status())["pid"], signal.SIGKILL)
            kill_at = None
    return tokens


@pytest.mark.essential
@pytest.mark.usefixtures("_no_tokenizer")
def test_engine_gives_the_greedy_tokens_of_the_dequantized_weights(tmp_path):
    path = tmp_path / "tiny.gguf"
    weights = write_random_gguf(path, "llama", CONFIGS["llama"], kinds=KINDS)
    theirs = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    theirs.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=False)
    theirs.tie_weights()
    with running_engine(path, **ENGINE) as engine:
        for output in generate_all(engine, PROMPTS, 6):
            assert_greedy(GreedyReference(theirs), output, near_tie=0.3)  # the core rounds inputs to 8 bits


@pytest.mark.usefixtures("_no_tokenizer")
def test_core_maps_the_file_again_after_a_kill_and_a_sleep_and_names_it_when_it_was_truncated(tmp_path, monkeypatch):
    monkeypatch.setenv(IN_PLACE_VARIABLE, "1")
    path = tmp_path / "tiny.gguf"
    config = LlamaConfig(**{**SIZES, "intermediate_size": 4096}, tie_word_embeddings=True)
    write_random_gguf(path, "llama", config, kinds=KINDS)

    async def run(engine):
        expected = await tokens_of(engine, PROMPTS[0], 20)
        assert await tokens_of(engine, PROMPTS[0], 20, kill_at=5) == expected
        await engine.sleep(2, mode="keep")
        await engine.wake_up()
        assert await tokens_of(engine, PROMPTS[0], 20) == expected
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(EngineDeadError, match=r"(?s)no further core can .*tiny\.gguf: .* the file has \d+ bytes"):
            await tokens_of(engine, PROMPTS[2])

    with running_engine(path, **ENGINE, max_core_restarts=100) as engine:
        asyncio.run(run(engine))


def replace_file(path):
    other = path.with_name("other.gguf")
    write_random_gguf(other, "llama", CONFIGS["llama"])
    other.rename(path)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_tokenizer")
def test_core_that_is_forked_with_a_truncated_model_is_followed_by_one_that_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv(IN_PLACE_VARIABLE, "1")
    path = tmp_path / "tiny.gguf"
    config = LlamaConfig(**{**SIZES, "intermediate_size": 4096}, tie_word_embeddings=True)
    write_random_gguf(path, "llama", config, kinds=KINDS)

    async def run(engine):
        await tokens_of(engine, PROMPTS[0])
        await model_template_of(engine)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(EngineDeadError, match=r"(?s)no further core can .*tiny\.gguf: .* the file has \d+ bytes"):
            await tokens_of(engine, PROMPTS[2])

    with running_engine(path, **ENGINE, max_core_restarts=100) as engine:
        asyncio.run(run(engine))


@pytest.mark.slow
@pytest.mark.usefixtures("_no_tokenizer")
def test_replaced_file_ends_no_core_but_a_core_that_reads_it_refuses_it(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "llama", CONFIGS["llama"], kinds=KINDS)

    async def run(engine):
        expected = await tokens_of(engine, PROMPTS[0])
        replace_file(path)
        assert await tokens_of(engine, PROMPTS[0]) == expected
        expected_error = r"(?s)no further core can .*tiny\.gguf was changed or replaced after the engine found it"
        with pytest.raises(EngineDeadError, match=expected_error):
            await tokens_of(engine, PROMPTS[0], 100, kill_at=1)

    with running_engine(path, **ENGINE, max_core_restarts=100, core_template=False) as engine:
        asyncio.run(run(engine))


@pytest.mark.slow
@pytest.mark.usefixtures("_no_tokenizer")
def test_core_that_is_forked_with_its_model_goes_on_after_the_file_was_replaced(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "llama", CONFIGS["llama"], kinds=KINDS)

    async def run(engine):
        expected = await tokens_of(engine, PROMPTS[0], 100)
        await model_template_of(engine)
        replace_file(path)
        assert await tokens_of(engine, PROMPTS[0], 100, kill_at=1) == expected

    with running_engine(path, **ENGINE) as engine:
        asyncio.run(run(engine))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "granite"])
def test_tokenizer_of_a_mapped_file_is_that_of_the_file(architecture, tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture)
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.encode("abcab", add_special_tokens=False) == [11, 10]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.slow
def test_file_without_a_usable_tokenizer_runs_with_another_or_with_token_ids(small_model, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.others"))
    cause = r"that of tiny\.gguf cannot be used: tokenizer\.ggml\.tokens is not a list of texts.* set `tokenizer` to"
    with pytest.raises(ValueError, match=cause):
        AsyncLLM.from_engine_args(AsyncEngineArgs(str(path), device="cpu", max_model_len=128))
    with running_engine(path, **ENGINE) as engine:
        expected = asyncio.run(tokens_of(engine, PROMPTS[0]))
    with running_engine(path, **ENGINE | {"skip_tokenizer_init": False}, tokenizer=str(small_model)) as engine:
        assert asyncio.run(tokens_of(engine, PROMPTS[0])) == expected
