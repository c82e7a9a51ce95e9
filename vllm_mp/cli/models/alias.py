"""The command `alias`: give a model folder or a GGUF file a name of its own."""

import argparse
import os
from pathlib import Path

USAGE = "NAME PATH"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help="Let commands, servers and programs find the model by this name, in any case. A name that you have given "
        "before is changed; `vllm-mp rm NAME` removes it. Required.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="Name this folder in Hugging Face's layout, or this .gguf file. Required."
    )


def run(args: argparse.Namespace) -> int:
    """Give the name and return 0. Raises ValueError for a name or a path that cannot be used."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from vllm_mp.model_store import cache_root
    from vllm_mp.model_store.entries import cache_entries
    from vllm_mp.model_store.own_names import give_name
    from vllm_mp.model_store.resolve import local_model

    path = Path(os.path.expanduser(args.path)).absolute()
    if local_model(args.path, path) is None:
        raise ValueError(f"{args.path!r} is neither a file nor a folder; correct the path")
    for entry in cache_entries(cache_root(), Path(HF_HUB_CACHE)):
        if entry.name.lower() == args.name.lower() and entry.target is None:
            raise ValueError(f"{args.name!r} is the name of a model in the cache; choose another name")
    give_name(args.name, path)
    print(f"{args.name.lower()} stands for {path}")
    return 0
