"""From the arrays of an image to its embeddings: the vision tower and the connector of a model.

They are transformers' own modules, which is imported only for models that take images.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from vllm_mp.config import ModelConfig
from vllm_mp.core.images.arrays import count_tiles
from vllm_mp.core.models.text_part import is_of_images
from vllm_mp.core.weights.checkpoint import CheckpointMismatchError, listed
from vllm_mp.core.weights.checkpoint_files import checkpoint_files, read_tensors
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.requests.images import ImageArray, ProcessedImage

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
        self._hidden_size = config.architecture.hidden_size
        self._dtype = dtype
        self._device = device
        self.module: nn.Module = _make_module(config, dtype, device)

    @property
    def tile_tokens(self) -> int:
        """Number of embeddings of a tile."""
        return self._config.tile_tokens

    def count_tiles(self, image: ProcessedImage) -> int:
        """Return the number of tiles of an image. Raises ValueError as `arrays.count_tiles` does."""
        return count_tiles(image, self._config)

    @torch.inference_mode()
    def encode(
        self, image: ProcessedImage, first_tile: int, last_tile: int, beat: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Return the embeddings [num_tokens, hidden_size] of the tiles [first_tile, last_tile) of an image.

        Its tiles must have been counted. `beat` is called after each. The embeddings of a tile that no processor makes,
        with values that are not finite or with zeros only, are NaN, so that its request fails alone.
        """
        arrays = {array.name: array for array in image.arrays}
        masks = arrays.get("pixel_attention_mask")
        module: Any = self.module
        parts = []
        # One by one, so that a tile has the same embeddings whichever others a step needs.
        for number in range(first_tile, last_tile):
            pixels = _tile(arrays["pixel_values"], 3, number, self._device).to(self._dtype)
            if not pixels.sum(dtype=torch.float64).isfinite() or not pixels.any():
                parts.append(pixels.new_full((self.tile_tokens, self._hidden_size), torch.nan))
                continue
            if self._config.family == "llava":
                output = module.get_image_features(
                    pixel_values=pixels[None],
                    vision_feature_layer=module.config.vision_feature_layer,
                    vision_feature_select_strategy=module.config.vision_feature_select_strategy,
                )
            else:
                mask = None if masks is None else _tile(masks, 2, number, self._device).bool()[None, None]
                output = module.get_image_features(pixel_values=pixels[None, None], pixel_attention_mask=mask)
            parts += [each.flatten(0, -2) for each in output.pooler_output]
            beat()
        return torch.cat(parts)


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
        if not buffer_name.endswith("position_ids"):
            raise ValueError(f"{name!r} cannot run here: its {buffer_name} is not in the weights")
        buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
    if config.load_format == "dummy":
        fill_with_dummy_weights(module, config.weights_seed)
    else:
        _load(module, config)
    return module


@torch.no_grad()
def _load(module: nn.Module, config: ModelConfig) -> None:
    """Fill the parameters from the checkpoint. Raises ValueError that lists what is missing or does not fit."""
    parameters = dict(module.named_parameters())
    missing, problems = set(parameters), []
    for name, tensor in read_tensors(checkpoint_files(config.folder), None):
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
        raise CheckpointMismatchError(
            f"{config.folder}: {listed(problems)}. Check that config.json and the weights belong to the same model."
        )
