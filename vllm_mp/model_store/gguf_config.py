"""The configuration of a model in a GGUF file: its metadata, in the terms of a Hugging Face `config.json`.

The metadata must agree with the shapes of the tensors, so that a file cannot ask for more memory than it has weights.
"""

import math
import re
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from vllm_mp.model_store.gguf_file import GgufFile, Value

_MAX_CONTEXT: Final = 2**24
"""The longest context that is believed, in tokens."""


class GgufFamily(NamedTuple):
    """How files of one `general.architecture` are read."""

    architecture: str
    """The architecture in config.json, a name in `registry.NATIVE_MODELS`."""
    model_type: str
    names: Mapping[str, str]
    """The names of modules in checkpoints by their names in GGUF files."""
    interleaves_heads: bool = False
    """True: the rows of q and k are stored so that the two of a rotated pair are neighbours."""
    norm_offset: float = 0.0
    """What the file has added to the weights of norms."""


_MODEL_NAMES: Final = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER_NAMES: Final = {
    **_MODEL_NAMES,
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTPUT_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES: Final = {**_LAYER_NAMES, **_OUTPUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_NORMS_BEFORE: Final = ("attn_norm", "ffn_norm")
_OLMO2_NAMES: Final = {
    **{module: name for module, name in _LAYER_NAMES.items() if module not in _NORMS_BEFORE},
    **_OUTPUT_NORMS,
}
_PHI3_NAMES: Final = {
    **_MODEL_NAMES,
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

_EXPERT_NAMES: Final = {
    **{module: name for module, name in _LAYER_NAMES.items() if not name.startswith("mlp.")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERT_NAMES: Final = {
    **_EXPERT_NAMES,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

FAMILIES: Final = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", _LAYER_NAMES, interleaves_heads=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _LAYER_NAMES),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _LAYER_NAMES),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _GEMMA_NAMES, norm_offset=1.0),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", _GEMMA_NAMES, norm_offset=1.0),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", _PHI3_NAMES),
    "granite": GgufFamily("GraniteForCausalLM", "granite", _LAYER_NAMES, interleaves_heads=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", _OLMO2_NAMES),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", _SHARED_EXPERT_NAMES),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERT_NAMES),
}
"""The architectures whose files are mapped, by their name in files."""
_MIXTRAL: Final = GgufFamily("MixtralForCausalLM", "mixtral", _EXPERT_NAMES, interleaves_heads=True)
"""Files of Mixtral have the name of Llama."""

_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_MODEL: Final = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FREQS: Final = "rope_freqs.weight"
"""The tensor that has the factors of Llama 3's rotary scaling."""
_LONG_FACTORS: Final = "rope_factors_long.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
ROPE_FACTORS: Final = (_ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS)
"""The tensors that belong to the configuration: factors of rotary scaling."""


def family_of(file: GgufFile) -> GgufFamily | None:
    """Return the family of the model in `file`; None if its files are not mapped, or if it has other tensors."""
    family = FAMILIES.get(str(file.metadata.get("general.architecture")))
    if family is FAMILIES["llama"] and file.metadata.get("llama.expert_count", 0) != 0:
        family = _MIXTRAL
    # Files of OLMo 3 have the name of OLMo 2, and files of Granite say here whether positions are rotated.
    has_windows = "olmo2.attention.sliding_window" in file.metadata
    if has_windows or file.metadata.get("granite.rope.scaling.finetuned") is False:
        return None
    if family is None or any(
        name not in ROPE_FACTORS and checkpoint_name(name, family) is None for name in file.tensors
    ):
        return None
    return family


def checkpoint_name(name: str, family: GgufFamily) -> str | None:
    """Return the name in a checkpoint of the tensor that GGUF files call `name`; None if it has none there.

    A tensor of all experts of a layer has the name of an expert's matrix without the expert's number.
    """
    if layer := _OF_LAYER.fullmatch(name):
        number, module, kind = layer.groups()
        return f"layers.{number}.{family.names[module]}.{kind}" if module in family.names else None
    module, kind = found.groups() if (found := _OF_MODEL.fullmatch(name)) else ("", "")
    return f"{family.names[module]}.{kind}" if module in family.names else None


class _GemmaFacts(NamedTuple):
    """What llama.cpp knows about a version of Gemma."""

    window: int
    period: int
    layers_of_largest: int
    attention_soft_cap: float | None
    logits_soft_cap: float | None


_GEMMA: Final = {
    "gemma2": _GemmaFacts(4096, 2, 46, 50.0, 30.0),
    "gemma3_text": _GemmaFacts(0, 6, 62, None, None),
}
"""Facts and defaults that files of Gemma leave out."""
_DEFAULT_THETA: Final = 10_000.0


def read_gguf_config(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """Return the content of config.json.

    Raises ValueError, naming the file, the field and its value, for metadata that is missing, ill-typed or unsupported,
    or that does not fit the tensors.
    """
    return _Reader(file).config(family)


def end_token_ids(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end a generation: of the text and, if the file has it, of the turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [file.metadata.get(key) for key in keys]
    return list(dict.fromkeys(token for token in ids if type(token) is int))


class _Reader:
    """Reads the fields of one file; errors name the file, the field and its value."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = f"{file.metadata.get('general.architecture')}."

    def config(self, family: GgufFamily) -> dict[str, Any]:
        layers, heads = self._integer("block_count"), self._integer("attention.head_count")
        vocab, hidden = self._shape("token_embd.weight", 2)
        kv_heads = self._integer("attention.head_count_kv", heads)
        head_dim = self._integer("attention.key_length", hidden // max(heads, 1))
        inner = self._integer("feed_forward_length")
        context = self._integer("context_length")
        if context > _MAX_CONTEXT:
            raise self._error("context_length", context, f"it must be at most {_MAX_CONTEXT} tokens")
        found = {match[1] for name in self._file.tensors if (match := _OF_LAYER.fullmatch(name))}
        self._must_fit("block_count", layers, len(found))
        self._must_fit("embedding_length", self._integer("embedding_length"), hidden)
        experts: dict[str, Any] = {}
        if "ffn_up_exps" in family.names:
            experts = self._experts(family, inner)
        else:
            up = self._shape("blk.0.ffn_up.weight", 2)[0]
            self._must_fit("feed_forward_length", 2 * inner if "attn_qkv" in family.names else inner, up)
        if "attn_qkv" in family.names:
            # The matrix has the rows of q, k and v; `ffn_up` has the rows of gate and up.
            qkv = self._shape("blk.0.attn_qkv.weight", 2)[0]
            self._must_fit("attention.head_count", (heads + 2 * kv_heads) * head_dim, qkv)
        else:
            self._must_fit("attention.head_count", heads * head_dim, self._shape("blk.0.attn_q.weight", 2)[0])
            self._must_fit("attention.head_count_kv", kv_heads * head_dim, self._shape("blk.0.attn_k.weight", 2)[0])
        theta = self._number("rope.freq_base", _DEFAULT_THETA)
        rope = {"rope_theta": theta, **self._rope_scaling(theta, head_dim, family)}
        ends = end_token_ids(self._file)
        return {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "bos_token_id": self._file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "dtype": "float32",
            **self._variations(family, rope, layers, heads, hidden, head_dim),
            **experts,
        }

    def _experts(self, family: GgufFamily, inner: int) -> dict[str, Any]:
        """Return the fields that describe experts; all layers have them."""
        count, used = self._integer("expert_count"), self._integer("expert_used_count")
        found, size = self._shape("blk.0.ffn_up_exps.weight", 3)[:2]
        self._must_fit("expert_count", count, found)
        if used > count:
            raise self._error("expert_used_count", used, f"there are {count} experts")
        if family.model_type == "mixtral":
            self._must_fit("feed_forward_length", inner, size)
            return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}
        self._must_fit("expert_feed_forward_length", self._integer("expert_feed_forward_length", size), size)
        fields = {
            "num_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            # As llama.cpp does, because files do not state it.
            "norm_topk_prob": family.model_type == "qwen3_moe",
        }
        if family.model_type == "qwen2_moe":
            shared = self._shape("blk.0.ffn_up_shexp.weight", 2)[0]
            key = "expert_shared_feed_forward_length"
            self._must_fit(key, self._integer(key, shared), shared)
            fields |= {"shared_expert_intermediate_size": shared, "qkv_bias": "blk.0.attn_q.bias" in self._file.tensors}
        return fields

    def _variations(
        self, family: GgufFamily, rope: dict[str, Any], layers: int, heads: int, hidden: int, head_dim: int
    ) -> dict[str, Any]:
        """Return the fields that only some families have."""
        has_bias = "blk.0.attn_q.bias" in self._file.tensors
        if family.model_type == "qwen2":
            return {}
        if family.model_type == "phi3":
            return {"sliding_window": self._window()}
        if family.model_type in _GEMMA:
            facts = _GEMMA[family.model_type]
            window = self._window(facts.window)
            # As llama.cpp does, because files do not state the scale: the largest model has another.
            scalar = hidden // heads if layers == facts.layers_of_largest else head_dim
            has_two = family.model_type == "gemma3_text"
            local_rope = {"rope_type": "default", "rope_theta": self._number("rope.freq_base_swa", _DEFAULT_THETA)}
            return {
                "attention_bias": has_bias,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": scalar,
                "attn_logit_softcapping": self._soft_cap("attn_logit_softcapping", facts.attention_soft_cap),
                "final_logit_softcapping": self._soft_cap("final_logit_softcapping", facts.logits_soft_cap),
                "sliding_window": window,
                "layer_types": self._layer_types(layers, facts.period, window),
                "rope_parameters": {"full_attention": rope, "sliding_attention": local_rope} if has_two else rope,
            }
        if family.model_type == "granite":
            return {
                "attention_bias": has_bias,
                "attention_multiplier": self._number("attention.scale", head_dim**-0.5),
                "embedding_multiplier": self._number("embedding_scale", 1.0),
                "residual_multiplier": self._number("residual_scale", 1.0),
                "logits_scaling": self._number("logit_scale", 1.0),
            }
        return {"attention_bias": has_bias}

    def _window(self, default: int = 0) -> int | None:
        """Return the window in tokens; None if there is none, for which files have 0."""
        window = self._value("attention.sliding_window", default)
        return None if window == 0 else self._integer("attention.sliding_window", default)

    def _soft_cap(self, key: str, default: float | None) -> float | None:
        return None if default is None and self._value(key, None) is None else self._number(key, default)

    def _layer_types(self, layers: int, period: int, window: int | None) -> list[str]:
        """Return the kind of each layer; if the file states nothing else, every `period`-th has no window."""
        if window is None:
            return ["full_attention"] * layers
        key = "attention.sliding_window_pattern"
        given = self._value(key, period)
        if isinstance(given, list):
            has_window = [bool(value) for value in given]
        else:
            period = self._integer(key, period)
            has_window = [(layer + 1) % period != 0 for layer in range(layers)]
        if len(has_window) != layers:
            raise self._error(key, given, f"it must be a number, or have {layers} elements")
        return ["sliding_attention" if it_has else "full_attention" for it_has in has_window]

    def _rope_scaling(self, theta: float, head_dim: int, family: GgufFamily) -> dict[str, Any]:
        if _ROPE_FREQS in self._file.tensors:
            return self._llama3_scaling(theta)
        kind = self._value("rope.scaling.type", "none")
        rotated = self._integer("rope.dimension_count", head_dim)
        if family.model_type == "phi3":
            return {"partial_rotary_factor": rotated / head_dim, **self._longrope_scaling(rotated)}
        if rotated != head_dim:
            raise self._error("rope.dimension_count", rotated, f"all {head_dim} elements of a head must be rotated")
        if kind == "none":
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise self._error("rope.scaling.type", kind, "supported are none, linear, yarn and factors in a tensor")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if self._value("rope.scaling.original_context_length", None) is not None:
            original = self._integer("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _llama3_scaling(self, theta: float) -> dict[str, Any]:
        """Return the parameters of Llama 3.1's scaling that give the factors in the file."""
        factors = self._factors(_ROPE_FREQS)
        count = len(factors)
        factor, low, high, original = max(factors), 1.0, 4.0, 8192
        for pair, found in enumerate(factors):
            turns = original / (2 * math.pi * theta ** (pair / count))
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            expected = 1 / ((1 - smooth) / factor + smooth) if factor > 0 else math.nan
            if not abs(found - expected) <= 1e-3 * expected + 1e-8:  # this form refuses NaN too
                rule = "its rotary factors do not follow Llama 3's rule, the only supported rule"
                raise self._error(f"{_ROPE_FREQS}[{pair}]", found, rule)
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def _longrope_scaling(self, rotated: int) -> dict[str, Any]:
        if _LONG_FACTORS not in self._file.tensors and _SHORT_FACTORS not in self._file.tensors:
            return {"rope_type": "default"}
        factors = {"long_factor": self._factors(_LONG_FACTORS), "short_factor": self._factors(_SHORT_FACTORS)}
        for name, values in zip((_LONG_FACTORS, _SHORT_FACTORS), factors.values(), strict=True):
            if len(values) != rotated // 2 or not all(0 < value < math.inf for value in values):
                raise self._error(name, values, f"it must have {rotated // 2} finite numbers above 0")
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length"),
            **factors,
        }
        if self._value("rope.scaling.attn_factor", None) is not None:
            scaling["attention_factor"] = self._number("rope.scaling.attn_factor")
        return scaling

    def _factors(self, name: str) -> list[float]:
        """Return the factors of rotary scaling that the tensor `name` has."""
        (count,) = self._shape(name, 1)
        place = self._file.tensors[name]
        if place.type.name != "F32" or count > 2**12:
            raise self._error(name, f"{place.type.name} {list(place.shape)}", "it must be F32, one per pair")
        with self._file.path.open("rb") as content:
            content.seek(place.offset)
            return list(struct.unpack(f"<{count}f", content.read(place.num_bytes)))

    def _value(self, key: str, default: Value | None) -> Value | None:
        return self._file.metadata.get(self._prefix + key, default)

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self._error(key, value, "it must be an integer of at least 1")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
            raise self._error(key, value, "it must be a finite number above 0")
        return float(value)  # type: ignore[arg-type]

    def _shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        place = self._file.tensors.get(name)
        if place is None or len(place.shape) != dimensions:
            found = None if place is None else list(place.shape)
            raise ValueError(f"{self._file.path}: the shape of {name} is {found}: it must have {dimensions} dimensions")
        return place.shape

    def _must_fit(self, key: str, stated: int, found: int) -> None:
        if stated != found:
            raise self._error(key, self._value(key, None), f"the tensors have {found}, it means {stated}")

    def _error(self, key: str, value: object, reason: str) -> ValueError:
        name = key if key.startswith("rope_f") else self._prefix + key
        text = repr(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        return ValueError(f"{self._file.path}: {name} is {text}: {reason}; convert the model again")
