"""Small random models of texts and images as two GGUF files, as llama.cpp's converters write them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.image_models import GRID
from support.tiny_gguf import add_sizes, finish, interleaved
from vllm_mp.testing.image_models import make_image_model

Changes = Mapping[str, Any]
"""Metadata by key; None: the file does not have it."""
F32, F16, Q8_0 = (getattr(gguf.GGMLQuantizationType, kind) for kind in ("F32", "F16", "Q8_0"))
MEAN, DEVIATION = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


def make_half_model(name: str, token_id: int, **text: Any) -> PreTrainedModel:
    """Return what `make_image_model` returns, with random biases and norms, in weights that float16 holds exactly."""
    model = make_image_model(name, token_id, **text).eval()
    for parameter in model.parameters():
        noise = 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0
        parameter.data = (parameter.data + noise).half().float()
    return model


def write_text_part(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, num_tokens: int | None = None
) -> None:
    """Write the text part, in F32, with the first `num_tokens` tokens of the vocabulary, or all."""
    config = model.config.get_text_config()
    is_gemma, is_qwen = config.model_type == "gemma3_text", config.model_type.startswith("qwen2")
    architecture = "gemma3" if is_gemma else "qwen2vl" if is_qwen else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, config)
    if is_qwen:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    else:
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    if is_gemma:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_rope_freq_base((ropes["full_attention"] if is_gemma else ropes)["rope_theta"])
    _add_vocabulary(writer, tokenizer, len(tokenizer) if num_tokens is None else num_tokens)
    [kind] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        is_head = name == "lm_head.weight" and not is_gemma
        if ".language_model." not in name and ".text_model." not in name and not is_head:
            continue
        own = names.get_name(name.replace("language_model.", "").replace("text_model.", ""), (".weight", ".bias"))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own.split(".")[-2], 0)
        stored = weight.numpy()
        if is_gemma:
            stored = stored + 1 if stored.ndim == 1 else stored
        elif heads and not is_qwen:
            stored = interleaved(stored, heads)
        writer.add_tensor(own, stored)
    finish(writer)


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> None:
    """Add the vocabulary of a tokenizer with byte-level BPE, or one as SentencePiece makes it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"]["byte_fallback"]:
        _add_sentence_pieces(writer, backend["model"]["vocab"])
        return
    special = {token["id"] for token in backend["added_tokens"]}
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in range(num_tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    types = (gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens)))
    writer.add_token_types(list(types))
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _add_sentence_pieces(writer: gguf.GGUFWriter, tokens: Iterable[str]) -> None:
    """Add `tokens`, of which the first is that for unknown characters and the others are bytes and pieces."""
    kinds = [gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    writer.add_token_types([gguf.TokenType.UNKNOWN, *kinds[1:]])
    writer.add_token_scores([-float(index) for index in range(len(kinds))])
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def write_mmproj(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    changes: Changes | None = None,
    architecture: str = "clip",
) -> None:
    """Write the image parts of a model: of LLaVA as its first converter did, of others as the present one does.

    Matrices are of the type `kind`. `changes` are made to the metadata.
    """
    if model.config.model_type.startswith("qwen"):
        _write_qwen(path, model, dict(changes or {}))
        return
    is_llava, is_gemma = (model.config.model_type == name for name in ("llava", "gemma3"))
    vision = model.config.vision_config
    num_layers = vision.num_hidden_layers
    if is_llava:  # the last layers, whose outputs are not used, are left out
        num_layers += 1 + model.config.vision_feature_layer
    metadata: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp" if is_llava else "gemma3" if is_gemma else "idefics3",
        "clip.vision.image_size": vision.image_size,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": num_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": vision.layer_norm_eps,
        "clip.vision.image_mean": MEAN,
        "clip.vision.image_std": DEVIATION,
        "clip.use_gelu": not is_llava,
    }
    if is_llava:
        metadata |= {"clip.has_text_encoder": False, "clip.has_llava_projector": True, "clip.vision.projection_dim": 16}
    elif is_gemma:  # a scale of 4 is left out
        side = vision.image_size // vision.patch_size
        scale = side // math.isqrt(model.config.mm_tokens_per_image)
        metadata["clip.vision.projector.scale_factor"] = None if scale == 4 else scale
    else:
        metadata |= {
            "clip.vision.projection_dim": model.config.text_config.hidden_size,
            "clip.vision.projector.scale_factor": model.config.scale_factor,
            "clip.vision.preproc_image_size": 64,
        }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata | dict(changes or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, weight in model.state_dict().items():
        own = _llava_name(name) if is_llava else _name(name, num_layers)
        if own is None or (is_llava and f".layers.{num_layers}." in name):
            continue
        stored = weight.numpy() + (own == "mm.soft_emb_norm.weight")
        if stored.ndim == 4 and is_llava:
            writer.add_tensor(own, stored.astype(np.float16))  # whatever the type of the others
        elif stored.ndim == 2 and kind != F32 and not own.startswith("v.position"):
            writer.add_tensor(own, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, stored)
    finish(writer)


def _write_qwen(path: Path, model: PreTrainedModel, changes: dict[str, Any]) -> None:
    """Write the image parts of Qwen2-VL or Qwen2.5-VL in F32."""
    vision, is_old = model.config.vision_config, model.config.model_type == "qwen2_vl"
    metadata: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen2vl_merger" if is_old else "qwen2.5vl_merger",
        "clip.vision.image_size": 560,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.embed_dim if is_old else vision.hidden_size,
        "clip.vision.feed_forward_length": vision.hidden_size if is_old else vision.intermediate_size,
        "clip.vision.block_count": vision.depth,
        "clip.vision.attention.head_count": vision.num_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": MEAN,
        "clip.vision.image_std": DEVIATION,
        "clip.vision.image_min_pixels": GRID["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": GRID["size"]["longest_edge"],
    }
    if not is_old:
        metadata |= {
            "clip.use_silu": True,
            "clip.vision.n_wa_pattern": vision.fullatt_block_indexes[0] + 1,
            "clip.vision.window_size": vision.window_size,
        }
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in (metadata | changes).items():
        if value is not None:
            _add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.depth)
    for name, weight in model.state_dict().items():
        if "visual." not in name:
            continue
        name = name.removeprefix("model.")
        if "patch_embed" in name:
            for frame, suffix in enumerate(("", ".1")):
                writer.add_tensor(f"v.patch_embd.weight{suffix}", np.ascontiguousarray(weight.numpy()[:, :, frame]))
        elif ".qkv." in name:
            for part, of_part in zip("qkv", weight.chunk(3), strict=True):
                writer.add_tensor(names.get_name(name.replace("qkv", part), (".weight", ".bias")), of_part.numpy())
        else:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.numpy())
    finish(writer)


def rounded(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    """Round the weights of a model as `write_mmproj` with this `kind` does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "position_embedding" not in name
            if is_matrix and not any(part in name for part in ("language_model", "text_model", "lm_head")):
                blocks = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _name(name: str, num_layers: int) -> str | None:
    """Return the name that the present converter gives a tensor; None for one of the text part."""
    if name.startswith("model.vision_tower."):  # of Gemma 3; checkpoints have a level more
        name = "vision_tower.vision_model." + name.removeprefix("model.vision_tower.").removeprefix("vision_model.")
    elif name.startswith("model.multi_modal_projector."):
        name = name.removeprefix("model.").replace("projection_weight", "projection.weight")
    elif ".vision_model." not in name and ".connector." not in name:
        return None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_layers)
    own: str | None = names.get_name(name, (".weight", ".bias"))
    assert own is not None
    return own


def _llava_name(name: str) -> str | None:
    """Return the name that the converter of LLaVA gives a tensor; None for one that it leaves out.

    It gives the two matrices of a layer each other's names.
    """
    if "multi_modal_projector" in name:
        return name[name.index("linear_") :].replace("linear_1", "mm.0").replace("linear_2", "mm.2")
    if "vision_tower" not in name or "post_layernorm" in name or "position_ids" in name:
        return None
    own = name[name.index("vision_tower.") :].removeprefix("vision_tower.").removeprefix("vision_model.")
    for old, new in (
        ("embeddings.class_embedding", "class_embd"),
        ("embeddings.patch_embedding", "patch_embd"),
        ("embeddings.position_embedding", "position_embd"),
        ("pre_layrnorm", "pre_ln"),
        ("encoder.layers", "blk"),
        ("self_attn.", "attn_"),
        ("_proj", ""),
        ("layer_norm", "ln"),
        ("mlp.fc1", "ffn_down"),
        ("mlp.fc2", "ffn_up"),
    ):
        own = own.replace(old, new)
    return f"v.{own}"
