"""The linear layers of a family, declared once: which of them LoRA adapters can change, and how ranks share them out.

Layers whose outputs are shared out are cut by outputs (q, k, v, gate, up), those whose inputs are shared out by inputs
(o, down). The outputs of the latter are summed over the ranks.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from vllm_mp.model_config.architecture import NativeArchitecture, Shard

Range = tuple[int, int]
"""First and last + 1."""


class Dimension(NamedTuple):
    """The outputs, or the inputs, of a linear layer that the ranks share out."""

    size: Callable[[NativeArchitecture], int]
    """Returns their number in a model, or in the share of a rank."""
    ranges: Callable[[Shard, int], list[Range]]
    """Returns the rank's ranges, given the number of the whole model."""


def _of_heads(heads: Range, dim: int) -> Range:
    return heads[0] * dim, heads[1] * dim


def _query_key_value(shard: Shard, size: int) -> list[Range]:
    """Queries, keys and values lie one below another in one matrix."""
    arch = shard.whole
    dim = size // (arch.num_heads + 2 * arch.num_kv_heads)
    keys, values = arch.num_heads * dim, (arch.num_heads + arch.num_kv_heads) * dim
    first, last = _of_heads(shard.kv_heads, dim)
    return [_of_heads(shard.heads, dim), (keys + first, keys + last), (values + first, values + last)]


def _even(shard: Shard, size: int) -> list[Range]:
    part = size // shard.size
    return [(shard.rank * part, (shard.rank + 1) * part)]


def _gate_and_up(shard: Shard, size: int) -> list[Range]:
    """Gate and up lie one below the other in one matrix."""
    ((first, last),) = _even(shard, size // 2)
    return [(first, last), (size // 2 + first, size // 2 + last)]


HEADS: Final = Dimension(
    lambda arch: arch.num_heads * arch.head_dim,
    lambda shard, size: [_of_heads(shard.heads, size // shard.whole.num_heads)],
)
"""The queries of all heads."""
KV_HEADS: Final = Dimension(
    lambda arch: arch.num_kv_heads * arch.head_dim,
    lambda shard, size: [_of_heads(shard.kv_heads, size // shard.whole.num_kv_heads)],
)
"""The keys, or the values, of all heads."""
QUERY_KEY_VALUE: Final = Dimension(
    lambda arch: (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim, _query_key_value
)
ATTENDED: Final = Dimension(HEADS.size, _even)
"""The outputs of attention, of all heads."""
INNER: Final = Dimension(lambda arch: arch.intermediate_size, _even)
"""The inner values of an MLP."""
GATE_AND_UP: Final = Dimension(lambda arch: 2 * arch.intermediate_size, _gate_and_up)
VOCABULARY: Final = Dimension(lambda arch: arch.vocab_size, lambda shard, _: [shard.vocabulary])


class LinearLayer(NamedTuple):
    """A linear layer, or an embedding, whose outputs or inputs the ranks share out."""

    name: str
    """The end of its name in a checkpoint."""
    shared: Dimension
    """Its outputs, or its inputs. There are `hidden_size` of the others, which are not shared out."""
    by_inputs: bool = False
    """True: the ranks share out the inputs, and each computes a term of the outputs."""
    is_transposed: bool = False
    """The weight is stored [inputs, outputs]."""

    def num_inputs(self, arch: NativeArchitecture) -> int:
        return self.shared.size(arch) if self.by_inputs else arch.hidden_size

    def num_outputs(self, arch: NativeArchitecture) -> int:
        return arch.hidden_size if self.by_inputs else self.shared.size(arch)


class Product(NamedTuple):
    """Linear layers with the same input, which the model computes in one product."""

    at: str
    """What stands between the number of the layer of the model and the names of the parts, with a dot; or empty."""
    parts: tuple[LinearLayer, ...]


class FamilyLayers:
    """The linear layers of a family, and the names of what the first and the last stage of a pipeline hold."""

    def __init__(
        self,
        name: str,
        layers: Sequence[LinearLayer],
        products: Callable[[NativeArchitecture, int], list[Product]] | None = None,
        of_first_stage: Sequence[str] = (),
        of_last_stage: Sequence[str] = (),
    ) -> None:
        """`name` stands before the number of a layer of the model in a checkpoint.

        `layers` are all linear layers that ranks share out. `products` returns those of one layer of the model that
        adapters can change, in the order in which the model computes them; None for a family without adapters. Only the
        first stage holds modules `of_first_stage`, such as embedding and head, and only the last those `of_last_stage`.
        """
        self.name = name
        self.products = products
        self.of_first_stage = frozenset(of_first_stage)
        self.of_last_stage = frozenset(of_last_stage)
        self._by_name = {layer.name: layer for layer in layers}
        self._number = re.compile(rf".*\b{re.escape(name)}\.(\d+)\.")

    def number_of(self, name: str) -> int | None:
        """Return the number of the layer of the model that a name in a checkpoint belongs to; None if to none."""
        found = self._number.match(name)
        return None if found is None else int(found[1])

    def find(self, module: str) -> LinearLayer | None:
        """Return the linear layer called `module` in a checkpoint; None if every rank holds the module whole."""
        path = self._number.sub("", module)
        return self._by_name.get(path) or self._by_name.get(path.rpartition(".")[2])
