"""What the configuration of a model says of the images that its prompts may have."""

import math
from typing import Final

import msgspec

from vllm_mp.model_config.config_json import Config, choice, integer, shorten

_PLACEHOLDERS: Final = {
    "idefics3": 128_257,
    "smolvlm": 128_257,
    "llava": 32_000,
    "qwen2_vl": 151_655,
    "qwen2_5_vl": 151_655,
    "gemma3": 262_144,
}
"""The models whose images are served, by `model_type`, and the image token of configurations that leave it out."""
_GEMMA3_BEGIN, _GEMMA3_END = 255_999, 256_000
"""The tokens around an image in configurations that leave them out."""


class ImageConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How a model takes images.

    An image is cut into tiles of one size, each of which gives as many embeddings. With `merge_size` an image is
    instead one tile, a grid of patches of any size.
    """

    family: str
    """"idefics3", "smolvlm", "llava", "qwen2_vl", "qwen2_5_vl" or "gemma3"."""
    token_id: int
    """The token in the place of each embedding."""
    tile_size: int
    """Pixels of a side of a tile; 0: as the image has it."""
    tile_tokens: int
    """Embeddings of a tile; 0: as its grid has it."""
    has_many_tiles: bool
    """False: an image is a single tile."""
    patch_size: int
    """Pixels of a side of a patch, of which a tile is made."""
    merge_size: int = 0
    """Patches of a side of the square that an embedding stands for; 0: tiles have one size."""
    has_masks: bool = False
    """True: the arrays of an image may say which pixels of a tile are padding, and a tile of zeros is all padding."""
    begin_id: int | None = None
    """The token before a tile, which is also the placeholder; None: the placeholder is `token_id`."""
    end_id: int | None = None
    """The token after a tile, if there is a `begin_id`."""
    attends_both_ways: bool = False
    """True: the tokens of a tile attend to one another, so a step computes all of them or none."""

    @property
    def placeholder_id(self) -> int:
        """The token that stands for an image in a prompt."""
        return self.token_id if self.begin_id is None else self.begin_id


def read_image_config(config: Config) -> ImageConfig | None:
    """Read the contents of a `config.json`; None if the model takes no images, or they are not served.

    Raises ValueError, naming the field and its value, for fields that are missing, ill-typed or contradictory.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _PLACEHOLDERS:
        return None
    vision = config.get("vision_config") or {}
    if not isinstance(vision, dict):
        raise ValueError(f"config field 'vision_config' is {shorten(vision)}; it must be an object")
    if family == "gemma3":
        return _gemma3(config, vision) if vision else None
    name = next((name for name in ("image_token_id", "image_token_index") if name in config), "image_token_id")
    token_id = integer(config, name, _PLACEHOLDERS[family], minimum=0)
    if family.startswith("qwen"):
        return ImageConfig(
            family=family,
            token_id=token_id,
            tile_size=0,
            tile_tokens=0,
            has_many_tiles=False,
            patch_size=integer(vision, "patch_size", 14),
            merge_size=integer(vision, "spatial_merge_size", 2),
        )
    is_llava = family == "llava"
    size = integer(vision, "image_size", 336 if is_llava else 224)
    patch = integer(vision, "patch_size", 14 if is_llava else 32)
    if patch > size:
        raise ValueError(f"config field 'patch_size' is {patch}; it must be at most image_size, which is {size}")
    side = size // patch
    if is_llava:
        select = choice(config, "vision_feature_select_strategy", "default", ("default", "full"))
        num_tokens = side * side + (select == "full")
    else:
        scale = integer(config, "scale_factor", 2)
        if side % scale:
            raise ValueError(
                f"config field 'scale_factor' is {scale}; it must divide the {side} patches of a side of an image"
            )
        num_tokens = (side // scale) ** 2
    return ImageConfig(
        family=family,
        token_id=token_id,
        tile_size=size,
        tile_tokens=num_tokens,
        has_many_tiles=not is_llava,
        patch_size=patch,
        has_masks=not is_llava,
    )


def _gemma3(config: Config, vision: Config) -> ImageConfig | None:
    size, patch = integer(vision, "image_size", 224), integer(vision, "patch_size", 16)
    num_tokens = integer(config, "mm_tokens_per_image", 256)
    side, pooled = size // patch, math.isqrt(num_tokens)
    if side < pooled:
        return None  # transformers writes such a tower, of which no image can be computed, for a model of texts alone
    if pooled**2 != num_tokens or side // (side // pooled) != pooled:
        raise ValueError(
            f"config field 'mm_tokens_per_image' is {num_tokens}; it must be a square to whose side the {side} patches "
            "of a side of an image can be pooled"
        )
    name = "image_token_id" if "image_token_id" in config else "image_token_index"
    return ImageConfig(
        family="gemma3",
        token_id=integer(config, name, _PLACEHOLDERS["gemma3"], minimum=0),
        tile_size=size,
        tile_tokens=num_tokens,
        has_many_tiles=True,
        patch_size=patch,
        begin_id=integer(config, "boi_token_index", _GEMMA3_BEGIN, minimum=0),
        end_id=integer(config, "eoi_token_index", _GEMMA3_END, minimum=0),
        attends_both_ways=True,
    )
