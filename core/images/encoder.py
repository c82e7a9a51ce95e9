"""From the arrays of an image to its embeddings: the vision tower and the connector of a model.

They are transformers' own modules, which is imported only for models that take images.
"""

import math
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from vllm_mp.config import ModelConfig
from vllm_mp.core.images.chunks import add_pause_points, pause, pausing
from vllm_mp.core.models.text_part import is_of_images
from vllm_mp.core.weights.checkpoint import CheckpointMismatchError, listed
from vllm_mp.core.weights.checkpoint_files import read_tensors
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.core.weights.gguf_tensors import image_tensors
from vllm_mp.model_store.folder import checkpoint_files
from vllm_mp.model_store.gguf import mapped_mmproj
from vllm_mp.requests.images import MAX_IMAGE_BYTES, ImageArray, ProcessedImage
from vllm_mp.validation.image_validation import ImageShape, image_shape

_TEXT_PARTS: Final = ("text_model", "language_model")


class ImageEncoder:
    """Makes the embeddings of images, on the model's device in its dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Load the weights of `config`, whose model takes images.

        Raises ValueError for weights that are missing or do not fit, and for an architecture that transformers lacks.
        """
        images = config.images
        assert images is not None
        self._config = images
        self._model_config = config
        self._hidden_size = config.architecture.hidden_size
        self._dtype = dtype
        self._device = device
        self.module: nn.Module = nn.Module()
        self.load_weights()
        self._num_frames = int(getattr(cast("Any", self.module).config.vision_config, "temporal_patch_size", 1))
        """Frames of a video that a patch has."""

    def load_weights(self) -> None:
        """Load the weights, after `drop_weights` again; no-op if they are there. Raises ValueError as above."""
        if self.module._modules:
            return
        self.module = _make_module(self._model_config, self._dtype, self._device)
        # The towers of the other families see small tiles, in part with masks.
        add_pause_points(self.module, self._device, bool(self._config.merge_size) or self._config.family == "gemma3")

    def drop_weights(self) -> None:
        """Free the weights; `encode` must not be called before `load_weights`."""
        self.module = nn.Module()

    def shape_of(self, image: ProcessedImage) -> ImageShape:
        """Return what an image becomes. Raises ValueError as `arrays.image_shape` does."""
        return image_shape(image, self._config)

    @property
    def may_pause(self) -> bool:
        """Whether an encoding may stop at each pause point. On a GPU it is fast, and its kernels only begin there."""
        return self._device.type == "cpu"

    @torch.inference_mode()
    def encode(
        self, image: ProcessedImage, first_tile: int, last_tile: int, pause_point: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Return the embeddings [num_tokens, hidden_size] of the tiles [first_tile, last_tile) of an image.

        Its shape must have been checked. `pause_point` is called after each chunk of a layer. The embeddings of a tile
        that no processor makes, with values that are not finite or, of a model with masks, with zeros only, are NaN, so
        that its request fails alone.
        """
        arrays = {array.name: array for array in image.arrays}
        with pausing(pause_point):
            if self._config.merge_size:
                return self._encode_grid(arrays)
            return self._encode_tiles(arrays, first_tile, last_tile)

    def _encode_tiles(self, arrays: dict[str, ImageArray], first_tile: int, last_tile: int) -> Tensor:
        """Return the embeddings [num_tokens, hidden_size] of tiles of one size."""
        masks = arrays.get("pixel_attention_mask")
        module: Any = self.module
        parts = []
        # One by one, so that a tile has the same embeddings whichever others a step needs.
        for number in range(first_tile, last_tile):
            pixels = _tile(arrays["pixel_values"], 3, number, self._device).to(self._dtype)
            # transformers leaves tiles of zeros out, as padding.
            is_left_out = self._config.has_masks and not pixels.any()
            if is_left_out or not pixels.sum(dtype=torch.float64).isfinite():
                parts.append(pixels.new_full((self._config.tile_tokens, self._hidden_size), torch.nan))
                continue
            if self._config.family == "llava":
                output = module.get_image_features(
                    pixel_values=pixels[None],
                    vision_feature_layer=module.config.vision_feature_layer,
                    vision_feature_select_strategy=module.config.vision_feature_select_strategy,
                )
            elif self._config.family == "gemma3":
                output = module.get_image_features(pixel_values=pixels[None])
            else:
                mask = None if masks is None else _tile(masks, 2, number, self._device).bool()[None, None]
                output = module.get_image_features(pixel_values=pixels[None, None], pixel_attention_mask=mask)
            parts += [each.flatten(0, -2) for each in output.pooler_output]
        return torch.cat(parts)

    def encode_largest(self) -> None:
        """Encode an image, or a tile of one, of the most pixels, so that torch records the memory that it takes."""
        config = self._config
        if config.merge_size:
            max_patches = MAX_IMAGE_BYTES // (12 * config.patch_size**2)
            side = math.isqrt(max_patches) // config.merge_size * config.merge_size
            pixels = np.ones((side * side, 3 * config.patch_size**2), np.float32)
            arrays = {"pixel_values": pixels, "image_grid_thw": np.array([[1, side, side]])}
        else:
            arrays = {"pixel_values": np.ones((1, 3, config.tile_size, config.tile_size), np.float32)}
        self.encode(ProcessedImage(b"", [ImageArray.of(name, each) for name, each in arrays.items()]), 0, 1)

    def _encode_grid(self, arrays: dict[str, ImageArray]) -> Tensor:
        """Return the embeddings [num_tokens, hidden_size] of an image that is a grid of patches."""
        pixels, module = arrays["pixel_values"], cast("Any", self.module)
        size = self._config.patch_size**2
        values = np.frombuffer(pixels.data, np.float32).reshape(-1, 3, 1, size).copy()
        patches = torch.from_numpy(values).to(self._device).to(self._dtype)
        grid = torch.frombuffer(bytearray(arrays["image_grid_thw"].data), dtype=torch.int64)[None].to(self._device)
        pause()
        if not patches.sum(dtype=torch.float64).isfinite():
            num_tokens = len(patches) // self._config.merge_size**2
            return patches.new_full((num_tokens, self._hidden_size), torch.nan)
        # An image is a frame that stands still.
        frames = patches.expand(-1, -1, self._num_frames, -1).flatten(1)
        pause()
        output = module.get_image_features(pixel_values=frames, image_grid_thw=grid)
        embeddings: Tensor = output.pooler_output[0]
        return embeddings


def _tile(array: ImageArray, num_dims: int, number: int, device: torch.device) -> Tensor:
    """Return what `array` has of the tile `number`, in `num_dims` dimensions."""
    values = np.frombuffer(array.data, array.dtype).reshape(-1, *array.shape[len(array.shape) - num_dims :])
    return torch.from_numpy(values[number].copy()).to(device)


def _make_module(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return transformers' module of the whole model, without its text part."""
    from transformers import AutoConfig, AutoModel

    name = config.architecture.name
    try:
        hub_config = AutoConfig.from_pretrained(config.folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module: nn.Module = AutoModel.from_config(hub_config, dtype=dtype).eval()
    except Exception as error:  # a bad configuration raises errors of any type
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(f"transformers cannot make the parts of {name!r} that see images: {reason}") from error
    for part in _TEXT_PARTS:
        if hasattr(module, part):
            setattr(module, part, nn.Identity())
    module = module.to_empty(device=device).requires_grad_(False)
    for buffer_name, buffer in module.named_buffers():
        if buffer_name.endswith("inv_freq"):
            _fill_frequencies(buffer)
            continue
        if not buffer_name.endswith("position_ids"):
            raise ValueError(f"{name!r} cannot run here: its {buffer_name} is not in the weights")
        buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
    if config.load_format == "dummy":
        fill_with_dummy_weights(module, config.weights_seed)
    else:
        _load(module, config)
    return module


def _fill_frequencies(buffer: Tensor) -> None:
    """Set the radians per patch of each rotated pair, of rows and of columns: [head_dim / 4]."""
    exponents = torch.arange(0, 2 * len(buffer), 2, dtype=torch.float32) / (2 * len(buffer))
    buffer.copy_(1.0 / 10_000.0**exponents)


@torch.no_grad()
def _load(module: nn.Module, config: ModelConfig) -> None:
    """Fill the parameters from the checkpoint. Raises ValueError that lists what is missing or does not fit."""
    parameters = dict(module.named_parameters())
    missing, problems = set(parameters), []
    mmproj = mapped_mmproj(config.folder)
    if mmproj is None:
        source = str(config.folder)
        remedy = (
            "Check that config.json and the weights belong to the same model, or leave images out with "
            'limit_mm_per_prompt={"image": 0}.'
        )
        tensors = read_tensors(checkpoint_files(config.folder), None)
    else:
        source, remedy = mmproj.path, "Convert the model to GGUF again."
        tensors = image_tensors(mmproj)
        _fill_unused_norm(parameters, missing)
    for name, tensor in tensors:
        if not is_of_images(name):
            continue
        own = name.removeprefix("model.")
        # Checkpoints of some versions of transformers have a level more, or less.
        short = own.replace("vision_tower.vision_model.", "vision_tower.")
        found = next((n for n in (own, short, short.replace("tower.", "tower.vision_model.")) if n in parameters), None)
        if found is None:
            if not own.endswith("position_ids"):
                problems.append(f"unexpected {name}")
        elif parameters[found].shape != tensor.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(parameters[found].shape)}")
            missing.discard(found)
        else:
            parameters[found].copy_(tensor)
            missing.discard(found)
    problems += [f"missing {name}" for name in sorted(missing)]
    if problems:
        raise CheckpointMismatchError(f"{source}: {listed(problems)}. {remedy}")


def _fill_unused_norm(parameters: dict[str, nn.Parameter], missing: set[str]) -> None:
    """Fill the norm of LLaVA's tower that answers do not depend on, which GGUF files leave out."""
    for name in set(missing):
        if name.startswith("vision_tower.") and ".post_layernorm." in f".{name}":
            parameters[name].fill_(1.0 if name.endswith("weight") else 0.0)
            missing.discard(name)
