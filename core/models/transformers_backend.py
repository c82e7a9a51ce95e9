"""Any decoder that transformers can run, over the paged KV cache.

The module is transformers' own. Its attention goes through the library's registry of attention functions, in
which ours stands: it writes keys and values into the cache and attends over it, so that the sequences of a step
can lie one behind the other in a batch of one. That is right only for a model in which attention is all that
tokens have of each other, and attention is causal over a window at most. No flag of the library says so; a few
tokens, run through the loaded model, show it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.utils import logging as hub_logging

from vllm_mp.config import ModelConfig
from vllm_mp.core.models.loading import CheckpointMismatchError, listed
from vllm_mp.core.weights.loader import checkpoint_files, fill_with_dummy_weights, read_tensors
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata
from vllm_mp.model_config.architecture import SUPPORTED, Architecture
from vllm_mp.model_config.rope import rope_variants

_SERVING: Final = "vllm_mp"
"""Our attention function. The library makes no mask for a name that its registry of masks does not hold."""
_MASKED: Final = "vllm_mp_masked"
"""The same function, with the masks that the model asks for."""

# Arguments of an attention function that say nothing about its result: paged attention knows positions itself.
_INFORMATIVE: Final = ("position_ids", "cache_position", "position_embeddings", "is_causal")
# What rounding may change in a row when the rows beside it change, relative to the row.
_ROUNDING: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
# How a model of the library fails that was not made for what is asked of it.
_FAILURES: Final = (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError)
_MASK_POSITIONS: Final = 2**16
_MASK_QUERIES: Final = 16


class _Call(NamedTuple):
    """One use of attention in a probe; `q`, `k`, `v` [num_tokens, heads, dim]."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    window: int | None
    others: Mapping[str, Any]


class _Layer(NamedTuple):
    """The place of an attention module: its cache, and the window in tokens."""

    cache: int
    window: int | None


class _Paging:
    """What the attention modules of one model share: the step that is run, or the calls of a probe."""

    def __init__(self) -> None:
        self.layers: dict[nn.Module, _Layer] = {}
        self.kv_caches: list[tuple[Tensor, Tensor]] = []
        self.metadata: AttentionMetadata | None = None
        self.calls: list[_Call] | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: `query`, `key`, `value` [1, heads, num_tokens, dim], result [1, num_tokens, heads, dim].

    In a probe a token attends to itself alone.
    """
    paging = cast("_Paging", module.paging)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if paging.calls is not None:
        paging.calls.append(_Call(module, q, k, v, attention_mask, sliding_window, others))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).unsqueeze(0), None
    assert paging.metadata is not None
    layer = paging.layers[module]
    cache = paging.kv_caches[layer.cache]
    ops.write_kv(k, v, *cache, paging.metadata.cell_mapping)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return ops.paged_attention(q, *cache, paging.metadata, scale, layer.window, softcap).unsqueeze(0), None


def _mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any
) -> Tensor:
    """A mask that carries the rule by which the library would have made it, and the window that it is for."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    vars(mask).update(rule=mask_function, window=local_size)
    return mask


AttentionInterface.register(_SERVING, _attention)
AttentionInterface.register(_MASKED, _attention)
AttentionMaskInterface.register(_MASKED, _mask)


class _Output(tuple[Tensor]):
    """A decoder's output of which only the last hidden state exists."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _HandsOver(nn.Module):
    """Stands in the decoder's place and gives out the hidden states that it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output((inputs_embeds,))


class TransformersForCausalLM(nn.Module):
    """A causal language model of transformers; `vllm_mp.core.models.CausalLM` is the contract."""

    def __init__(self, causal: Any, arch: Architecture, max_model_len: int) -> None:
        """Take over `causal`, a model with its weights and our attention.

        Raises ValueError, naming the architecture and the cause, where the model would not answer as
        transformers does.
        """
        super().__init__()
        self._paging = _Paging()
        for module in causal.modules():
            module.paging = self._paging
        self.causal = causal
        try:
            self.kv_shapes = self._probe(arch, max_model_len)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            raise _cannot_run(arch.name, _reason(error)) from error

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        paging = self._paging
        paging.kv_caches, paging.metadata = kv_caches, metadata
        hidden = self._decode(input_ids, positions)
        # The caches belong to the caller, who may want their memory back.
        paging.kv_caches, paging.metadata = [], None
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return logits

    def argmax(self, hidden: Tensor) -> Tensor:
        return ops.argmax(self.compute_logits(hidden))

    def _decode(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.decoder(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    @torch.inference_mode()
    def _probe(self, arch: Architecture, max_model_len: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Run a few tokens, check what the engine relies on, and return each layer's (heads, dim) of keys and values.

        Raises ValueError with what is not as it must be.
        """
        device, dtype = self.causal.device, self.causal.dtype
        text_config = self.causal.config.get_text_config()
        padding = getattr(text_config, "pad_token_id", None)
        ids = [token for token in range(8) if token != padding]
        last = max_model_len - 1

        def recorded(
            run: Callable[[Tensor, Tensor], Tensor], tokens: list[tuple[int, int]]
        ) -> tuple[Tensor, list[_Call]]:
            self._paging.calls = []
            result = run(*torch.tensor(tokens, device=device).unbind(1))
            calls, self._paging.calls = self._paging.calls, None
            return result, calls

        def score(input_ids: Tensor, _: Tensor) -> Tensor:
            logits: Tensor = self.causal(input_ids=input_ids.unsqueeze(0), use_cache=False).logits.squeeze(0)
            return logits

        self.causal.set_attn_implementation(_MASKED)
        start = [(ids[0], 0), (ids[1], 1)]
        with _watched(self.causal) as decoders:
            logits, masked = recorded(score, start)
        _check_layers(masked, text_config.num_hidden_layers, dtype)
        layers = {call.module: _Layer(i, _window(i, call, max_model_len)) for i, call in enumerate(masked)}

        self.causal.set_attn_implementation(_SERVING)
        self.decoder = decoders[-1]
        _replace(self.causal, self.decoder, _HandsOver())
        hidden, calls = recorded(self._decode, start)
        split = self.compute_logits(hidden)
        if split.shape[-1] != arch.vocab_size or not _equal(split, logits):
            raise ValueError(
                f"its decoder ({type(self.decoder).__name__}), given ids and positions from 0, and its head give "
                f"other scores than the whole model, or not {arch.vocab_size} of them (config field 'vocab_size')"
            )
        if not all(_equal(getattr(x, n), getattr(y, n)) for x, y in zip(calls, masked, strict=True) for n in "qkv"):
            raise ValueError("it counts the positions of tokens in a way of its own")

        # The same three tokens twice: in another order, and beside another token.
        kept = [(ids[1], 0), (ids[2], min(2, last)), (ids[3], 1)]
        before, calls = recorded(self._decode, [*kept, (ids[4], 1)])
        after, calls_after = recorded(self._decode, [kept[1], (ids[5], last), kept[2], kept[0]])
        pairs = [("result", before, after)]
        for layer, (one, other) in enumerate(zip(calls, calls_after, strict=True)):
            if other.mask is not None:
                raise ValueError(f"layer {layer} makes a mask of its own")
            pairs += [(f"{name} in layer {layer}", getattr(one, name), getattr(other, name)) for name in "qkv"]
        for what, first, second in pairs:
            if not _equal(first[:3], second[[3, 0, 2]]):
                raise ValueError(
                    f"{what} of a token depends on the tokens beside it, not through attention alone; paged attention "
                    "cannot keep such a state"
                )
        self._paging.layers = layers
        return [((call.k.shape[1], call.k.shape[2]), (call.v.shape[1], call.v.shape[2])) for call in masked]


def load_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None]
) -> TransformersForCausalLM:
    """The model of `config` on `device`, with the weights that `config.load_format` asks for.

    `progress` is called with the fraction done. Raises ValueError naming architecture or folder, cause and
    remedy for what cannot run here, and for weights that are absent, damaged or those of another model.
    """
    arch = config.architecture
    model_class, hub_config = _find_class(arch, config.folder)
    _check_class(arch, model_class, hub_config, config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": _SERVING}
    tensors = {} if config.load_format == "dummy" else dict(read_tensors(checkpoint_files(config.folder), None))
    try:
        if config.load_format == "dummy":
            with device:
                causal = AutoModelForCausalLM.from_config(hub_config, **options).eval()
            fill_with_dummy_weights(causal, config.seed)
        else:
            with _followed(lambda share: progress(share / 2)):
                causal, report = model_class.from_pretrained(
                    None,
                    config=hub_config,
                    state_dict=tensors,
                    device_map={"": device},
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **options,
                )
            _check_report(report, config.folder)
            _own(causal, tensors, lambda share: progress((1 + share) / 2))
    except (torch.OutOfMemoryError, CheckpointMismatchError):
        raise
    except (ImportError, *_FAILURES) as error:
        raise _cannot_run(arch.name, _reason(error)) from error
    progress(1.0)
    return TransformersForCausalLM(causal.requires_grad_(False), arch, config.max_model_len)


def _find_class(arch: Architecture, folder: Path) -> tuple[Any, Any]:
    """The class that transformers runs the model in `folder` with, and its configuration."""
    try:
        hub_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what is wrong with a configuration comes in every type
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise _cannot_run(arch.name, f"transformers cannot read {folder / 'config.json'}: {reason}") from error
    if type(hub_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _cannot_run(
            arch.name, f"transformers has no decoder-only language model of model_type {hub_config.model_type!r}"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(hub_config)], hub_config


def _check_class(arch: Architecture, model_class: Any, hub_config: Any, config: ModelConfig) -> None:
    """Refuse what can be known to fail before any weight is read."""
    if arch.name != model_class.__name__ and not arch.name.endswith("ForCausalLM"):
        raise _cannot_run(arch.name, f"the model that generates text is {model_class.__name__}")
    if hub_config.is_encoder_decoder:
        raise _cannot_run(arch.name, "only decoder-only models are supported")
    if model_class._is_stateful:
        raise _cannot_run(arch.name, "it keeps a state beside keys and values (a state-space or recurrent model)")
    if not model_class._can_set_attn_implementation():
        raise _cannot_run(arch.name, "it has an attention of its own (ALiBi, say) that no other can replace")
    decoder = hub_config.get_text_config()
    for rope in rope_variants(decoder.to_dict()):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            decoder, "original_max_position_embeddings", None
        )
        if kind in ("longrope", "su") and (original is None or config.max_model_len > original):
            raise _cannot_run(
                arch.name,
                f"rotary scaling {kind!r} changes the keys that are cached already when a sequence outgrows {original} "
                f"tokens; set max_model_len to at most that (it is {config.max_model_len})",
            )


def _check_layers(calls: list[_Call], num_layers: int, dtype: torch.dtype) -> None:
    """Every layer attends once, by arguments that paged attention knows."""
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


def _window(layer: int, call: _Call, max_model_len: int) -> int | None:
    """How many tokens a query of the layer sees, itself included (None: all), by its argument or by its mask.

    Raises ValueError where the mask hides more or less than that.
    """
    if call.mask is None:
        return call.window
    if not hasattr(call.mask, "rule"):
        raise ValueError(f"layer {layer} makes a mask of its own")
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
            f"layer {layer} masks more or less than the future"
            + (f" and what is {window} tokens back" if window else "")
            + f" within max_model_len={max_model_len}"
        )
    return window


def _equal(one: Tensor, other: Tensor) -> bool:
    """Each row is the same but for rounding."""
    rounding = _ROUNDING[one.dtype]
    one, other = one.flatten(1).float(), other.flatten(1).float()
    return bool(((one - other).norm(dim=1) <= rounding * one.norm(dim=1)).all())


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The parts of `model` that give out a last hidden state in this block, the outermost last."""
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
    """Put `substitute` in the place of `part`, somewhere inside `model`."""
    path = next(name for name, module in model.named_modules() if module is part)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, substitute)


@contextlib.contextmanager
def _followed(progress: Callable[[float], None]) -> Iterator[None]:
    """Call `progress` for every parameter that transformers fills in this block, in place of its own bar."""

    def follow(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not args or not hasattr(args[0], "__len__"):
            return bar(*args, **options)

        def each() -> Iterator[Any]:
            for done, item in enumerate(args[0]):
                progress(done / len(args[0]))
                yield item

        return each()

    before = hub_logging.set_tqdm_hook(follow)
    try:
        yield
    finally:
        hub_logging.set_tqdm_hook(before)


@torch.no_grad()
def _own(causal: nn.Module, tensors: Mapping[str, Tensor], progress: Callable[[float], None]) -> None:
    """Copy the parameters that are still `tensors` of a file, which others may write to."""
    mapped = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    parameters = list(causal.parameters())
    for done, parameter in enumerate(parameters):
        if parameter.untyped_storage().data_ptr() in mapped:
            parameter.data = parameter.data.clone()
        progress(done / len(parameters))


def _check_report(report: Mapping[str, Any], folder: Path) -> None:
    """Refuse what transformers would only warn of, after drawing the parameters at random."""
    problems = [f"missing {name}" for name in sorted(report["missing_keys"])]
    problems += [f"unexpected {name}" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} has shape {list(found)}, not {list(expected)}"
        for name, found, expected in sorted(report["mismatched_keys"])
    ]
    problems += report["error_msgs"]
    if problems:
        raise CheckpointMismatchError(
            f"{folder}: {listed(problems)}. Check that config.json and the weights belong to the same model."
        )


def _cannot_run(name: str, reason: str) -> ValueError:
    return ValueError(
        f"architecture {name!r} cannot run here: {reason}. Native implementations: {', '.join(SUPPORTED)}; "
        "the others are run by transformers where attention is all that they keep of earlier tokens"
    )


def _reason(error: Exception) -> str:
    """What went wrong, with the type of the error where the message may not say it alone."""
    return str(error) if isinstance(error, ValueError) else repr(error)
