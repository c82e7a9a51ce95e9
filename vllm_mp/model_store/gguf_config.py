"""The configuration of a model in a GGUF file: its metadata, in the terms of a Hugging Face `config.json`.

The metadata must agree with the shapes of the tensors, so that a file cannot ask for more memory than it has weights.
"""

import math
import re
import struct
from typing import Any, Final, NamedTuple

from vllm_mp.model_store.gguf_file import GgufFile, Value

_MAX_CONTEXT: Final = 2**24
"""The longest context that is believed, in tokens."""


class GgufFamily(NamedTuple):
    """How files of one `general.architecture` are read."""

    architecture: str
    """The architecture in config.json, a name in `registry.NATIVE_MODELS`."""
    model_type: str
    interleaves_heads: bool = False
    """True: the rows of q and k are stored so that the two of a rotated pair are neighbours."""


FAMILIES: Final = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", interleaves_heads=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
}
"""The architectures whose files are mapped, by their name in files."""

TENSOR_NAMES: Final = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
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
"""The names of modules in checkpoints by their names in GGUF files."""
_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_MODEL: Final = re.compile(r"(\w+)\.(weight|bias)")
ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor that has the factors of Llama 3's rotary scaling."""


def family_of(file: GgufFile) -> GgufFamily | None:
    """Return the family of the model in `file`; None if its files are not mapped."""
    family = FAMILIES.get(str(file.metadata.get("general.architecture")))
    # Files of Mixtral have the name of Llama.
    return None if family is None or any("_exps." in name for name in file.tensors) else family


def checkpoint_name(name: str) -> str | None:
    """Return the name in a checkpoint of the tensor that GGUF files call `name`; None if it has none there."""
    if layer := _OF_LAYER.fullmatch(name):
        number, module, kind = layer.groups()
        return f"layers.{number}.{TENSOR_NAMES[module]}.{kind}" if module in TENSOR_NAMES else None
    module, kind = found.groups() if (found := _OF_MODEL.fullmatch(name)) else ("", "")
    return f"{TENSOR_NAMES[module]}.{kind}" if module in TENSOR_NAMES else None


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
        self._must_fit("attention.head_count", heads * head_dim, self._shape("blk.0.attn_q.weight", 2)[0])
        self._must_fit("attention.head_count_kv", kv_heads * head_dim, self._shape("blk.0.attn_k.weight", 2)[0])
        self._must_fit("feed_forward_length", inner, self._shape("blk.0.ffn_up.weight", 2)[0])
        theta = self._number("rope.freq_base", 10_000.0)
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
            "rope_parameters": {"rope_theta": theta, **self._rope_scaling(theta, head_dim)},
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "bos_token_id": self._file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "dtype": "float32",
            **self._variations(family),
        }

    def _variations(self, family: GgufFamily) -> dict[str, Any]:
        """Return the fields that only some families have."""
        has_bias = "blk.0.attn_q.bias" in self._file.tensors
        return {} if family.model_type == "qwen2" else {"attention_bias": has_bias}

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any]:
        if ROPE_FACTORS in self._file.tensors:
            return self._llama3_scaling(theta)
        kind = self._value("rope.scaling.type", "none")
        rotated = self._integer("rope.dimension_count", head_dim)
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
        place = self._file.tensors[ROPE_FACTORS]
        count = place.shape[-1]
        if place.type.name != "F32" or place.shape != (count,) or count > 2**12:
            raise self._error(ROPE_FACTORS, f"{place.type.name} {list(place.shape)}", "it must be F32, one per pair")
        with self._file.path.open("rb") as content:
            content.seek(place.offset)
            factors = struct.unpack(f"<{count}f", content.read(place.num_bytes))
        factor, low, high, original = max(factors), 1.0, 4.0, 8192
        for pair, found in enumerate(factors):
            turns = original / (2 * math.pi * theta ** (pair / count))
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            expected = 1 / ((1 - smooth) / factor + smooth) if factor > 0 else math.nan
            if not abs(found - expected) <= 1e-3 * expected + 1e-8:  # this form refuses NaN too
                rule = "its rotary factors do not follow Llama 3's rule, the only supported rule"
                raise self._error(f"{ROPE_FACTORS}[{pair}]", found, rule)
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

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
        name = key if key.startswith(ROPE_FACTORS) else self._prefix + key
        text = repr(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        return ValueError(f"{self._file.path}: {name} is {text}: {reason}; convert the model again")
