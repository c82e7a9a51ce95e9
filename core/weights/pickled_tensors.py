"""Read the tensors of a `.bin` file, a pickle by torch, without running any code that is in it."""

import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors in `path` by name, mapped from the file if it has the form that torch writes since 1.6.

    Raises ValueError, naming the file, the cause and the remedy, if it is damaged or holds anything but tensors.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).strip() or type(error).__name__
        if type(error).__name__ != "UnpicklingError":
            raise ValueError(f"{path} is damaged or incomplete ({reason.splitlines()[0]}); download it again") from None
        named = re.search(r"GLOBAL ([\w.]+)", reason)
        raise ValueError(
            f"{path} is not loaded: it is damaged, or a pickle of more than tensors"
            + (f" ({named[1]})" if named else "")
            + ", which could run code. Use a model with safetensors; if you trust the file, convert it with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not a dict of tensors; use a model with safetensors"
        )
    for name, value in content.items():
        if not (
            isinstance(name, str)
            and isinstance(value, Tensor)
            and value.layout is torch.strided
            and value.device.type == "cpu"
        ):
            raise ValueError(
                f"{path} holds {name!r:.100} of {type(value).__name__}, where only plain tensors with a name are "
                "loaded; use a model with safetensors"
            )
    return {name: value.detach() for name, value in content.items()}  # a value may be a parameter
