"""The binding of a model's attention layers to the kernel that computes paged attention."""

from torch import nn

from vllm_mp.kernels import ops
from vllm_mp.kernels.attention_metadata import PagedAttention


class AttentionLayer(nn.Module):
    """A module that attends over the paged KV cache by calling `self.attend`.

    `attend` is `ops.paged_attention` until `bind_attention` replaces it.
    """

    attend: PagedAttention

    def __init__(self) -> None:
        super().__init__()
        self.attend = ops.paged_attention


def bind_attention(model: nn.Module, attend: PagedAttention) -> None:
    """Let every attention layer of `model` compute with `attend`; called once, after the weights are loaded.

    Layers that were fused with their attention (`ops.fuse_decoder`) have no `AttentionLayer` left, and keep theirs.
    """
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.attend = attend
