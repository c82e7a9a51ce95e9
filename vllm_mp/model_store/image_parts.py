"""What an mmproj file puts into a model folder: the settings of the image processor, and the placeholder."""

import json
from pathlib import Path
from typing import Any

from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_store.gguf_file.mmproj import Mmproj
from vllm_mp.model_store.tokenizer_files import PROCESSOR_FILES


def processor_files_beside(mmproj: Path) -> dict[str, dict[str, Any]]:
    """Return the content of those of `PROCESSOR_FILES` that lie beside the file `mmproj`.

    Raises ValueError, naming the file, for one that is not a JSON object.
    """
    contents = {name: read_json(mmproj.parent / name, dict) for name in PROCESSOR_FILES}
    return {name: content for name, content in contents.items() if content is not None}


def write_image_files(folder: Path, parts: Mmproj, beside: dict[str, dict[str, Any]]) -> None:
    """Write the files of the image processor to `folder`; those `beside` the mmproj file replace what it says."""
    for name, content in (parts.processor | beside).items():
        (folder / name).write_text(json.dumps(content, indent=2))


def placeholder_id(folder: Path, parts: Mmproj, text_path: Path) -> int:
    """Return the token id of the placeholder of images in the tokenizer that was made of the file `text_path`.

    Raises ValueError, naming the token, if `folder` has no tokenizer, or one that does not know a special token.
    """
    tokenizer = read_json(folder / "tokenizer.json", dict)
    if tokenizer is None:
        raise ValueError(
            f"{text_path} has no tokenizer that can be used, and the placeholder of images is one of its tokens; name "
            "the file of the text part alone to serve texts without images"
        )
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    for token in parts.special_tokens:
        if token not in ids:
            raise ValueError(
                f"{text_path}: tokenizer.ggml.tokens has no special token {token!r}, which stands for images in "
                "prompts: convert the text part again, from a checkpoint whose tokenizer has it, or name its file "
                "alone to serve texts without images"
            )
    return int(ids[parts.special_tokens[0]])
