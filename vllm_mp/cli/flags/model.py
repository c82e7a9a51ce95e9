"""The model as an argument of a command, instead of the flag --model."""

import argparse
import os
import re

from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.model_store import PACKAGED_MODELS
from vllm_mp.model_store.own_names import own_names

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def names_model(word: str) -> bool:
    """Return whether `word` is an alias, a name that the user has given, or is, or looks like, a model's place.

    A place is a .gguf file, a folder with config.json, or a hub id of the form ORGANISATION/NAME.
    """
    return (
        word.lower() in PACKAGED_MODELS
        or word.lower() in own_names()
        or (word.lower().endswith(".gguf") and os.path.isfile(os.path.expanduser(word)))
        or os.path.isfile(os.path.join(os.path.expanduser(word), "config.json"))
        or _HUB_ID.fullmatch(word) is not None
    )


def set_model(args: argparse.Namespace, model: str | None) -> None:
    """Let `args.model` be the model that was given as an argument, if one was.

    Raises ValueError if --model names another model.
    """
    if model is None:
        return
    if args.model not in (AsyncEngineArgs.model, model):
        raise ValueError(f"two models are given: {model} and --model {args.model}; leave out one of them")
    args.model = model
