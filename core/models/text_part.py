"""The names of modules in a model of texts and images whose text part is served."""

import re
from typing import Final

_TEXT_PART: Final = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
_IMAGE_PARTS: Final = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|vision_model|connector|visual)\.")


def name_in_text_part(name: str) -> str:
    """Return the name that a module or tensor of the text part has in it; other names are returned as they are."""
    return _TEXT_PART.sub("", name)


def is_of_images(name: str) -> bool:
    """Tell whether a module or tensor belongs to the parts that compute images."""
    return _IMAGE_PARTS.match(name) is not None
