"""Random weights in the block types of GGUF files."""

import torch

from vllm_mp.kernels.block_weight import BLOCK_TYPES, BlockWeight

SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
"""Where the float16 numbers of a block begin, if not only at 0."""


def random_weight(name: str, outputs: int, inputs: int = 512) -> BlockWeight:
    """Return [outputs, inputs]: random integers with scales of one magnitude."""
    block_type = BLOCK_TYPES[name]
    blocks = torch.randint(256, (outputs, inputs // block_type.weights, block_type.num_bytes), dtype=torch.uint8)
    for at in SCALES_AT.get(name, (0,)):
        scales = torch.rand(*blocks.shape[:2], 1).mul(0.01).add(0.001)
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    return BlockWeight(blocks.flatten(1), block_type, inputs)
