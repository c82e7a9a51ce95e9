"""Random models with a few thousand weights, written in the format of llama.cpp's converter."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB = 4, 2, 64, 96, 12
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefg", "ab", "abc"]

Array = npt.NDArray[np.float32]


def write_tiny_gguf(path: Path, architecture: str = "llama", seed: int = 0) -> dict[str, Array]:
    """Write the file. Return its weights with the names and the order of transformers."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    _add_vocabulary(writer, "gpt2")

    weights: dict[str, Array] = {}

    def add(file_name: str, name: str, *shape: int, heads: int = 0, quantized: bool = False) -> None:
        weight = random.standard_normal(shape, dtype=np.float32)
        stored = interleaved(weight, heads) if heads else weight
        if quantized:
            blocks = gguf.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(file_name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            weight = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(file_name, stored)
        weights[name] = weight

    head = HIDDEN // HEADS
    layer = "model.layers.0."
    add("token_embd.weight", "model.embed_tokens.weight", VOCAB, HIDDEN)
    add("blk.0.attn_norm.weight", layer + "input_layernorm.weight", HIDDEN)
    add("blk.0.attn_q.weight", layer + "self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
    add("blk.0.attn_k.weight", layer + "self_attn.k_proj.weight", KV_HEADS * head, HIDDEN, heads=KV_HEADS)
    add("blk.0.attn_v.weight", layer + "self_attn.v_proj.weight", KV_HEADS * head, HIDDEN, quantized=True)
    add("blk.0.attn_output.weight", layer + "self_attn.o_proj.weight", HIDDEN, HIDDEN, quantized=True)
    add("blk.0.ffn_norm.weight", layer + "post_attention_layernorm.weight", HIDDEN)
    add("blk.0.ffn_gate.weight", layer + "mlp.gate_proj.weight", INNER, HIDDEN, quantized=True)
    add("blk.0.ffn_up.weight", layer + "mlp.up_proj.weight", INNER, HIDDEN)
    add("blk.0.ffn_down.weight", layer + "mlp.down_proj.weight", HIDDEN, INNER)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    add("output.weight", "lm_head.weight", VOCAB, HIDDEN)

    finish(writer)
    return weights


def write_random_gguf(
    path: Path,
    architecture: str,
    config: PreTrainedConfig,
    omitted: str | None = None,
    kinds: Sequence[gguf.GGMLQuantizationType] = (),
    unquantized: str = "ffn_gate_inp",
) -> dict[str, Array]:
    """Write random weights of a transformers model with llama.cpp's names, and order of rows. Return the weights.

    Tensors whose names contain `omitted` are left out. All matrices have the block types `kinds` in turn, if there
    are any, except those whose names contain `unquantized`, which are gates unless it is given.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        _add_phi3(writer, config)
    if num_experts := getattr(config, "num_experts", getattr(config, "num_local_experts", None)):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    _add_vocabulary(writer, "llama" if architecture in ("gemma2", "phi3") else "gpt2")

    weights: dict[str, Array] = {}
    types = itertools.cycle(kinds)
    adds_to_norms = architecture in ("gemma2", "gemma3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            module, kind = name, "weight"  # the stacked experts of a layer
        centre = 1.0 if parameter.dim() == 1 and kind == "weight" and not adds_to_norms else 0.0
        weight = (centre + 0.2 * random.standard_normal(tuple(parameter.shape))).astype(np.float32)
        if module.endswith("experts.gate_up_proj"):
            places = [names.get_name(module.replace("gate_up", part)) for part in ("gate", "up")]
            parts = np.split(weight, 2, axis=1)
        else:
            places = [names.get_name(module)]
            parts = [weight[0] if "shared_expert_gate" in name else weight]
        stored: list[Array] = []
        for place, part in zip(places, parts, strict=True):
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(place[-6:], 0)
            interleaves = architecture in ("llama", "granite") and heads
            type = next(types) if kinds and parameter.dim() >= 2 and unquantized not in place else None
            stored.append(part if type is None else gguf.dequantize(gguf.quantize(part, type), type))
            if omitted is not None and omitted in place:
                continue
            part = interleaved(part, heads) if interleaves else part
            if type is not None:
                writer.add_tensor(f"{place}.{kind}", gguf.quantize(part, type), raw_dtype=type)
            else:
                if adds_to_norms and parameter.dim() == 1:
                    part = part + 1
                writer.add_tensor(f"{place}.{kind}", np.ascontiguousarray(part))
        weights[name] = np.concatenate(stored, axis=1) if len(stored) > 1 else stored[0].reshape(weight.shape)
    finish(writer)
    return weights


Tensor = tuple[str, npt.NDArray[np.generic], gguf.GGMLQuantizationType]
"""Name, data and type."""


def rewrite_tensors(source: Path, path: Path, change: Callable[[Tensor], Iterable[Tensor]], **options: Any) -> None:
    """Write the model in `source` with what `change` returns in place of each tensor, and `options` of the writer."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents(), **options)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        for name, data, type in change((tensor.name, tensor.data, tensor.tensor_type)):
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=type)
    finish(writer)


def split(source: Path, path: Path, tensors_per_part: int, *, first_has_tensors: bool = True) -> list[Path]:
    """Write the model in `source` as a file in parts, which llama.cpp's names make of `path`; return their paths."""
    rewrite_tensors(
        source,
        path,
        lambda tensor: [tensor],
        split_max_tensors=tensors_per_part,
        small_first_shard=not first_has_tensors,
    )
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def separated_experts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield, as older converters did, a tensor for each expert in place of a stacked one; other tensors as they are."""
    name, data, type = tensor
    if "_exps." not in name:
        yield tensor
        return
    for expert, matrix in enumerate(data):
        yield name.replace("_exps.", f".{expert}."), matrix, type


def _add_phi3(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Add what only files of Phi-3 have."""
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _add_vocabulary(writer: gguf.GGUFWriter, model: str) -> None:
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the sizes that all architectures have."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Array, heads: int) -> Array:
    """Return the rows in GGUF's order: the two parts of a rotated pair are adjacent, not half a head apart."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
