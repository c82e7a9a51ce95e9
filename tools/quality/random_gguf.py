#!/usr/bin/env python3
"""Write a GGUF file of a model with random weights, whose speed and memory can be measured like those of real models.

The model has the shapes of Mistral 7B, or others, and the types of the format Q4_K_M. Its tokenizer is that of
another file, whose vocabulary it has. Blocks are random bytes with scales that give weights of about 0.02.

With --chain a token alone decides which one follows, while everything is computed as in any model: the layers add
nothing, and each row of the head is the embedding of the token before. Two such models of the same vocabulary agree in
any wanted share of the tokens, so that one can draft for the other:

    tools/quality/random_gguf.py target.gguf --tokenizer FILE --chain
    tools/quality/random_gguf.py draft.gguf --tokenizer FILE --chain --agreement 0.7 \
        --hidden 2048 --inner 5632 --heads 16 --layers 12
    tools/speculation/speculation_speed.py --model target.gguf --method draft_model --draft-model draft.gguf \
        --kinds copy --streams 1
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


def next_tokens(vocab_size: int, agreement: float) -> npt.NDArray[np.int64]:
    """Return the token that follows each token, int64 [vocab_size], in one long cycle.

    With an `agreement` below 1, another token follows a token with the probability 1 - agreement.
    """
    rng = np.random.default_rng(1)
    cycle = rng.permutation(vocab_size)
    following = np.empty(vocab_size, np.int64)
    following[cycle] = np.roll(cycle, -1)
    differing = np.flatnonzero(rng.random(vocab_size) >= agreement)
    following[differing] = np.roll(following[differing], 1)
    return following


def matrices(
    sizes: Sizes, vocab_size: int, is_chain: bool
) -> Iterator[tuple[str, gguf.GGMLQuantizationType, int, int]]:
    """Yield name, type, outputs and inputs of each matrix, with the types that llama-quantize chooses for Q4_K_M."""
    small, large = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    hidden, inner, kv_size = sizes.hidden, sizes.inner, sizes.head_dim * sizes.kv_heads
    yield "token_embd", small, vocab_size, hidden
    yield "output", small if is_chain else large, vocab_size, hidden
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


def write(tokenizer: Path, out: Path, sizes: Sizes, agreement: float | None = None) -> None:
    """Write the file `out` with the tokenizer of the GGUF file `tokenizer`.

    `agreement`: tokens follow one another as `next_tokens` says; None: as the random weights have it.
    """
    is_chain = agreement is not None
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
    for name, type, outputs, inputs in matrices(sizes, vocab_size, is_chain):
        shape = gguf.quant_shape_to_byte_shape((outputs, inputs), type)
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8), shape[0] * shape[1], raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(sizes.hidden, np.float32))
    embeddings: Bytes | None = None
    for name, type, outputs, inputs in matrices(sizes, vocab_size, is_chain):
        data = random_blocks(rng, type, outputs, inputs)
        if agreement is not None:
            if name.endswith(("attn_output", "ffn_down")):
                data[:] = 0  # scales of 0
            elif name == "token_embd":
                embeddings = data
            elif name == "output":
                assert embeddings is not None
                data[next_tokens(vocab_size, agreement)] = embeddings
        writer.write_tensor_data(data)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="a GGUF file with a tokenizer")
    for name, default in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="(%(default)s)")
    parser.add_argument("--chain", action="store_true", help="a token alone decides which one follows")
    parser.add_argument(
        "--agreement", type=float, default=1.0, help="with --chain: share of the tokens that are followed alike"
    )
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes._fields})
    write(args.tokenizer, args.out, sizes, args.agreement if args.chain else None)


if __name__ == "__main__":
    main()
