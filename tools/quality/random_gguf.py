#!/usr/bin/env python3
"""Write a GGUF file of a model with random weights, whose speed and memory can be measured like those of real models.

The model has the shapes of Mistral 7B and the types of the format Q4_K_M, or fewer layers. Its tokenizer is that of
another file, whose vocabulary it has. Blocks are random bytes with scales that give weights of about 0.02.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

SCALE = np.float16(1e-4)
Bytes = npt.NDArray[np.uint8]


class Sizes(NamedTuple):
    """The shapes of a model; the sizes of matrices must be multiples of 256."""

    hidden: int = 4096
    inner: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def random_blocks(rng: np.random.Generator, type: gguf.GGMLQuantizationType, outputs: int, inputs: int) -> Bytes:
    """Return a random matrix as uint8 [outputs, bytes of a row]."""
    num_bytes = gguf.GGML_QUANT_SIZES[type][1]
    data = rng.integers(0, 256, gguf.quant_shape_to_byte_shape((outputs, inputs), type), np.uint8)
    blocks = data.reshape(-1, num_bytes)
    scale = np.frombuffer(SCALE.tobytes(), np.uint8)
    if type == gguf.GGMLQuantizationType.Q6_K:
        blocks[:, -2:] = scale
    else:  # Q4_K: the scale of the scales, and the scale of the minima, which are 7.5 times as large
        blocks[:, :2] = scale
        blocks[:, 2:4] = np.frombuffer(np.float16(7.5 * SCALE).tobytes(), np.uint8)
    return data


def matrices(sizes: Sizes, vocab_size: int) -> Iterator[tuple[str, gguf.GGMLQuantizationType, int, int]]:
    """Yield name, type, outputs and inputs of each matrix, with the types that llama-quantize chooses for Q4_K_M."""
    small, large = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    hidden, inner, kv_size = sizes.hidden, sizes.inner, sizes.head_dim * sizes.kv_heads
    yield "token_embd", small, vocab_size, hidden
    yield "output", large, vocab_size, hidden
    for layer in range(sizes.layers):
        eighth = sizes.layers // 8
        is_middle = eighth <= layer < 7 * sizes.layers // 8
        type = small if is_middle and (layer - eighth) % 3 != 2 else large
        for name, own_type, outputs, inputs in (
            ("attn_q", small, hidden, hidden),
            ("attn_k", small, kv_size, hidden),
            ("attn_v", type, kv_size, hidden),
            ("attn_output", small, hidden, hidden),
            ("ffn_gate", small, inner, hidden),
            ("ffn_up", small, inner, hidden),
            ("ffn_down", type, hidden, inner),
        ):
            yield f"blk.{layer}.{name}", own_type, outputs, inputs


def write(tokenizer: Path, out: Path, sizes: Sizes) -> None:
    """Write the file `out` with the tokenizer of the GGUF file `tokenizer`."""
    fields = gguf.GGUFReader(tokenizer).fields
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(32_768)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(sizes.head_dim)
    for name, field in fields.items():
        if name.startswith("tokenizer.ggml."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    vocab_size = len(fields["tokenizer.ggml.tokens"].contents())
    rng = np.random.default_rng(0)
    norms = ["output_norm"]
    norms += [f"blk.{layer}.{name}" for layer in range(sizes.layers) for name in ("attn_norm", "ffn_norm")]
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", (sizes.hidden,), np.dtype(np.float32), 4 * sizes.hidden)
    for name, type, outputs, inputs in matrices(sizes, vocab_size):
        shape = gguf.quant_shape_to_byte_shape((outputs, inputs), type)
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8), shape[0] * shape[1], raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(sizes.hidden, np.float32))
    for _, type, outputs, inputs in matrices(sizes, vocab_size):
        writer.write_tensor_data(random_blocks(rng, type, outputs, inputs))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="a GGUF file with a tokenizer")
    parser.add_argument("--layers", type=int, default=Sizes().layers, help="number of layers (%(default)s)")
    args = parser.parse_args()
    write(args.tokenizer, args.out, Sizes(layers=args.layers))


if __name__ == "__main__":
    main()
