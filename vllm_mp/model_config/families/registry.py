"""The architectures that have a native model: how each is read, and which module runs it.

A variation of a known family is one reader function and one line of `NATIVE_MODELS`. A new family is a file
with its reader and its linear layers, its module in `core/models`, and a line here in `NATIVE_MODELS` and `_LAYERS`.
`docs/internals/adding_a_model.md` shows how.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.config_json import Config, NotNativeError, shorten
from vllm_mp.model_config.families import bert, gpt2, llama
from vllm_mp.model_config.families.bert import read_bert, read_distilbert, read_roberta
from vllm_mp.model_config.families.gemma import read_gemma2, read_gemma3
from vllm_mp.model_config.families.gpt2 import read_gpt2
from vllm_mp.model_config.families.llama import (
    read_granite,
    read_llama,
    read_mistral,
    read_olmo2,
    read_phi3,
    read_qwen2,
    read_qwen3,
)
from vllm_mp.model_config.families.mixtures import read_granite_moe, read_mixtral, read_qwen2_moe, read_qwen3_moe
from vllm_mp.model_config.families.other_decoder import read_other_decoder
from vllm_mp.model_config.families.with_images import read_qwen_vl, read_with_images
from vllm_mp.model_config.linear_layers import FamilyLayers
from vllm_mp.model_config.quantization import read_four_bits, read_fp8_scales, stated_quantization


class NativeEntry(NamedTuple):
    """An architecture that has a native model."""

    read: Callable[[str, Config], NativeArchitecture]
    """Takes the architecture's name and the contents of `config.json`; raises ValueError for an invalid field."""
    model: str
    """The class that runs it, as "module:class" with a module of `core/models`; imported when a model is built."""
    model_type: str | None = None
    """The `model_type` that means this architecture in a configuration without `architectures`."""
    has_fp8: bool = False
    """True: the weights of its projections may be 8-bit floats, or have 4 bits (AWQ, GPTQ)."""
    has_separate_experts: bool = False
    """True: checkpoints have a matrix for each projection of each expert, which may have 4 bits."""


NATIVE_MODELS: Final[dict[str, NativeEntry]] = {
    "LlamaForCausalLM": NativeEntry(read_llama, "llama:LlamaForCausalLM", "llama", has_fp8=True),
    "MistralForCausalLM": NativeEntry(read_mistral, "llama:LlamaForCausalLM", "mistral", has_fp8=True),
    "Qwen2ForCausalLM": NativeEntry(read_qwen2, "llama:LlamaForCausalLM", "qwen2", has_fp8=True),
    "Qwen3ForCausalLM": NativeEntry(read_qwen3, "llama:LlamaForCausalLM", "qwen3", has_fp8=True),
    "Gemma2ForCausalLM": NativeEntry(read_gemma2, "llama:LlamaForCausalLM", "gemma2", has_fp8=True),
    "Gemma3ForCausalLM": NativeEntry(read_gemma3, "llama:LlamaForCausalLM", "gemma3_text", has_fp8=True),
    "Gemma3ForConditionalGeneration": NativeEntry(read_gemma3, "llama:LlamaForCausalLM", "gemma3", has_fp8=True),
    "Phi3ForCausalLM": NativeEntry(read_phi3, "llama:LlamaForCausalLM", "phi3", has_fp8=True),
    "GraniteForCausalLM": NativeEntry(read_granite, "llama:LlamaForCausalLM", "granite", has_fp8=True),
    "Olmo2ForCausalLM": NativeEntry(read_olmo2, "llama:LlamaForCausalLM", "olmo2", has_fp8=True),
    "MixtralForCausalLM": NativeEntry(read_mixtral, "llama:LlamaForCausalLM", "mixtral", has_separate_experts=True),
    "Qwen2MoeForCausalLM": NativeEntry(
        read_qwen2_moe, "llama:LlamaForCausalLM", "qwen2_moe", has_separate_experts=True
    ),
    "Qwen3MoeForCausalLM": NativeEntry(
        read_qwen3_moe, "llama:LlamaForCausalLM", "qwen3_moe", has_separate_experts=True
    ),
    "GraniteMoeForCausalLM": NativeEntry(read_granite_moe, "llama:LlamaForCausalLM", "granitemoe"),
    "Idefics3ForConditionalGeneration": NativeEntry(read_with_images, "llama:LlamaForCausalLM", "idefics3"),
    "SmolVLMForConditionalGeneration": NativeEntry(read_with_images, "llama:LlamaForCausalLM", "smolvlm"),
    "LlavaForConditionalGeneration": NativeEntry(read_with_images, "llama:LlamaForCausalLM", "llava"),
    "Qwen2VLForConditionalGeneration": NativeEntry(read_qwen_vl, "llama:LlamaForCausalLM", "qwen2_vl", has_fp8=True),
    "Qwen2_5_VLForConditionalGeneration": NativeEntry(
        read_qwen_vl, "llama:LlamaForCausalLM", "qwen2_5_vl", has_fp8=True
    ),
    "GPT2LMHeadModel": NativeEntry(read_gpt2, "gpt2:GPT2LMHeadModel", "gpt2"),
    "BertModel": NativeEntry(read_bert, "bert:BertModel", "bert"),
    "BertForMaskedLM": NativeEntry(read_bert, "bert:BertModel"),
    "BertForSequenceClassification": NativeEntry(read_bert, "bert:BertModel"),
    "BertForPreTraining": NativeEntry(read_bert, "bert:BertModel"),
    "RobertaModel": NativeEntry(read_roberta, "bert:RobertaModel", "roberta"),
    "RobertaForMaskedLM": NativeEntry(read_roberta, "bert:RobertaModel"),
    "RobertaForSequenceClassification": NativeEntry(read_roberta, "bert:RobertaModel"),
    "XLMRobertaModel": NativeEntry(read_roberta, "bert:RobertaModel", "xlm-roberta"),
    "XLMRobertaForMaskedLM": NativeEntry(read_roberta, "bert:RobertaModel"),
    "XLMRobertaForSequenceClassification": NativeEntry(read_roberta, "bert:RobertaModel"),
    "DistilBertModel": NativeEntry(read_distilbert, "bert:DistilBertModel", "distilbert"),
    "DistilBertForMaskedLM": NativeEntry(read_distilbert, "bert:DistilBertModel"),
    "DistilBertForSequenceClassification": NativeEntry(read_distilbert, "bert:DistilBertModel"),
}
_LAYERS: Final[dict[str, FamilyLayers]] = {"llama": llama.LAYERS, "gpt2": gpt2.LAYERS, "bert": bert.LAYERS}
"""The linear layers of each family, by the module of `core/models` that runs it."""
_WITHOUT_HEAD: Final = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "Gemma2Model": "Gemma2ForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Gemma3Model": "Gemma3ForConditionalGeneration",
    "Phi3Model": "Phi3ForCausalLM",
    "GraniteModel": "GraniteForCausalLM",
    "Olmo2Model": "Olmo2ForCausalLM",
    "MixtralModel": "MixtralForCausalLM",
    "Qwen2MoeModel": "Qwen2MoeForCausalLM",
    "Qwen3MoeModel": "Qwen3MoeForCausalLM",
    "GraniteMoeModel": "GraniteMoeForCausalLM",
    "GPT2Model": "GPT2LMHeadModel",
}
"""Decoders without a head, by which embedding models are named, and the architecture with a head."""
NATIVE_ARCHITECTURES: Final = tuple(NATIVE_MODELS)
FP8_ARCHITECTURES: Final = tuple(name for name, entry in NATIVE_MODELS.items() if entry.has_fp8)
_FOUR_BIT_ARCHITECTURES: Final = tuple(
    name for name, entry in NATIVE_MODELS.items() if entry.has_fp8 or entry.has_separate_experts
)
_BY_MODEL_TYPE: Final = {entry.model_type: name for name, entry in NATIVE_MODELS.items() if entry.model_type}


def read_architecture(config: Config) -> Architecture:
    """Read the contents of a `config.json`, in the form of transformers v5 or of older hub files.

    The result is a `NativeArchitecture` for a name in `NATIVE_MODELS`, which a decoder without a head has too. Any
    other decoder, and one with a field that the native module does not compute, is left to transformers' own module,
    which finds out at load whether it can run. Raises ValueError, naming the field, its value and what
    is allowed, for a quantization that is not supported, for a model that is not a decoder over a KV cache alone,
    and for fields that are missing, ill-typed, contradictory or unsupported.
    """
    given_name = architecture_name(config)
    name = _WITHOUT_HEAD.get(given_name, given_name)
    _check_is_causal(name, config)
    four_bits = read_four_bits(name, config, _FOUR_BIT_ARCHITECTURES)
    if name in NATIVE_MODELS:
        try:
            _check_layers_are_alike(config)
            read = NATIVE_MODELS[name].read(name, config)
        except NotNativeError as error:
            if _is_encoder(name) or stated_quantization(config):
                raise
            return _not_native(given_name, config, error)
        return msgspec.structs.replace(
            read,
            fp8=read_fp8_scales(name, config, FP8_ARCHITECTURES, read.num_layers),
            blocks=four_bits.method if four_bits else None,
            four_bits=four_bits,
            has_head=name == given_name,
        )
    read_fp8_scales(name, config, FP8_ARCHITECTURES, 0)
    try:
        return read_other_decoder(name, config)
    except ValueError as error:
        raise ValueError(
            f"architecture {name!r} cannot run here: {error}. Native implementations: {', '.join(NATIVE_ARCHITECTURES)}"
        ) from None


def _not_native(name: str, config: Config, error: NotNativeError) -> Architecture:
    """Return the architecture for transformers' module of a decoder whose native module does not compute a field."""
    try:
        other = read_other_decoder(name, config)
    except ValueError as missing:
        raise ValueError(f"{error}; for transformers' module, {missing}") from None
    return msgspec.structs.replace(other, reason_not_native=str(error))


def linear_layers(arch: NativeArchitecture) -> FamilyLayers:
    """Return the linear layers of the family of `arch`."""
    return _LAYERS[NATIVE_MODELS[arch.name].model.partition(":")[0]]


def decoder_without_head(name: str) -> str | None:
    """Return the name of the decoder without its head of a native architecture; None if it has none."""
    return next((without for without, with_head in _WITHOUT_HEAD.items() if with_head == name), None)


def _is_encoder(name: str) -> bool:
    return name in NATIVE_MODELS and NATIVE_MODELS[name].model.startswith("bert:")


def _check_layers_are_alike(config: Config) -> None:
    """Raise NotNativeError for a configuration in which single layers have fields of their own."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if part.get("per_layer_config"):
            raise NotNativeError(
                f"config field 'per_layer_config' is {shorten(part['per_layer_config'])}; native is none"
            )


def _check_is_causal(name: str, config: Config) -> None:
    """Raise ValueError for a decoder in which every token sees the whole text, as some embedding models need it."""
    if _is_encoder(name):
        return
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if not part.get("is_causal", True):
            value = "null, which means false" if part["is_causal"] is None else "false"
            raise ValueError(
                f"config field 'is_causal' is {value}; only causal attention is supported in decoders: use a model "
                "with causal attention, or an encoder"
            )


def architecture_name(config: Config) -> str:
    """Return the architecture that a configuration names, or that its `model_type` implies.

    Raises ValueError if the configuration has neither.
    """
    names = config.get("architectures")
    if isinstance(names, list | tuple) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    raise ValueError(
        f"config has no usable 'architectures' (got {names!r}), and its 'model_type' {model_type!r} is none "
        f'of {", ".join(_BY_MODEL_TYPE)}; add "architectures": [one of {", ".join(NATIVE_ARCHITECTURES)}] to '
        "config.json"
    )
