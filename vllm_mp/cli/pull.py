"""Fetch a model and convert it if need be, so that a later start finds it ready."""

import argparse

from vllm_mp.model_store.resolve import DEFAULT_MODEL, resolve_model

HELP = "fetch a model, convert it if need be, and print the folder that holds it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help="hub id, .gguf file, or the alias of the default model (%(default)s)",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--hf-token", help="token for the hub")
    parser.add_argument("--download-dir", help="folder for downloads from the hub")


def run(args: argparse.Namespace) -> int:
    folder = resolve_model(args.model, revision=args.revision, hf_token=args.hf_token, download_dir=args.download_dir)
    print(folder)
    return 0
