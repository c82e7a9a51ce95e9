"""Configurations that differ in one field, and what transformers and the native modules compute with each.

Each family is given the fields of all native families, their older names, and common fields of other models, because a
file may have a field that its family does not document.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from support.paged_steps import run_in_chunks
from support.random_encoders import BERT, CLASSIFIERS, DISTILBERT
from vllm_mp.core.models import build_model
from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.attention_steps import paged_metadata
from vllm_mp.testing.random_models import CONFIGS

PROMPT: Final = [4 + (7 * i) % 90 for i in range(24)]
TOLERANCE: Final = 2e-4

_ACTIVATIONS: Final = ("gelu", "gelu_pytorch_tanh", "relu", "silu", "swish", "gelu_new", "relu2", "quick_gelu", "tanh")
_THETA: Final = {"rope_theta": 50.0}
_ROPES: Final = (
    {"rope_type": "linear", "factor": 4.0, **_THETA},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, **_THETA},
    {"rope_type": "default", **_THETA},
    _THETA,
    {"rope_type": "default", "partial_rotary_factor": 0.5, **_THETA},
    {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5, **_THETA},
    {"type": "linear", "factor": 4.0, **_THETA},
    {"rope_type": "dynamic", "factor": 4.0, **_THETA},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_THETA}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3, **_THETA},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 4.0, "beta_slow": 2.0, "truncate": False, **_THETA},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 6.0], **_THETA}
    | {"original_max_position_embeddings": 64, "factor": 2.0},
    {
        "full_attention": {"rope_type": "linear", "factor": 4.0, **_THETA},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
    {"full_attention": {"rope_type": "default", **_THETA}, "sliding_attention": None},
    {},
)
_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), (96,)),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner"), (64,)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), (4, 1)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (12, 4)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (64, 256)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (0.1,)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), _ACTIVATIONS),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPES),
    **dict.fromkeys(("num_experts", "num_local_experts"), (4, 8)),
    "_sliding_window_pattern": (2,),
    "attention_multiplier": (0.5, 2),
    "attn_logit_softcapping": (0.5,),
    "bos_token_id": (5,),
    "clip_qkv": (0.1,),
    "decoder_sparse_step": (2,),
    "dtype": ("bfloat16", "float16"),
    "embedding_multiplier": (3.0,),
    "eos_token_id": (7, [7, 8]),
    "final_logit_softcapping": (0.5,),
    "head_dim": (16, 12),
    "id2label": ({"0": "a", "1": "b", "2": "c"}, {"0": "a"}),
    "is_causal": (False,),
    "label2id": ({"a": 0, "b": 1},),
    "layer_types": (
        ["full_attention", "sliding_attention", "full_attention"],
        ["full_attention"] * 3,
        ["sliding_attention"] * 3,
        ["full_attention", "chunked_attention", "full_attention"],
    ),
    "logits_scaling": (2.0,),
    "max_window_layers": (1, 0, 2),
    "mlp_only_layers": ([1],),
    "moe_intermediate_size": (32,),
    "num_experts_per_tok": (1,),
    "num_key_value_heads": (1, 3, 6),
    "original_max_position_embeddings": (16, 64),
    "pad_token_id": (3, 50, -1),
    "partial_rotary_factor": (0.5, 1.0),
    "per_layer_config": ({"1": {"num_key_value_heads": 1}}, {"1": {"skip": ["mlp"]}}),
    "position_embedding_type": ("relative_key",),
    "problem_type": ("regression",),
    "query_pre_attn_scalar": (12, 12.5),
    "residual_multiplier": (0.7,),
    "rope_local_base_freq": (50.0,),
    "rope_theta": (50.0, 50),
    "shared_expert_intermediate_size": (24,),
    "sliding_window": (5, 100, 0),
    "sliding_window_pattern": (2, 3),
    "summary_type": ("mean",),
    "torch_dtype": ("bfloat16",),
    "transformers_version": ("4.0.0",),
    "type_vocab_size": (1, 3),
    "use_bidirectional_attention": (True,),
    "vocab_size": (101,),
}
"""The values to try, by field; those of other fields follow from the present value."""
_KEPT: Final = ("architectures", "model_type", "num_labels", "text_config", "vision_config")
"""Fields that are not changed: they choose the class, follow from others, or have fields of their own."""
_OTHER_FIELDS: Final = (
    "_sliding_window_pattern",
    "clip_qkv",
    "head_dim",
    "hidden_size",
    "is_causal",
    "is_decoder",
    "layer_types",
    "n_ctx",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "per_layer_config",
    "position_embedding_type",
    "qk_layernorm",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
    "sliding_window_pattern",
    "torch_dtype",
    "use_qk_norm",
)
"""Fields of files that no class of the native families has as its own."""


class Base(NamedTuple):
    """A random model whose configuration is changed."""

    config: PreTrainedConfig
    kind: Any = None
    """Its class; None: that which generates text."""
    part: str = ""
    """The object of the configuration whose fields are changed; empty: the configuration itself."""

    def fields(self) -> dict[str, Any]:
        """Return the content of config.json."""
        kind = self.kind or MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        return self.config.to_dict() | {"architectures": [kind.__name__]}

    def stated(self) -> dict[str, Any]:
        """Return the object whose fields are changed."""
        stated: dict[str, Any] = self.fields()
        return stated[self.part] if self.part else stated

    def changed(self, change: "Change") -> dict[str, Any]:
        """Return the content of config.json with the change."""
        changed = self.stated() | {change.field: change.value}
        return self.fields() | {self.part: changed} if self.part else changed

    @property
    def classes(self) -> set[type[PreTrainedConfig]]:
        """The classes of the configuration and of the part."""
        return {type(self.config), *([type(getattr(self.config, self.part))] if self.part else [])}


ENCODERS: Final = {
    "bert": Base(transformers.BertConfig(**BERT), transformers.BertModel),
    "roberta": Base(transformers.RobertaConfig(**BERT), transformers.RobertaModel),
    "xlm-roberta": Base(transformers.XLMRobertaConfig(**BERT), transformers.XLMRobertaModel),
    "distilbert": Base(transformers.DistilBertConfig(**DISTILBERT), transformers.DistilBertModel),
}
_IMAGES: Final = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3: Final = transformers.Gemma3Config(
    text_config=CONFIGS["gemma3"].to_dict(), vision_config=_IMAGES, mm_tokens_per_image=4
)
"""A model of texts and images."""
BASES: Final[dict[str, Base]] = {
    **{name: Base(config) for name, config in CONFIGS.items()},
    "gemma3 with images": Base(GEMMA3),
    "gemma3 with images, text": Base(GEMMA3, part="text_config"),
    **ENCODERS,
    **{f"{name} for classes": Base(config, kind) for name, (kind, config) in CLASSIFIERS.items()},
}


_ENCODER_CLASSES: Final = {base.kind for base in BASES.values()} - {None}


class Change(NamedTuple):
    """A value of one field that a configuration gets."""

    field: str
    value: Any

    def __str__(self) -> str:
        return f"{self.field}={self.value}"


def fields_of(bases: Iterable[Base]) -> list[str]:
    """Return the names of the fields that the classes of configurations of `bases` have, and other files."""
    classes = set().union(*(base.classes for base in bases))
    own = {field.name for kind in classes for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return sorted({*own, *_OTHER_FIELDS} - {*_KEPT})


def changes(base: Base, fields: Sequence[str], *, one_each: bool) -> Iterator[Change]:
    """Yield the changes of `fields`; with `one_each` only the first value of each field, else null too."""
    stated = base.stated()
    for field in fields:
        present = stated.get(field)
        values = [value for value in _VALUES.get(field, _others(present)) if value != present]
        if one_each:
            values = values[:1]
        elif field not in stated or present is not None:
            values.append(None)
        yield from (Change(field, value) for value in values)


def _others(present: Any) -> tuple[Any, ...]:
    """Return values that differ from the present value of a field."""
    if present is None or isinstance(present, bool):
        return (not present,)
    if isinstance(present, float):
        return (present / 2 + 0.25,)
    return (present + 1,) if isinstance(present, int) else ()


class TransformersRefuses(Exception):
    """Raised for a configuration with which transformers computes nothing."""


class Sweep:
    """The changes of one base, compared with transformers.

    A configuration that differs from the base only in attributes that transformers' model of the base never reads is
    not computed again: its outputs are those of the base. Nor is the native model, if it has the architecture and the
    weights of the base.
    """

    def __init__(self, base: Base, folder: Path) -> None:
        """`folder` is for config.json."""
        self._base = base
        self._file = folder / "config.json"
        self._file.write_text(json.dumps(base.fields()))
        self._config = AutoConfig.from_pretrained(folder)
        with _noted_reads() as self._reads:
            # A model changes its configuration, so it gets another object.
            self._weights, self._expected = _theirs(base, AutoConfig.from_pretrained(folder))
        self._arch = read_architecture(base.fields())
        self._found = _ours(self._arch, self._weights)

    def difference(self, change: Change) -> str | None:
        """Return how the outputs of the native model differ from those of transformers; None if they are the same.

        A configuration that is refused, or left to transformers' module, by an error that names the field is no
        difference. Raises TransformersRefuses if transformers does not compute it.
        """
        self._file.write_text(json.dumps(self._base.changed(change)))
        try:
            weights, expected = self._theirs()
        except Exception as error:  # a bad value may raise anything
            raise TransformersRefuses from error
        try:
            found = self._ours(weights)
        except ValueError as error:
            return None if _names(change, str(error)) else f"{change} is refused without its name: {error}"
        if found.shape != expected.shape:
            return f"{change} gives outputs of {list(found.shape)}, not {list(expected.shape)}"
        error = float((found - expected).abs().max())
        return None if error <= TOLERANCE else f"{change} gives outputs that differ by {error:.3g}"

    def _theirs(self) -> tuple[dict[str, Tensor], Tensor]:
        config = AutoConfig.from_pretrained(self._file.parent)
        if _differing(config, self._config).isdisjoint(self._reads):
            return self._weights, self._expected
        return _theirs(self._base, config)

    def _ours(self, weights: dict[str, Tensor]) -> Tensor:
        arch = read_architecture(json.loads(self._file.read_text()))
        if arch == self._arch and _are_equal(weights, self._weights):
            return self._found
        return _ours(arch, weights)


@contextlib.contextmanager
def _noted_reads() -> Iterator[set[str]]:
    """Yield the names of the attributes that are read from any configuration in the block."""
    reads: set[str] = set()
    plain = PreTrainedConfig.__getattribute__

    def noting(config: PreTrainedConfig, name: str) -> Any:
        reads.update((name, object.__getattribute__(config, "attribute_map").get(name, name)))
        return plain(config, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__getattribute__", noting)
        yield reads


def _differing(first: PreTrainedConfig, second: PreTrainedConfig) -> set[str]:
    """Return the names of the attributes in which two configurations differ, or configurations within them."""
    if type(first) is not type(second):
        return {*vars(first), *vars(second)}
    names = set()
    for name in {*vars(first), *vars(second)}:
        values = vars(first).get(name, ...), vars(second).get(name, ...)
        if all(isinstance(value, PreTrainedConfig) for value in values):
            names |= _differing(*values)
        elif repr(values[0]) != repr(values[1]):
            names.add(name)
    return names


def _are_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first is second or (
        list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
    )


def _names(change: Change, message: str) -> bool:
    names = [change.field, *(change.value if isinstance(change.value, dict) else ())]
    return any(name in message for name in names)


@torch.inference_mode()
def _theirs(base: Base, config: PreTrainedConfig) -> tuple[dict[str, Tensor], Tensor]:
    """Return the random weights, with their names in checkpoints, of transformers' model, and its outputs."""
    kind = base.kind or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: Any = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
        parameter.normal_(0.0, 0.2, generator=generator).add_(centre)
    output = model(torch.tensor([PROMPT]), **({} if kind in _ENCODER_CLASSES else {"use_cache": False}))
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else set()
    own = {name: value for name, value in model.state_dict().items() if name not in tied}
    weights = revert_weight_conversion(model, own)
    return weights, (output.logits if "logits" in output else output.last_hidden_state)[0]


@torch.inference_mode()
def _ours(arch: Architecture, weights: dict[str, Tensor]) -> Tensor:
    """Return the outputs of the native model; raise ValueError if the architecture is not native."""
    if not isinstance(arch, NativeArchitecture):
        raise ValueError(arch.reason_not_native)
    original = arch.rope.original_max_position if arch.rope is not None and arch.rope.type == "longrope" else 0
    if original >= len(PROMPT):
        # LongRoPE takes other factors in a longer context, also for short prompts, which a warning says.
        arch = msgspec.structs.replace(arch, max_position=original)
    model: Any = build_model(arch, torch.float32, "cpu")
    model.load_weights(weights.items())
    if not arch.is_encoder:
        (logits,) = run_in_chunks(model, [PROMPT], block_size=4)
        return logits
    metadata = paged_metadata([(len(PROMPT), len(PROMPT))], [[0]], len(PROMPT), "cpu")
    states: Tensor = model.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), [], metadata)
    if not arch.num_classes:
        return states
    classes: Tensor = model.classify(states[:1])[0]
    return classes
