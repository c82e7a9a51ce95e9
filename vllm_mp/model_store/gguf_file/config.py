"""The configuration of a model in a GGUF file: its metadata, in the terms of a Hugging Face `config.json`.

The metadata must agree with the shapes of the tensors, so that a file cannot ask for more memory than it has weights.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from vllm_mp.model_store.gguf_file.fields import GgufFields
from vllm_mp.model_store.gguf_file.reader import GgufFile, LongArray
from vllm_mp.model_store.gguf_file.rope import ROPE_FACTORS, rope_scaling

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
    "qwen2vl": GgufFamily("Qwen2VLForConditionalGeneration", "qwen2_vl_text", _LAYER_NAMES),
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
_OF_EXPERT: Final = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
"""Older files have a tensor for each expert."""
_OF_MODEL: Final = re.compile(r"(\w+)\.(weight|bias)")


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
    if expert := _OF_EXPERT.fullmatch(name):
        number, module, own_number = expert.groups()
        of_all = family.names.get(f"{module}_exps")
        return of_all and f"layers.{number}.{of_all}.weight".replace(".experts.", f".experts.{own_number}.")
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


class _Reader(GgufFields):
    """Reads the configuration of one file."""

    def config(self, family: GgufFamily) -> dict[str, Any]:
        layers, heads = self.integer("block_count"), self.integer("attention.head_count")
        vocab, hidden = self.shape("token_embd.weight", 2)
        kv_heads = self.integer("attention.head_count_kv", heads)
        head_dim = self.integer("attention.key_length", hidden // max(heads, 1))
        inner = self.integer("feed_forward_length")
        context = self.integer("context_length")
        if context > _MAX_CONTEXT:
            raise self.error("context_length", context, f"it must be at most {_MAX_CONTEXT} tokens")
        found = {match[1] for name in self.file.tensors if (match := _OF_LAYER.fullmatch(name))}
        self.must_fit("block_count", layers, len(found))
        self.must_fit("embedding_length", self.integer("embedding_length"), hidden)
        experts: dict[str, Any] = {}
        if "ffn_up_exps" in family.names:
            experts = self._experts(family, inner)
        else:
            up = self.shape("blk.0.ffn_up.weight", 2)[0]
            self.must_fit("feed_forward_length", 2 * inner if "attn_qkv" in family.names else inner, up)
        if "attn_qkv" in family.names:
            # The matrix has the rows of q, k and v; `ffn_up` has the rows of gate and up.
            qkv = self.shape("blk.0.attn_qkv.weight", 2)[0]
            self.must_fit("attention.head_count", (heads + 2 * kv_heads) * head_dim, qkv)
        else:
            self.must_fit("attention.head_count", heads * head_dim, self.shape("blk.0.attn_q.weight", 2)[0])
            self.must_fit("attention.head_count_kv", kv_heads * head_dim, self.shape("blk.0.attn_k.weight", 2)[0])
        theta = self.number("rope.freq_base", _DEFAULT_THETA)
        rope = {"rope_theta": theta, **rope_scaling(self, theta, head_dim, is_longrope=family.model_type == "phi3")}
        self._check_vocabulary(vocab)
        ends = [self.token_id(key, vocab) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        ends = [token for token in dict.fromkeys(ends) if token is not None]
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
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "bos_token_id": self.token_id("bos_token_id", vocab),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "dtype": "float32",
            **self._variations(family, rope, layers, heads, hidden, head_dim),
            **experts,
        }

    def _check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if there are tokens without a row in the embedding; rows without a token do no harm."""
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        count = tokens.length if isinstance(tokens, LongArray) else len(tokens) if isinstance(tokens, list) else 0
        if count > vocab_size:
            stated = f"a list of {count}"
            raise self.error("tokenizer.ggml.tokens", stated, f"the tensors have embeddings of {vocab_size}")

    def _experts(self, family: GgufFamily, inner: int) -> dict[str, Any]:
        """Return the fields that describe experts; all layers have them."""
        count, used = self.integer("expert_count"), self.integer("expert_used_count")
        found = sum(name.startswith("blk.0.ffn_up.") for name in self.file.tensors)
        if found:
            size = self.shape("blk.0.ffn_up.0.weight", 2)[0]
        else:
            found, size = self.shape("blk.0.ffn_up_exps.weight", 3)[:2]
        self.must_fit("expert_count", count, found)
        if used > count:
            raise self.error("expert_used_count", used, f"there are {count} experts")
        if family.model_type == "mixtral":
            self.must_fit("feed_forward_length", inner, size)
            return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}
        self.must_fit("expert_feed_forward_length", self.integer("expert_feed_forward_length", size), size)
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
            shared = self.shape("blk.0.ffn_up_shexp.weight", 2)[0]
            key = "expert_shared_feed_forward_length"
            self.must_fit(key, self.integer(key, shared), shared)
            fields |= {"shared_expert_intermediate_size": shared, "qkv_bias": "blk.0.attn_q.bias" in self.file.tensors}
        return fields

    def _variations(
        self, family: GgufFamily, rope: dict[str, Any], layers: int, heads: int, hidden: int, head_dim: int
    ) -> dict[str, Any]:
        """Return the fields that only some families have."""
        has_bias, has_mlp_bias = (f"blk.0.{name}.bias" in self.file.tensors for name in ("attn_q", "ffn_up"))
        if family.model_type == "qwen2":
            return {}
        if family.model_type == "qwen2_vl_text":
            return {"use_sliding_window": False, "rope_parameters": {**rope, "mrope_section": self._sections(head_dim)}}
        if family.model_type == "phi3":
            return {"sliding_window": self._window()}
        if family.model_type in _GEMMA:
            facts = _GEMMA[family.model_type]
            window = self._window(facts.window)
            # As llama.cpp does, because files do not state the scale: the largest model has another.
            scalar = hidden // heads if layers == facts.layers_of_largest else head_dim
            has_two = family.model_type == "gemma3_text"
            local_rope = {"rope_type": "default", "rope_theta": self.number("rope.freq_base_swa", _DEFAULT_THETA)}
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
                "mlp_bias": has_mlp_bias,
                "attention_multiplier": self.number("attention.scale", head_dim**-0.5),
                "embedding_multiplier": self.number("embedding_scale", 1.0),
                "residual_multiplier": self.number("residual_scale", 1.0),
                "logits_scaling": self.number("logit_scale", 1.0),
            }
        return {"attention_bias": has_bias, "mlp_bias": has_mlp_bias}

    def _sections(self, head_dim: int) -> list[int]:
        """Return how many pairs of elements of a head are rotated by the time, the row and the column of an image."""
        key = "rope.dimension_sections"
        given = self.value(key, None)
        is_list = isinstance(given, list) and 3 <= len(given) <= 4 and all(type(size) is int for size in given)
        # The fourth one is not used.
        sections: list[int] = given[:3] if is_list else []  # type: ignore[index, assignment]
        if 2 * sum(sections) != head_dim or min(sections) < 0 or any(given[3:]):  # type: ignore[index]
            raise self.error(
                key, given, f"it must have 3 numbers whose sum is half of the {head_dim} elements of a head"
            )
        return sections

    def _window(self, default: int = 0) -> int | None:
        """Return the window in tokens; None if there is none, for which files have 0."""
        window = self.value("attention.sliding_window", default)
        return None if window == 0 else self.integer("attention.sliding_window", default)

    def _soft_cap(self, key: str, default: float | None) -> float | None:
        return None if default is None and self.value(key, None) is None else self.number(key, default)

    def _layer_types(self, layers: int, period: int, window: int | None) -> list[str]:
        """Return the kind of each layer; if the file states nothing else, every `period`-th has no window."""
        if window is None:
            return ["full_attention"] * layers
        key = "attention.sliding_window_pattern"
        given = self.value(key, period)
        if isinstance(given, list):
            has_window = [bool(value) for value in given]
        else:
            period = self.integer(key, period)
            has_window = [(layer + 1) % period != 0 for layer in range(layers)]
        if len(has_window) != layers:
            raise self.error(key, given, f"it must be a number, or have {layers} elements")
        return ["sliding_attention" if it_has else "full_attention" for it_has in has_window]
