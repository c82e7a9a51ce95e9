"""A random Llama of a few thousand weights, written as llama.cpp's converter would write it."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB = 4, 2, 64, 96, 12
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefg", "ab", "abc"]

Array = npt.NDArray[np.float32]


def write_tiny_gguf(path: Path, architecture: str = "llama", seed: int = 0) -> dict[str, Array]:
    """Write the file and return its weights under the names, and in the order, that transformers gives them."""
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
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    weights: dict[str, Array] = {}

    def add(file_name: str, name: str, *shape: int, heads: int = 0, quantised: bool = False) -> None:
        weight = random.standard_normal(shape, dtype=np.float32)
        stored = _interleaved(weight, heads) if heads else weight
        if quantised:
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
    add("blk.0.attn_v.weight", layer + "self_attn.v_proj.weight", KV_HEADS * head, HIDDEN, quantised=True)
    add("blk.0.attn_output.weight", layer + "self_attn.o_proj.weight", HIDDEN, HIDDEN, quantised=True)
    add("blk.0.ffn_norm.weight", layer + "post_attention_layernorm.weight", HIDDEN)
    add("blk.0.ffn_gate.weight", layer + "mlp.gate_proj.weight", INNER, HIDDEN, quantised=True)
    add("blk.0.ffn_up.weight", layer + "mlp.up_proj.weight", INNER, HIDDEN)
    add("blk.0.ffn_down.weight", layer + "mlp.down_proj.weight", HIDDEN, INNER)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    add("output.weight", "lm_head.weight", VOCAB, HIDDEN)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _interleaved(weight: Array, heads: int) -> Array:
    """GGUF keeps the two halves of a rotated pair side by side, transformers half a head apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
