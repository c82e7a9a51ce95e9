"""The file with the image parts of a model in GGUF files, `mmproj`: vision tower, projector and image processor.

llama.cpp keeps the text part in a file of its own. The metadata must agree with the shapes of the tensors, and with the
text part. Served are the projectors in `_PROJECTORS`.
"""

import math
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_mp.model_store.gguf_file.fields import GgufFields
from vllm_mp.model_store.gguf_file.reader import GgufFile, read_gguf

ARCHITECTURE: Final = "clip"
"""`general.architecture` of such files."""
_NAME: Final = "mmproj"
_TYPES: Final = ("F32", "F16", "BF16", "Q8_0")
"""The types of tensors that are read."""
_QWEN2, _QWEN2_5 = "qwen2vl_merger", "qwen2.5vl_merger"
_PROJECTORS: Final = {
    "idefics3": "Idefics3 and SmolVLM",
    "mlp": "LLaVA 1.5",
    "gemma3": "Gemma 3",
    _QWEN2: "Qwen2-VL",
    _QWEN2_5: "Qwen2.5-VL",
}
_TEXT_TYPES: Final = ("llama", "qwen2", "qwen3")
_OWN_TEXT_TYPES: Final = {"gemma3": "gemma3_text", _QWEN2: "qwen2_vl_text", _QWEN2_5: "qwen2_vl_text"}
"""The text part of a projector that fits one kind, by `model_type`."""
TEXT_TYPES: Final = (*_TEXT_TYPES, *dict.fromkeys(_OWN_TEXT_TYPES.values()))
"""The text parts that may have images, by `model_type`."""
_WITHOUT_IMAGES: Final = "name the file of the text part alone to serve texts without images"
_ZOOM: Final = 4
"""Tiles along the longest edge of an image of Idefics3 and SmolVLM, if a file does not state the edge."""

_OF_BLOCK: Final = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_BLOCK_NAMES: Final = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_BLOCK_NAMES: Final = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
}
_MLP_NAMES: Final = {
    _QWEN2: {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    _QWEN2_5: {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}
_QWEN_NAMES: Final = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}
_PATCHES: Final = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The matrix of patches; the second is that for the second frame of a video, which patches of Qwen2-VL have."""
_WINDOW_PIXELS: Final = 112
"""Pixels of a side of a window of Qwen2.5-VL, if a file does not state it."""
_QWEN_MIN_PIXELS: Final = 56 * 56
_QWEN_MAX_PIXELS: Final = 128 * 128 * 28 * 28
"""Least and most pixels of an image of Qwen2-VL and Qwen2.5-VL, as published, if a file does not state them."""
_SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_TOWER_NAMES: Final = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
}
_NAMES: Final = {
    "idefics3": {
        **{name: f"vision_model.{own}" for name, own in _TOWER_NAMES.items()},
        "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    },
    "mlp": {
        **{name: f"vision_tower.vision_model.{own}" for name, own in _TOWER_NAMES.items()},
        "v.pre_ln": "vision_tower.vision_model.pre_layrnorm",
        "mm.0": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    "gemma3": {
        **{name: f"vision_tower.vision_model.{own}" for name, own in _TOWER_NAMES.items()},
        "v.post_ln": "vision_tower.vision_model.post_layernorm",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
}
"""The names of modules in checkpoints, by projector and by their names in files."""
_CLASS_EMBEDDING: Final = "v.class_embd"
_GEMMA3_PROJECTION: Final = "mm.input_projection.weight"
_GEMMA3_NORM: Final = "mm.soft_emb_norm.weight"
_GEMMA3_POOLED_PATCHES: Final = 4
"""Patches along a side of the square that an embedding of Gemma 3 stands for, if a file does not state it."""


class Mmproj(NamedTuple):
    """What such a file says of a model."""

    config: dict[str, Any]
    """The content of config.json, without `token_fields`."""
    processor: dict[str, dict[str, Any]]
    """The content of each file of the image processor, by its name."""
    token_fields: dict[str, str]
    """Special tokens of prompts with images, by the fields of config.json for their ids; first the image token."""
    other_tokens: tuple[str, ...] = ()
    """Special tokens of prompts with images that config.json does not have."""


def is_mmproj(path: Path) -> bool:
    """Tell by its name or its header whether `path` holds image parts; False for a file that cannot be read."""
    if _NAME in path.name.lower():
        return True
    try:
        return read_gguf(path).metadata.get("general.architecture") == ARCHITECTURE
    except ValueError:
        return False


def read_mmproj(file: GgufFile, text: dict[str, Any], text_path: Path) -> Mmproj:
    """Return what `file` says of a model whose text part is in `text_path` and has the configuration `text`.

    Raises ValueError, naming the file, the field and its value, for a projector or a type of tensors that is not
    served, for metadata that is missing or ill-typed or does not fit the tensors, and for another text part's file.
    """
    return _Reader(file).mmproj(text, text_path)


def projector_of(file: GgufFile) -> str:
    """Return a key of `_PROJECTORS`. Raises ValueError for files of other projectors, and for files without one."""
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{file.path}: general.architecture is {architecture!r:.80}: a file with a vision tower (mmproj) has "
            f"{ARCHITECTURE!r}; name such a file, or {_WITHOUT_IMAGES}"
        )
    key = "clip.projector_type" if "clip.projector_type" in file.metadata else "clip.vision.projector_type"
    # The first files of LLaVA do not state the type.
    default = "mlp" if file.metadata.get("clip.has_llava_projector") is True else None
    projector = file.metadata.get(key, default)
    if not isinstance(projector, str) or projector not in _PROJECTORS:
        known = " and ".join(f"{name!r} ({models})" for name, models in _PROJECTORS.items())
        raise ValueError(f"{file.path}: {key} is {projector!r:.80}: served are {known}; {_WITHOUT_IMAGES}")
    return projector


def checkpoint_names(file: GgufFile) -> dict[str, str]:
    """Return the name in a checkpoint of each tensor of `file`. Raises ValueError for a tensor that has none there.

    Tensors of the same name are parts of one, in this order: along its dimension `dim_of_parts`.
    """
    projector = projector_of(file)
    is_swapped = _has_swapped_names(file)
    names = {}
    for name in sorted(file.tensors, key=lambda name: (".attn_v." in name, ".attn_k." in name, name)):
        own = _checkpoint_name(name, projector, is_swapped)
        if own is None:
            raise ValueError(
                f"{file.path}: {name} is a tensor that the image parts of {_PROJECTORS[projector]} do not have; "
                f"{_WITHOUT_IMAGES}"
            )
        names[name] = own
    return names


def _checkpoint_name(name: str, projector: str, is_swapped: bool) -> str | None:
    if projector in _MLP_NAMES:
        return _qwen_name(name, projector, is_swapped)
    tower = "vision_model" if projector == "idefics3" else "vision_tower.vision_model"
    if block := _OF_BLOCK.fullmatch(name):
        number, module, kind = block.groups()
        module = _SWAPPED.get(module, module) if is_swapped else module
        return f"{tower}.encoder.layers.{number}.{_BLOCK_NAMES[module]}.{kind}" if module in _BLOCK_NAMES else None
    if name == _GEMMA3_PROJECTION and projector == "gemma3":
        return "multi_modal_projector.mm_input_projection_weight"
    if name == _CLASS_EMBEDDING and projector == "mlp":
        return f"{tower}.embeddings.class_embedding"
    module, _, kind = name.rpartition(".")
    own = _NAMES[projector].get(module)
    return f"{own}.{kind}" if own and kind in ("weight", "bias") else None


def _qwen_name(name: str, projector: str, is_swapped: bool) -> str | None:
    if name in _PATCHES:
        return "visual.patch_embed.proj.weight"
    if block := _OF_BLOCK.fullmatch(name):
        number, module, kind = block.groups()
        module = _SWAPPED.get(module, module) if is_swapped else module
        own = (_QWEN_BLOCK_NAMES | _MLP_NAMES[projector]).get(module)
        return f"visual.blocks.{number}.{own}.{kind}" if own else None
    module, _, kind = name.rpartition(".")
    own = _QWEN_NAMES.get(module)
    return f"{own}.{kind}" if own and kind in ("weight", "bias") else None


def dim_of_parts(name: str) -> int:
    """Return the dimension along which the tensor `name` of a checkpoint is made of several of a file.

    Those of the frames of a patch lack the dimension.
    """
    return 2 if name == "visual.patch_embed.proj.weight" else 0


def offset_of(name: str) -> float:
    """Return what a file adds to the elements of the tensor `name` of a checkpoint."""
    return 1.0 if name == _GEMMA3_NORM else 0.0


def _has_swapped_names(file: GgufFile) -> bool:
    """Tell whether `ffn_up` and `ffn_down` have each other's names, as in files of older converters."""
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    return down is not None and down.shape[-1] == file.metadata.get("clip.vision.embedding_length")


class _Reader(GgufFields):
    """Reads one file."""

    def mmproj(self, text: dict[str, Any], text_path: Path) -> Mmproj:
        projector = projector_of(self.file)
        self._check_text_part(projector, text, text_path)
        if self.value("has_vision_encoder", True) is not True:
            raise self.error("has_vision_encoder", self.value("has_vision_encoder", None), "it must be true")
        for name, tensor in self.file.tensors.items():
            if tensor.type.name not in _TYPES:
                raise ValueError(
                    f"{self.file.path}: {name} is of the type {tensor.type.name}: of image parts, {', '.join(_TYPES)} "
                    f"are read; use a file in one of them, or {_WITHOUT_IMAGES}"
                )
        if projector in _MLP_NAMES:
            return self._qwen(projector, text, text_path)
        readers = {"idefics3": self._idefics3, "mlp": self._llava, "gemma3": self._gemma3}
        return readers[projector](text, text_path)

    def _check_text_part(self, projector: str, text: dict[str, Any], text_path: Path) -> None:
        known = (_OWN_TEXT_TYPES[projector],) if projector in _OWN_TEXT_TYPES else _TEXT_TYPES
        if text["model_type"] not in known:
            raise ValueError(
                f"{text_path}: general.architecture is that of {text['model_type']!r}: with {self.file.path.name}, "
                f"the text part must be one of {', '.join(known)}; {_WITHOUT_IMAGES}"
            )

    def _idefics3(self, text: dict[str, Any], text_path: Path) -> Mmproj:
        vision = self._tower()
        self._must_be("clip.use_gelu", True, "the towers of Idefics3 and SmolVLM use GELU")
        side = vision["image_size"] // vision["patch_size"]
        self.must_fit("vision.image_size", side**2, self.shape("v.position_embd.weight", 2)[0])
        scale = self.integer("vision.projector.scale_factor", 2)
        if side % scale:
            raise self.error("vision.projector.scale_factor", scale, f"it must divide the {side} patches of a side")
        width, inputs = self.shape("mm.model.fc.weight", 2)
        self.must_fit("vision.projector.scale_factor", vision["hidden_size"] * scale**2, inputs)
        self._check_width(width, text, text_path)
        edge = self.integer("vision.preproc_image_size", _ZOOM * vision["image_size"])
        checkpoint_names(self.file)
        vision |= {"model_type": "idefics3_vision", "hidden_act": "gelu_pytorch_tanh"}
        return Mmproj(
            {
                **self._config("Idefics3ForConditionalGeneration", "idefics3", text, vision),
                "scale_factor": scale,
            },
            {
                "preprocessor_config.json": {
                    "image_processor_type": "Idefics3ImageProcessor",
                    "size": {"longest_edge": edge},
                    "max_image_size": {"longest_edge": vision["image_size"]},
                    **self._normalization(),
                },
                "processor_config.json": {"image_seq_len": (side // scale) ** 2},
            },
            {"image_token_id": "<image>"},
            ("<fake_token_around_image>",),
        )

    def _llava(self, text: dict[str, Any], text_path: Path) -> Mmproj:
        for key in ("vision.image_grid_pinpoints", "vision.mm_patch_merge_type"):
            if (value := self.value(key, None)) not in (None, "flat"):
                name = f"clip.{key}"
                raise ValueError(
                    f"{self.file.path}: {name} is {value!r:.80}: files of LLaVA 1.6 have it, and only LLaVA 1.5 is "
                    f"served; {_WITHOUT_IMAGES}"
                )
        vision = self._tower()
        is_gelu = self.value("use_gelu", False)
        if not isinstance(is_gelu, bool):
            raise self.error("use_gelu", is_gelu, "it must be true or false")
        self._must_be("clip.use_silu", False, "the towers of LLaVA 1.5 do not use it")
        side = vision["image_size"] // vision["patch_size"]
        self.must_fit("vision.image_size", side**2 + 1, self.shape("v.position_embd.weight", 2)[0])
        self.must_fit("vision.embedding_length", vision["hidden_size"], self.shape(_CLASS_EMBEDDING, 1)[0])
        width, inner = self.shape("mm.2.weight", 2)
        if self.shape("mm.0.weight", 2) != (inner, vision["hidden_size"]):
            found = list(self.file.tensors["mm.0.weight"].shape)
            raise self.error("mm.0.weight", found, f"its shape must be {[inner, vision['hidden_size']]}")
        self._check_width(width, text, text_path)
        checkpoint_names(self.file)
        vision |= {"model_type": "clip_vision_model", "hidden_act": "gelu" if is_gelu else "quick_gelu"}
        size = vision["image_size"]
        return Mmproj(
            {
                **self._config("LlavaForConditionalGeneration", "llava", text, vision),
                "vision_feature_layer": self._feature_layer(vision["num_hidden_layers"]),
                "vision_feature_select_strategy": "default",
            },
            {
                "preprocessor_config.json": {
                    "image_processor_type": "CLIPImageProcessor",
                    "size": {"shortest_edge": size},
                    "crop_size": {"height": size, "width": size},
                    **self._normalization(),
                },
                "processor_config.json": {
                    "patch_size": vision["patch_size"],
                    "num_additional_image_tokens": 1,
                    "vision_feature_select_strategy": "default",
                },
            },
            {"image_token_id": "<image>"},
        )

    def _gemma3(self, text: dict[str, Any], text_path: Path) -> Mmproj:
        vision = self._tower()
        self._must_be("clip.use_gelu", True, "the tower of Gemma 3 uses GELU")
        side = vision["image_size"] // vision["patch_size"]
        self.must_fit("vision.image_size", side**2, self.shape("v.position_embd.weight", 2)[0])
        self.must_fit("vision.embedding_length", vision["hidden_size"], self.shape("v.post_ln.weight", 1)[0])
        pooled = self.integer("vision.projector.scale_factor", _GEMMA3_POOLED_PATCHES)
        if side % pooled:
            raise self.error("vision.projector.scale_factor", pooled, f"it must divide the {side} patches of a side")
        inputs, width = self.shape(_GEMMA3_PROJECTION, 2)
        self.must_fit("vision.embedding_length", vision["hidden_size"], inputs)
        self.must_fit("vision.embedding_length", vision["hidden_size"], self.shape(_GEMMA3_NORM, 1)[0])
        self._check_width(width, text, text_path)
        checkpoint_names(self.file)
        vision |= {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
        }
        num_tokens = (side // pooled) ** 2
        return Mmproj(
            {
                **self._config("Gemma3ForConditionalGeneration", "gemma3", text, vision),
                "mm_tokens_per_image": num_tokens,
            },
            {
                "preprocessor_config.json": {
                    "image_processor_type": "Gemma3ImageProcessor",
                    "size": {"height": vision["image_size"], "width": vision["image_size"]},
                    **self._normalization(),
                },
                "processor_config.json": {"image_seq_length": num_tokens},
            },
            {
                "image_token_index": "<image_soft_token>",
                "boi_token_index": "<start_of_image>",
                "eoi_token_index": "<end_of_image>",
            },
        )

    def _qwen(self, projector: str, text: dict[str, Any], text_path: Path) -> Mmproj:
        hidden, patch = self.integer("vision.embedding_length"), self.integer("vision.patch_size")
        heads = self._heads(hidden)
        for name in _PATCHES:
            self._check_patches(name, hidden, patch)
        layers = self._layers()
        merge = self.integer("vision.spatial_merge_size", 2)
        self.must_fit("vision.spatial_merge_size", hidden * merge**2, self.shape("mm.0.weight", 2)[1])
        width = self.shape("mm.2.weight", 2)[0]
        self._check_width(width, text, text_path)
        checkpoint_names(self.file)
        # Files of Qwen2-VL state another number as feed_forward_length.
        inner = max(self.shape("v.blk.0.ffn_up.weight", 2))
        vision: dict[str, Any] = {
            "depth": layers,
            "num_heads": heads,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": len(_PATCHES),
            "in_channels": 3,
        }
        if projector == _QWEN2:
            if inner % hidden:
                raise self.error("v.blk.0.ffn_up.weight", [inner, hidden], "embedding_length must divide its rows")
            vision |= {"embed_dim": hidden, "mlp_ratio": inner // hidden, "hidden_size": width}
            config = self._config("Qwen2VLForConditionalGeneration", "qwen2_vl", text, vision)
        else:
            period = self.integer("vision.n_wa_pattern", 1)
            vision |= {
                "hidden_size": hidden,
                "intermediate_size": inner,
                "out_hidden_size": width,
                "window_size": self.integer("vision.window_size", _WINDOW_PIXELS),
                "fullatt_block_indexes": [layer for layer in range(layers) if (layer + 1) % period == 0],
            }
            text = {**text, "model_type": "qwen2_5_vl_text"}
            config = self._config("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", text, vision)
        return Mmproj(
            config,
            {
                "preprocessor_config.json": {
                    "image_processor_type": "Qwen2VLImageProcessor",
                    "patch_size": patch,
                    "merge_size": merge,
                    "temporal_patch_size": len(_PATCHES),
                    "min_pixels": self.integer("vision.image_min_pixels", _QWEN_MIN_PIXELS),
                    "max_pixels": self.integer("vision.image_max_pixels", _QWEN_MAX_PIXELS),
                    **self._normalization(),
                }
            },
            {
                "image_token_id": "<|image_pad|>",
                "vision_start_token_id": "<|vision_start|>",
                "vision_end_token_id": "<|vision_end|>",
            },
        )

    def _feature_layer(self, num_layers: int) -> int:
        """Return the layer whose output becomes embeddings, from 1: the last one in the file, unless it says so."""
        layers = self.value("vision.feature_layer", [num_layers])
        if not (isinstance(layers, list) and len(layers) == 1 and type(layers[0]) is int):
            raise self.error("vision.feature_layer", layers, "it must have one number, as in files of LLaVA 1.5")
        if not 1 <= layers[0] <= num_layers:
            raise self.error("vision.feature_layer", layers, f"it must be from 1 to {num_layers}, the layers")
        return layers[0]

    def _tower(self) -> dict[str, Any]:
        """Return the fields of `vision_config` that all families have."""
        hidden = self.integer("vision.embedding_length")
        heads = self._heads(hidden)
        size, patch = self.integer("vision.image_size"), self.integer("vision.patch_size")
        if patch > size:
            raise self.error("vision.patch_size", patch, f"it must be at most image_size, {size}")
        self.must_fit("vision.embedding_length", hidden, self.shape("v.position_embd.weight", 2)[1])
        self._check_patches(_PATCHES[0], hidden, patch)
        layers = self._layers()
        inner = self.integer("vision.feed_forward_length")
        if inner == hidden:  # then swapped names could not be told from others
            raise self.error("vision.feed_forward_length", inner, "it must not be embedding_length")
        up, down = (self.shape(f"v.blk.0.{module}.weight", 2) for module in ("ffn_up", "ffn_down"))
        if {up, down} != {(inner, hidden), (hidden, inner)}:
            shapes = f"ffn_up and ffn_down have the shapes {list(up)} and {list(down)}, embedding_length is {hidden}"
            raise self.error("vision.feed_forward_length", inner, shapes)
        return {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "image_size": size,
            "patch_size": patch,
            "layer_norm_eps": self.number("vision.attention.layer_norm_epsilon"),
        }

    def _heads(self, hidden: int) -> int:
        """Return the number of heads, which must divide `hidden`."""
        heads = self.integer("vision.attention.head_count")
        if hidden % heads:
            raise self.error("vision.attention.head_count", heads, f"it must divide embedding_length, {hidden}")
        return heads

    def _layers(self) -> int:
        """Return the number of layers, which must be that of the tensors."""
        layers = self.integer("vision.block_count")
        numbers = {int(block[1]) for name in self.file.tensors if (block := _OF_BLOCK.fullmatch(name))}
        self.must_fit("vision.block_count", layers, len(numbers))
        return layers

    def _check_patches(self, name: str, hidden: int, patch: int) -> None:
        """Raise ValueError unless the tensor `name` takes patches of this many pixels."""
        found, wanted = self.shape(name, 4), (hidden, 3, patch, patch)
        if found != wanted:
            raise self.error(name, list(found), f"its shape must be {list(wanted)}")

    def _check_width(self, width: int, text: dict[str, Any], text_path: Path) -> None:
        """Raise ValueError unless embeddings of images are as long as those of the text part."""
        if width != text["hidden_size"]:
            raise ValueError(
                f"{self.file.path}: its projector makes embeddings of {width} elements, and those of "
                f"{text_path.name} have {text['hidden_size']}: the files belong to different models; name the mmproj "
                "file of this model"
            )

    def _must_be(self, name: str, wanted: bool, reason: str) -> None:
        value = self.file.metadata.get(name, False)
        if value is not wanted:
            raise ValueError(f"{self.file.path}: {name} is {value!r:.80}: {reason}; {_WITHOUT_IMAGES}")

    def _normalization(self) -> dict[str, list[float]]:
        """Return mean and deviation of each colour."""
        found = {}
        for key in ("image_mean", "image_std"):
            values = self.value(f"vision.{key}", None)
            is_list = isinstance(values, list) and len(values) == 3
            if not is_list or not all(type(value) is float and math.isfinite(value) for value in values):  # type: ignore[union-attr]
                raise self.error(f"vision.{key}", values, "it must have a finite number for each of 3 colours")
            found[key] = [float(value) for value in values]  # type: ignore[union-attr]
        if not all(value > 0 for value in found["image_std"]):
            raise self.error("vision.image_std", found["image_std"], "it must have numbers above 0")
        return found

    def _config(self, name: str, kind: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": [name],
            "model_type": kind,
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "dtype": text["dtype"],
        }
