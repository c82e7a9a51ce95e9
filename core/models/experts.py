"""The MLP of a layer with experts: Mixtral, Qwen2-MoE, Qwen3-MoE and Granite-MoE (Shazeer et al. 2017).

An expert is an MLP that computes some of the tokens. The router chooses the experts of each token, and weighs their
outputs.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.models.linear import Linear, Packable
from vllm_mp.core.models.mlp import MLP
from vllm_mp.core.weights.block_matrix import BlockMatrix, destination_of, projection_type
from vllm_mp.core.weights.checkpoint import Destination
from vllm_mp.kernels import ops
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.experts import Experts

_NAMES: Final = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.mlp\.router\.layer\."), ".mlp.gate."),
    (re.compile(r"\.mlp\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.mlp\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
)
"""What Mixtral and Granite-MoE call the tensors that Qwen calls otherwise."""


class Gate(Linear):
    """A projection whose outputs decide or weigh; quantization leaves it as it is."""

    def pack(self, quantization: str | None) -> None:
        super().pack(None)


class ExpertMLP(Packable):
    """A router, the experts among which it chooses for each token, and maybe an expert that all tokens share."""

    def __init__(self, arch: NativeArchitecture, experts: Experts, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._experts = experts
        self._activation = arch.activation
        hidden, inner, count = arch.hidden_size, experts.intermediate_size, experts.num_experts
        at: dict[str, Any] = {"dtype": dtype, "device": device}
        self._dtype = dtype
        self.router = Gate(hidden, count, False, **at)
        self.gate_up: nn.Parameter | nn.ModuleList
        self.down: nn.Parameter | nn.ModuleList
        if arch.blocks is not None:
            types = [projection_type(size, arch.blocks) for size in (hidden, inner)]
            self.gate_up = nn.ModuleList(BlockMatrix(hidden, [inner, inner], types[0]) for _ in range(count))
            self.down = nn.ModuleList(BlockMatrix(inner, [hidden], types[1]) for _ in range(count))
        else:
            self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden, **at))
            self.down = nn.Parameter(torch.empty(count, hidden, inner, **at))
        self._packed: Any = None
        self.shared: MLP | None = None
        self.shared_gate: Gate | None = None
        if experts.shared_intermediate_size:
            self.shared = MLP(arch, experts.shared_intermediate_size, dtype, device)
            self.shared_gate = Gate(hidden, 1, False, **at)

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Return the output for `x` [num_tokens, hidden_size]; no adapter changes it."""
        router_weights, expert_ids = self._route(x)
        out: Tensor
        if self._packed is not None:
            out = self._packed(x, expert_ids, router_weights)
        else:
            assert isinstance(self.gate_up, Tensor)
            assert isinstance(self.down, Tensor)
            out = ops.experts(x, expert_ids, router_weights, self.gate_up, self.down, self._activation)
        if self.shared is not None and self.shared_gate is not None:
            out = out + _sigmoid(self.shared_gate(x)) * self.shared(x)
        return out

    def pack(self, quantization: str | None) -> None:
        gate_up, down = _matrices(self.gate_up), _matrices(self.down)
        if not isinstance(gate_up, Tensor):
            assert not isinstance(down, Tensor)
            self._packed = ops.block_experts(gate_up, down, self._activation, self._dtype)
            for matrix in (*self.gate_up, *self.down):
                matrix.give_up()
            return
        assert isinstance(down, Tensor)
        self._packed = ops.pack_experts(gate_up, down, self._activation, quantization)
        if self._packed is not None:
            del self.gate_up, self.down

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and the ids of each token's experts, both [num_tokens, num_chosen]."""
        probabilities = F.softmax(self.router(x), -1, dtype=torch.float32)
        weights, ids = probabilities.topk(self._experts.num_chosen, -1)
        if self._experts.normalizes_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.to(x.dtype).float() if self._experts.rounds_weights else weights), ids

    def weights(self) -> ops.ExpertWeights:
        """Return the weights of the router and the experts, for `ops.fuse_decoder`."""
        experts = self._experts
        return ops.ExpertWeights(
            self.router.weight,
            _matrices(self.gate_up),
            _matrices(self.down),
            experts.num_chosen,
            experts.normalizes_weights,
            experts.rounds_weights,
            None if self.shared_gate is None else self.shared_gate.weight,
        )

    def adaptable_projections(self) -> list[Linear]:
        """Return no projection; see `MLP.adaptable_projections`."""
        return []

    def destinations(self, at: str) -> dict[str, Tensor | Destination]:
        """Map checkpoint names, which begin with `at`, to the rows that they fill."""
        destinations = self.router.destinations([at + "gate"])
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            matrices = [_part(gate_up, 0), _part(gate_up, 1), destination_of(down)]
            for name, destination in zip(("gate", "up", "down"), matrices, strict=True):
                destinations[f"{at}experts.{expert}.{name}_proj.weight"] = destination
        if self.shared is not None and self.shared_gate is not None:
            destinations |= self.shared.destinations(at + "shared_expert.")
            destinations |= self.shared_gate.destinations([at + "shared_expert_gate"])
        return destinations


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of `x` [num_tokens, 1]; the result of torch's own depends on the index of the element."""
    return F.softmax(F.pad(x, (0, 1)), -1, dtype=torch.float32)[:, :1].to(x.dtype)


def _matrices(matrices: nn.Parameter | nn.ModuleList) -> Tensor | ops.ExpertBlocks:
    """Return the matrices of all experts as they are, or the parts of the `BlockMatrix` of each expert."""
    if isinstance(matrices, Tensor):
        return matrices
    return [matrix.parts for matrix in matrices if isinstance(matrix, BlockMatrix)]


def _part(gate_up: Tensor | BlockMatrix, part: int) -> Tensor | Destination:
    """Return the destination of gate (`part` 0) or up (1) of an expert."""
    return gate_up.destination(part) if isinstance(gate_up, BlockMatrix) else gate_up.chunk(2)[part]


def mixture_name(name: str) -> str:
    """Return the name that `ExpertMLP.destinations` has for a tensor of Mixtral or Granite-MoE."""
    for pattern, replacement in _NAMES:
        name = pattern.sub(replacement, name)
    return name


def separate_experts(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield `tensors`, with a tensor for each expert instead of those that hold all experts of a layer.

    Such a tensor is [num_experts, 2 * inner, hidden], gate before up, or [num_experts, hidden, inner].
    """
    for name, tensor in tensors:
        at, _, part = name.rpartition("experts.")
        if part not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
            yield name, tensor
            continue
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for own_name, rows in zip(names, matrix.chunk(len(names)), strict=False):
                yield f"{at}experts.{expert}.{own_name}.weight", rows
