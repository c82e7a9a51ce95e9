"""What a model's config.json says of the images that its prompts may have."""

from typing import Literal

import msgspec


class ImageConfig(msgspec.Struct, kw_only=True, frozen=True):
    """A model that takes images."""

    family: Literal["idefics3", "smolvlm", "llava"]
    token_id: int
    """The token that is the placeholder of an image in a prompt, and in whose places its embeddings go."""
