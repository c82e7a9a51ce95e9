"""Checks that a model of transformers computes the same over the paged KV cache.

That holds only if tokens influence each other through attention alone, and attention is causal over a window at most.
No flag of the library says so; the probe runs a few tokens through the loaded model and compares.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING

from vllm_mp.core.models.transformers.attention import MASKED, SERVING, Call, Layer, Paging
from vllm_mp.model_config.architecture import Architecture
from vllm_mp.model_config.families.other_decoder import OWN_ATTENTION, why_not_paged
from vllm_mp.model_config.families.registry import NATIVE_ARCHITECTURES
from vllm_mp.model_config.rope import rope_variants

# Arguments of an attention function that do not change its result, because paged attention knows the positions.
_INFORMATIVE: Final = ("position_ids", "cache_position", "position_embeddings", "is_causal")
# The greatest difference that rounding makes in a row when other rows of the batch change, relative to the row.
_ROUNDING: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
FAILURES: Final = (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError)
"""The errors that models of the library raise when they are used in a way that they were not made for."""
_MASK_POSITIONS: Final = 2**16
"""The most positions over which `_window` checks a mask."""
_MASK_QUERIES: Final = 16
"""The number of queries, spread evenly, whose masks `_window` checks, and those at its edges."""


class _Output(tuple[Tensor]):
    """A decoder's output that holds only the last hidden state."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough(nn.Module):
    """Replaces the decoder inside the model, and returns the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output((inputs_embeds,))


class Probed(NamedTuple):
    """What the probe found in a model."""

    decoder: nn.Module
    """The part that turns tokens into hidden states; inside the model, a pass-through has replaced it."""
    kv_shapes: list[tuple[tuple[int, int], tuple[int, int]]]
    """Shapes of one cell of each layer's cache: (heads, dim) of the keys, and of the values."""


def check_class(arch: Architecture, model_class: Any, hub_config: Any, max_model_len: int) -> None:
    """Raise ValueError for a model that is known to fail before any weight is read."""
    decoder_class = MODEL_MAPPING.get(type(hub_config), None)
    names = (model_class.__name__, getattr(decoder_class, "__name__", None))
    if arch.name not in names and not arch.name.endswith("ForCausalLM"):
        raise cannot_run(arch.name, f"the model that generates text is {model_class.__name__}")
    if hub_config.is_encoder_decoder:
        raise cannot_run(arch.name, "only decoder-only models are supported")
    if model_class._is_stateful:
        raise cannot_run(
            arch.name, "it keeps a state in addition to keys and values (a state-space or recurrent model)"
        )
    if not model_class._can_set_attn_implementation():
        raise cannot_run(arch.name, why_not_paged(hub_config.to_dict()) or OWN_ATTENTION)
    decoder = hub_config.get_text_config()
    for rope in rope_variants(decoder.to_dict()):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            decoder, "original_max_position_embeddings", None
        )
        if kind in ("longrope", "su") and (original is None or max_model_len > original):
            raise cannot_run(
                arch.name,
                f"rotary scaling {kind!r} changes keys that are already cached when a sequence outgrows {original} "
                f"tokens; set max_model_len to at most that (it is {max_model_len})",
            )


@torch.inference_mode()
def probe(
    causal: Any, paging: Paging, arch: Architecture, max_model_len: int, takes_prompt_embeds: bool = False
) -> Probed:
    """Run a few tokens through `causal`, check what the engine relies on, and enter its layers in `paging`.

    `takes_prompt_embeds`: the decoder must compute the same from its own embeddings as from token ids.
    Raises ValueError, or any of `FAILURES`, naming the first property that does not hold.
    """
    device, dtype = causal.device, causal.dtype
    text_config = causal.config.get_text_config()
    padding = getattr(text_config, "pad_token_id", None)
    ids = [token for token in range(8) if token != padding]
    last = max_model_len - 1

    def recorded(run: Callable[[Tensor, Tensor], Tensor], tokens: list[tuple[int, int]]) -> tuple[Tensor, list[Call]]:
        paging.calls = []
        result = run(*torch.tensor(tokens, device=device).unbind(1))
        calls, paging.calls = paging.calls, None
        return result, calls

    def score(input_ids: Tensor, _: Tensor) -> Tensor:
        logits: Tensor = causal(input_ids=input_ids.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return logits

    causal.set_attn_implementation(MASKED)
    start = [(ids[0], 0), (ids[1], 1)]
    with _watched(causal) as decoders:
        logits, masked = recorded(score, start)
    _check_layers(masked, text_config.num_hidden_layers, dtype)
    layers = {call.module: Layer(i, _window(i, call, max_model_len)) for i, call in enumerate(masked)}

    causal.set_attn_implementation(SERVING)
    decoder = decoders[-1]
    _replace(causal, decoder, _PassThrough())

    def decode(input_ids: Tensor, positions: Tensor) -> Tensor:
        return run_decoder(decoder, input_ids, positions)

    hidden, calls = recorded(decode, start)
    split = compute_logits(causal, hidden)
    if split.shape[-1] != arch.vocab_size or not equal(split, logits):
        raise ValueError(
            f"its decoder ({type(decoder).__name__}), given ids and positions from 0, and its head give "
            f"other scores than the whole model, or not {arch.vocab_size} of them (config field 'vocab_size')"
        )
    if not all(equal(getattr(x, n), getattr(y, n)) for x, y in zip(calls, masked, strict=True) for n in "qkv"):
        raise ValueError("its attention uses other positions than those that it is given as position_ids")

    if takes_prompt_embeds:
        embeds = embed_input_ids(decoder, torch.tensor(ids[:2], device=device))
        by_embeds, _ = recorded(lambda tokens, positions: run_decoder(decoder, tokens, positions, embeds), start)
        if embeds.shape[-1] != arch.hidden_size or not equal(by_embeds, hidden):
            raise ValueError(
                "it computes something else from embeddings than from token ids; leave enable_prompt_embeds out"
            )

    # The same three tokens twice: in another order, and beside another token.
    kept = [(ids[1], 0), (ids[2], min(2, last)), (ids[3], 1)]
    before, calls = recorded(decode, [*kept, (ids[4], 1)])
    after, calls_after = recorded(decode, [kept[1], (ids[5], last), kept[2], kept[0]])
    pairs = [("result", before, after)]
    for layer, (call, call_after) in enumerate(zip(calls, calls_after, strict=True)):
        if call_after.mask is not None:
            raise ValueError(f"layer {layer} makes its own mask, which paged attention cannot apply")
        pairs += [(f"{name} in layer {layer}", getattr(call, name), getattr(call_after, name)) for name in "qkv"]
    for what, first, second in pairs:
        if not equal(first[:3], second[[3, 0, 2]]):
            raise ValueError(
                f"{what} of a token depends on the tokens beside it, not through attention alone; paged attention "
                "cannot keep such a state"
            )
    paging.layers = layers
    kv_shapes = [((call.k.shape[1], call.k.shape[2]), (call.v.shape[1], call.v.shape[2])) for call in masked]
    return Probed(decoder, kv_shapes)


def embed_input_ids(decoder: Any, input_ids: Tensor) -> Tensor:
    """Return the embeddings [num_tokens, hidden_size] of `input_ids` by the decoder's own table."""
    embeds: Tensor = decoder.get_input_embeddings()(input_ids)
    return embeds


def run_decoder(
    decoder: nn.Module, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
) -> Tensor:
    """Return the hidden states [num_tokens, hidden_size] of a decoder of transformers.

    `inputs_embeds` [num_tokens, hidden_size] replaces `input_ids`.
    """
    name, inputs = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    output = decoder(**{name: inputs.unsqueeze(0)}, position_ids=positions.unsqueeze(0), use_cache=False)
    hidden: Tensor = output.last_hidden_state.squeeze(0)
    return hidden


def compute_logits(causal: Any, hidden: Tensor) -> Tensor:
    """Return the logits [n, vocab_size] of `hidden` [n, hidden_size], once the decoder was replaced."""
    logits: Tensor = causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
    return logits


def _check_layers(calls: list[Call], num_layers: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless every layer attends once, by arguments that paged attention knows."""
    if len(calls) != num_layers or len({call.module for call in calls}) != len(calls):
        raise ValueError(f"plain attention is used {len(calls)} times in {num_layers} layers; each must use it once")
    for layer, call in enumerate(calls):
        unknown = [
            name
            for name, value in call.others.items()
            if name not in _INFORMATIVE and not (value is None or (isinstance(value, bool | float) and not value))
        ]
        if unknown:
            raise ValueError(f"attention in layer {layer} takes {', '.join(unknown)}, which is not supported")
        if call.others.get("is_causal") is False or not getattr(call.module, "is_causal", True):
            raise ValueError(f"attention in layer {layer} is not causal")
        for name in ("q", "k", "v"):
            tensor = getattr(call, name)
            if tensor.dtype != dtype or tensor.shape[0] != calls[0].q.shape[0]:
                raise ValueError(
                    f"{name} in layer {layer} is {list(tensor.shape)} of {tensor.dtype}; it must have "
                    f"{calls[0].q.shape[0]} tokens of {dtype}"
                )


def _window(layer: int, call: Call, max_model_len: int) -> int | None:
    """Return the number of tokens that a query of the layer sees, itself included (None: all).

    The window is an argument of the call, or a property of its mask. Raises ValueError if the mask differs from it.
    """
    if call.mask is None:
        return call.window
    if not hasattr(call.mask, "rule"):
        raise ValueError(f"layer {layer} makes its own mask, which paged attention cannot apply")
    window: int | None = call.window or call.mask.window
    length = min(max_model_len, _MASK_POSITIONS)
    edges = {window - 1, window, window + 1} if window else set()
    queries = {*torch.linspace(0, length - 1, _MASK_QUERIES).long().tolist(), *(at for at in edges if at < length)}
    query_at = torch.tensor(sorted(queries)).unsqueeze(1)
    key_at = torch.arange(length).unsqueeze(0)
    zero = torch.tensor(0)
    expected = (key_at <= query_at) & (key_at > query_at - (window or length))
    if not torch.equal(call.mask.rule(zero, zero, query_at, key_at).expand_as(expected), expected):
        raise ValueError(
            f"the mask of layer {layer} is not causal over "
            + (f"a window of {window} tokens" if window else "the whole context")
            + f" within max_model_len={max_model_len}"
        )
    return window


def equal(left: Tensor, right: Tensor) -> bool:
    """Tell whether each row of the two is the same except for rounding."""
    rounding = _ROUNDING[left.dtype]
    left, right = left.flatten(1).float(), right.flatten(1).float()
    return bool(((left - right).norm(dim=1) <= rounding * left.norm(dim=1)).all())


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Collect the modules of `model` that return a last hidden state during this block, the outermost last."""
    found: list[nn.Module] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            found.append(module)

    hooks = [part.register_forward_hook(note) for part in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _replace(model: nn.Module, part: nn.Module, substitute: nn.Module) -> None:
    """Replace the module `part` inside `model` by `substitute`."""
    path = next(name for name, module in model.named_modules() if module is part)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, substitute)


def cannot_run(name: str, reason: str) -> ValueError:
    """Return the error for an architecture that cannot run here."""
    return ValueError(
        f"architecture {name!r} cannot run here: {reason}. Native implementations: {', '.join(NATIVE_ARCHITECTURES)}; "
        "transformers runs other decoders whose only state of earlier tokens is attention's keys and values"
    )


def describe(error: Exception) -> str:
    """Describe `error`; with its type, unless it is a ValueError, whose message says enough."""
    return str(error) if isinstance(error, ValueError) else repr(error)
