"""The linear layers of a model that an adapter can change, and the projections in which the model computes them."""

from typing import Final, NamedTuple

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.families.registry import NATIVE_MODELS

RANK_UNIT: Final = 16
"""Memory is counted for ranks that are multiples of this, as vectors and tiles of matrix units are."""


class Projection(NamedTuple):
    """One product of the model, which fuses linear layers with the same input."""

    parts: tuple[str, ...]
    """The names of the linear layers in a checkpoint, without the name of the model around the layers."""
    inputs: int
    outputs: tuple[int, ...]
    """The number of outputs of each part."""


def projections(arch: NativeArchitecture) -> list[Projection]:
    """Return the projections of the layers of a decoder, in the order in which the model computes them."""
    of_layer = _LAYERS[NATIVE_MODELS[arch.name].model.partition(":")[0]]
    return [projection for layer in range(arch.num_layers) for projection in of_layer(arch, layer)]


def num_bytes(arch: NativeArchitecture, num_slots: int, max_rank: int, dtype_bytes: int) -> int:
    """Return the bytes that `num_slots` adapters of up to `max_rank` take on the device."""
    rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
    per_rank = sum(
        len(projection.parts) * projection.inputs + sum(projection.outputs) for projection in projections(arch)
    )
    return num_slots * rank * per_rank * dtype_bytes


def _llama_layer(arch: NativeArchitecture, layer: int) -> list[Projection]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    number = arch.first_layer + layer
    attention, mlp = f"layers.{number}.self_attn.", f"layers.{number}.mlp."
    if arch.has_fused_projections:
        qkv = Projection((f"{attention}qkv_proj",), hidden, (queries + 2 * keys,))
        gate_up = Projection((f"{mlp}gate_up_proj",), hidden, (2 * inner,))
    else:
        qkv = Projection(tuple(f"{attention}{part}_proj" for part in "qkv"), hidden, (queries, keys, keys))
        gate_up = Projection((f"{mlp}gate_proj", f"{mlp}up_proj"), hidden, (inner, inner))
    of_attention = [qkv, Projection((f"{attention}o_proj",), queries, (hidden,))]
    if arch.experts is not None and arch.experts.layers[layer]:
        return of_attention
    return [*of_attention, gate_up, Projection((f"{mlp}down_proj",), inner, (hidden,))]


def _gpt2_layer(arch: NativeArchitecture, layer: int) -> list[Projection]:
    hidden, inner, of_heads = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
    at = f"h.{arch.first_layer + layer}."
    return [
        Projection((f"{at}attn.c_attn",), hidden, (3 * of_heads,)),
        Projection((f"{at}attn.c_proj",), of_heads, (hidden,)),
        Projection((f"{at}mlp.c_fc",), hidden, (inner,)),
        Projection((f"{at}mlp.c_proj",), inner, (hidden,)),
    ]


_LAYERS: Final = {"llama": _llama_layer, "gpt2": _gpt2_layer}
"""By the module of `core/models` that runs the family."""
