"""The gated feed-forward network of the Llama family."""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_mp.core.models.linear import Linear
from vllm_mp.core.weights.checkpoint import Destination
from vllm_mp.kernels import ops
from vllm_mp.model_config.architecture import NativeArchitecture


class MLP(nn.Module):
    """The gated feed-forward network, with gate and up in one projection."""

    def __init__(self, arch: NativeArchitecture, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate; gate and up have `inner` outputs each."""
        super().__init__()
        hidden = arch.hidden_size
        parts = [2 * inner] if arch.has_fused_projections else [inner, inner]
        form: Any = {"dtype": dtype, "device": device, "fp8": arch.fp8, "blocks": arch.blocks}
        self.gate_up_proj = Linear(hidden, parts, arch.mlp_bias, **form)
        self.down_proj = Linear(inner, hidden, arch.mlp_bias, **form)
        self._gate_up_names = ["gate_up_proj"] if arch.has_fused_projections else ["gate_proj", "up_proj"]
        self._activation = arch.activation

    def forward(self, x: Tensor | ops.QuantizedRows, adapter_slots: Tensor | None = None) -> Tensor:
        gate_up, groups = self.gate_up_proj(x, adapter_slots), self.down_proj.input_groups
        product: Tensor | ops.QuantizedRows
        if groups is not None and self._activation in ops.SILU:
            product = ops.silu_and_mul_rows(gate_up, groups)
        else:
            product = ops.gated_product(gate_up, self._activation)
        out: Tensor = self.down_proj(product, adapter_slots)
        return out

    def adaptable_projections(self) -> list[Linear]:
        """Return the projections that adapters can change, in the order of `core.lora.targets.projections`."""
        return [self.gate_up_proj, self.down_proj]

    def destinations(self, at: str) -> dict[str, Tensor | Destination]:
        """Map checkpoint names, which begin with `at`, to the rows that they fill."""
        gate_up = self.gate_up_proj.destinations([at + name for name in self._gate_up_names])
        return gate_up | self.down_proj.destinations([at + "down_proj"])
