"""What the configuration of a model says of the images that its prompts may have."""

from typing import Final

import msgspec

from vllm_mp.model_config.config_json import Config, choice, integer, shorten

_PLACEHOLDERS: Final = {
    "idefics3": 128_257,
    "smolvlm": 128_257,
    "llava": 32_000,
    "qwen2_vl": 151_655,
    "qwen2_5_vl": 151_655,
}
"""The models whose images are served, by `model_type`, and the placeholder of configurations that leave it out."""


class ImageConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How a model takes images.

    An image is cut into tiles of one size, each of which gives as many embeddings. With `merge_size` an image is
    instead one tile, a grid of patches of any size.
    """

    family: str
    """"idefics3", "smolvlm", "llava", "qwen2_vl" or "qwen2_5_vl"."""
    token_id: int
    """The placeholder: the token in the place of each embedding."""
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
    )
