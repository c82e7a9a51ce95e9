"""The flag that chooses a LoRA adapter."""

import argparse
import os
from pathlib import Path

from vllm_mp.requests.lora_request import LoRARequest, parse_adapter


def add_lora_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora",
        metavar="NAME=FOLDER",
        help="Answer with this LoRA adapter, in a folder that PEFT has saved. Default: none.",
    )


def chosen_adapter(args: argparse.Namespace) -> LoRARequest | None:
    """Return the adapter of --lora, for which LoRA is enabled in `args`.

    Raises ValueError if it is not NAME=FOLDER, or if a core that is to be started will find no adapter in the folder.
    """
    if args.lora is None:
        return None
    args.enable_lora = True
    adapter = parse_adapter(args.lora, 1 + len(args.lora_modules or ()), "--lora")
    if args.connect is None and not (Path(os.path.expanduser(adapter.path)) / "adapter_config.json").is_file():
        raise ValueError(
            f"--lora: {adapter.path} has no adapter_config.json; give the folder that PEFT's save_pretrained wrote"
        )
    return adapter
