"""The architecture of a model: the normalised form of a Hugging Face `config.json`.

Nothing here needs torch or transformers, so the client can read a model's shape too. `registry.read_architecture`
makes it from the contents of a `config.json`.
"""

from typing import Final, Literal

import msgspec

from vllm_mp.model_config.experts import Experts
from vllm_mp.model_config.quantization import BlockSource, FourBits, Fp8Scales
from vllm_mp.model_config.rope import Rope

NormPlace = Literal["before", "after", "around"]
"""Where norms stand: before each attention and MLP (Llama), after each (OLMo 2), or both (Gemma)."""
CLASS_ACTIVATIONS: Final = ("softmax", "sigmoid", "none")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a decoder or an encoder that every part of the engine needs.

    `max_position` is the longest context, in tokens, that the model is made for. `dtype` is the dtype of the weights in
    the checkpoint, None if the configuration does not state it.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_position: int
    dtype: str | None
    num_classes: int = 0
    """Classes that the model's head tells apart; 0: it has no such head."""
    class_activation: str = "softmax"
    """A member of `CLASS_ACTIVATIONS`: what makes probabilities, or scores, of the outputs of the head."""
    has_head: bool = True
    """False: a decoder without a head for tokens, which gives vectors and generates no text."""
    reason_not_native: str = ""
    """Why the model runs as transformers' module although its architecture has a native one; empty: it does not."""
    is_encoder: bool = False
    """True: every token sees the whole prompt, the model has no KV cache, and it generates no text."""

    @property
    def has_rope_positions(self) -> bool:
        """True: a token may be rotated by several positions (`Rope.sections`)."""
        return False


class NativeArchitecture(Architecture, frozen=True, kw_only=True):
    """A model that has a native module: its family, sizes and variations.

    `sliding_window` and `attention_scale` have one entry per layer: the window in tokens (None: the whole
    context), and the factor of the query-key products. `rope` is None for learned positions. Lowering
    `max_position` (`msgspec.structs.replace`) changes no rotary frequency, except that LongRoPE uses its short factors
    if the context is no longer than the original context.
    """

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    attention_scale: tuple[float, ...]
    rope: Rope | None
    local_rope: Rope | None = None
    """Rotary parameters of the layers with a window; None: those of `rope`."""
    embedding_scale: float = 1.0
    """Factor of the embeddings of tokens, rounded to the model's dtype."""
    input_multiplier: float = 1.0
    """Factor of what the first layer gets: embeddings of tokens, or those that are given instead."""
    residual_multiplier: float = 1.0
    """Factor of the output of each attention and each MLP, before it is added to the residual stream."""
    logits_divisor: float = 1.0
    attention_soft_cap: float | None = None
    """Limit of the scores of attention (see `ops.paged_attention`)."""
    logits_soft_cap: float | None = None
    """Limit of the logits, which become cap * tanh(logit / cap)."""
    norm_place: NormPlace = "before"
    norm_offset: float | None = None
    """Not None: norms multiply in float32 by their weights in the checkpoint plus this number, and round once."""
    norms_all_heads: bool = False
    """True: a query/key norm (`qk_norm`) runs over all heads together, not over each."""
    has_fused_projections: bool = False
    """True: the checkpoint has one matrix for q, k and v, and one for gate and up."""
    exceeds_float16: bool = False
    """True: activations of models of this family may exceed the range of float16, whatever the checkpoint's dtype."""
    experts: Experts | None = None
    """The experts of a mixture of experts."""
    num_token_types: int = 0
    """Rows of an encoder's table of token types: the first row is of all tokens, except that the second is of the
    second text of a pair; 0: no table."""
    position_offset: int = 0
    """Rows of the table of learned positions before the row of the first position."""
    fp8: Fp8Scales | None = None
    """The kind of scales that the projections' 8-bit weights have; None for other weights."""
    blocks: BlockSource | None = None
    """Where the block types of the weights come from; None for weights that are not in block types."""
    four_bits: FourBits | None = None
    """The layout of a checkpoint with 4 bits per weight; None for another checkpoint."""
    shard: "Shard | None" = None
    """The share of the model that these sizes are of; None: they are of the whole model."""
    stage: "Stage | None" = None
    """The layers that these lists and `num_layers` are of; None: all layers."""

    @property
    def has_rope_positions(self) -> bool:
        return self.rope is not None and bool(self.rope.sections)

    @property
    def first_layer(self) -> int:
        """The number of the first of these layers in the whole model."""
        return 0 if self.stage is None else self.stage.first

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of KV cache per token over all layers, at `dtype_bytes` per element; 0 for an encoder."""
        return dtype_bytes * sum(heads * dim for layer in self.kv_shapes for heads, dim in layer)

    @property
    def kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Shapes of one cell of each layer's cache: (heads, dim) of the keys, and of the values; [] for an encoder."""
        if self.is_encoder:
            return []
        shape = (self.num_kv_heads, self.head_dim)
        return [(shape, shape)] * self.num_layers


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """The layers [first, last) of a model with `num_layers` that one stage of a pipeline computes.

    The first stage also has the embedding and the head, the last stage the last norm.
    """

    first: int
    last: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.num_layers


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one rank in a model that `size` ranks compute together."""

    rank: int
    size: int
    whole: NativeArchitecture

    @property
    def vocabulary(self) -> tuple[int, int]:
        """The tokens [first, last) whose rows of the embedding and of the head the rank has."""
        width = self.vocabulary_width
        return self.rank * width, min((self.rank + 1) * width, self.whole.vocab_size)

    @property
    def vocabulary_width(self) -> int:
        """The number of tokens of each rank but the last, which may have fewer."""
        return -(-self.whole.vocab_size // self.size)

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads [first, last) of the rank."""
        count = self.whole.num_heads // self.size
        return self.rank * count, (self.rank + 1) * count

    @property
    def kv_heads(self) -> tuple[int, int]:
        """The heads of keys and values [first, last) of the rank; `kv_copies` ranks have the same."""
        count = max(1, self.whole.num_kv_heads // self.size)
        first = self.rank // self.kv_copies * count
        return first, first + count

    @property
    def kv_copies(self) -> int:
        """The number of ranks that hold the same heads of keys and values."""
        return max(1, self.size // self.whole.num_kv_heads)
