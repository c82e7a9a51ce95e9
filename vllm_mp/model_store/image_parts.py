"""What an mmproj file puts into a model folder: the settings of the image processor, and the placeholder."""

import json
import re
from pathlib import Path
from typing import Any, Final

from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_store.gguf_file.mmproj import Mmproj
from vllm_mp.model_store.tokenizer_files import PROCESSOR_FILES

_TOKENIZER_FILE: Final = "tokenizer.json"
_UNKNOWN: Final = "<unk>"
"""The token for characters that have none."""
_RESERVED: Final = re.compile(r"<\|reserved_special_token_\d+\|>|<unused\d+>")
"""The names of tokens that models of Llama 3 and Gemma 3 do not use."""


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


def image_token_ids(folder: Path, parts: Mmproj, text_path: Path) -> dict[str, int]:
    """Return the fields of config.json with the tokens of `parts`, in the tokenizer made of the file `text_path`.

    Most files of LLaVA and Gemma 3 have no image token. Then it takes the place of a spare one, and the tokenizer in
    `folder` is changed. Raises ValueError, naming the token, if `folder` has no tokenizer, or one that lacks a special
    token.
    """
    tokenizer = read_json(folder / _TOKENIZER_FILE, dict)
    if tokenizer is None:
        raise ValueError(
            f"{text_path} has no tokenizer that can be used, and the placeholder of images is one of its tokens; name "
            "the file of the text part alone to serve texts without images"
        )
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    image_token = next(iter(parts.token_fields.values()))
    if image_token not in ids and not parts.other_tokens and (spare := _spare_token(ids, tokenizer["model"])):
        _rename(folder, tokenizer, spare, image_token)
        ids[image_token] = ids.pop(spare)
    for token in (*parts.token_fields.values(), *parts.other_tokens):
        if token not in ids:
            raise ValueError(
                f"{text_path}: tokenizer.ggml.tokens has no special token {token!r}, which stands for images in "
                "prompts: convert the text part again, from a checkpoint whose tokenizer has it, or name its file "
                "alone to serve texts without images"
            )
    return {field: int(ids[token]) for field, token in parts.token_fields.items()}


def _spare_token(ids: dict[str, int], model: dict[str, Any]) -> str | None:
    """Return a special token that no text needs; None if there is none.

    It is the last reserved one, as Llama 3 and Gemma 3 have them, or the unknown token if characters that have no token
    are bytes.
    """
    reserved = [token for token in ids if _RESERVED.fullmatch(token)]
    if reserved:
        return max(reserved, key=ids.__getitem__)
    has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return _UNKNOWN if _UNKNOWN in ids and has_bytes else None


def _rename(folder: Path, tokenizer: dict[str, Any], token: str, name: str) -> None:
    """Write the tokenizer to `folder` with the name `name` for `token`, which becomes a special token."""
    for added in tokenizer["added_tokens"]:
        if added["content"] == token:
            added |= {"content": name, "special": True, "normalized": False}
    model = tokenizer["model"]
    model["vocab"] = {name if text == token else text: number for text, number in model["vocab"].items()}
    if model.get("unk_token") == token:
        model["unk_token"] = name
    (folder / _TOKENIZER_FILE).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for settings_file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read_json(folder / settings_file, dict)
        if settings is not None:
            settings = {key: name if value == token else value for key, value in settings.items()}
            (folder / settings_file).write_text(json.dumps(settings, indent=2))
