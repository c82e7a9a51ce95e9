"""The linear layers of a model that an adapter can change, and the projections in which the model computes them."""

from typing import Final, NamedTuple

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.families.registry import linear_layers

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
    family = linear_layers(arch)
    assert family.products is not None, "encoders have no adapters"
    return [
        Projection(
            tuple(f"{family.name}.{arch.first_layer + layer}.{product.at}{part.name}" for part in product.parts),
            product.parts[0].num_inputs(arch),
            tuple(part.num_outputs(arch) for part in product.parts),
        )
        for layer in range(arch.num_layers)
        for product in family.products(arch, layer)
    ]


def num_bytes(arch: NativeArchitecture, num_slots: int, max_rank: int, dtype_bytes: int) -> int:
    """Return the bytes that `num_slots` adapters of up to `max_rank` take on the device."""
    rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
    per_rank = sum(
        len(projection.parts) * projection.inputs + sum(projection.outputs) for projection in projections(arch)
    )
    return num_slots * rank * per_rank * dtype_bytes
