"""Checkpoints of random models in 4 bits (AWQ, GPTQ) and in 8-bit floats."""

import json

import torch
from safetensors.torch import load_file, save_file

from vllm_mp.core.models.experts import mixture_name, separate_experts
from vllm_mp.kernels import reference

OUTPUTS, INPUTS = 24, 256


def packed(integers, dim, order=range(8)):
    """Return int32 with eight of `integers`, side by side in `dim`, in each; `order` has the place of each 4 bits."""
    groups = integers.to(torch.int64).unflatten(dim, (-1, 8))
    words = sum(groups.select(dim + 1, place) << 4 * i for i, place in enumerate(order))
    return (words - (words >> 31 << 32)).to(torch.int32)


def quantized(four_bits, is_symmetric=False, weight=None):
    """Return the tensors that store a random matrix, or `weight`, and the matrix that they stand for, in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) if weight is None else weight
    inputs = weight.shape[1]
    group = four_bits.group_size or inputs
    group_of = torch.arange(inputs) // group
    if four_bits.is_reordered:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    columns = [weight.T[group_of == i] for i in range(inputs // group)]
    scales = torch.stack([(column.amax(0) - column.amin(0)) / 15 for column in columns]).half()
    if is_symmetric:
        scales, zeros = (scales * 1.2).half(), torch.full(scales.shape, 8)
    else:
        zeros = torch.stack([-column.amin(0) for column in columns]).div(scales.float()).round().clamp(0, 15).long()
    integers = (weight.T / scales.float()[group_of] + zeros[group_of]).round().clamp(0, 15).long()
    stands_for = (integers - zeros[group_of]) * scales.double()[group_of]
    if four_bits.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": packed(integers, 1, order), "qzeros": packed(zeros, 1, order)}
    else:
        stored = (zeros - four_bits.zero_offset) % 16
        zeros_of_file = stored + four_bits.zero_offset
        stands_for = (integers - zeros_of_file[group_of]) * scales.double()[group_of]
        tensors = {"qweight": packed(integers, 0), "qzeros": packed(stored, 1), "g_idx": group_of.to(torch.int32)}
    return tensors | {"scales": scales}, stands_for.T


def save_in_four_bits(folder, four_bits):
    """Quantize the model in `folder`, but for its values of attention; return what its tensors stand for, by name."""
    named = ((mixture_name(name), tensor) for name, tensor in load_file(folder / "model.safetensors").items())
    stored, stands_for = {}, {}
    for name, tensor in separate_experts(named):
        if name.endswith("_proj.weight") and "v_proj" not in name:
            tensors, stands_for[name] = quantized(four_bits, weight=tensor.float())
            stored |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in tensors.items()}
        else:
            stored[name] = stands_for[name] = tensor
    stated = {"quant_method": four_bits.method, "bits": 4, "group_size": four_bits.group_size}
    _save(folder, stored, stated | ({"desc_act": four_bits.is_reordered} if four_bits.method == "gptq" else {}))
    return stands_for


def save_in_float8(folder, has_blocks):
    """Quantize the model in `folder` to 8-bit floats, with a scale for each 128 x 128 weights or for each matrix."""
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = (128, 128) if has_blocks else tensor.shape
        tiles = tensor.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = tiles.abs().amax((1, 3)) / reference.FLOAT8_MAX
        stored[name] = reference.to_float8(tiles / scale[:, None, :, None]).view(tensor.shape)
        stored[f"{name}_scale_inv" if has_blocks else f"{name}_scale"] = scale if has_blocks else scale[0, 0]
    _save(folder, stored, {"quant_method": "fp8"} | ({"weight_block_size": [128, 128]} if has_blocks else {}))


def _save(folder, tensors, quantization):
    """Put `tensors` in the place of those in `folder`, and `quantization` in its configuration."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": quantization}))
