"""The flags that the benchmarks share."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vllm_mp.machine.file_owner import write_output


def positive_integer(text: str) -> int:
    """Return a flag's value as an integer of at least 1.

    Raises ArgumentTypeError for another value; argparse prints it with the flag's name and exits with code 2.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it must be an integer of at least 1, got {text!r}")
    return int(text)


def check_lengths(input_len: int, output_len: int, max_model_len: int) -> None:
    """Raise ValueError, naming the flags, if a request of the longest prompt and completion exceeds `max_model_len`."""
    if input_len + output_len > max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} are {input_len + output_len} tokens together, more "
            f"than max_model_len={max_model_len}; lower one of them, or raise --max-model-len if the model allows it"
        )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`, for `write_json`."""
    parser.add_argument(
        "--json",
        type=_writable_file,
        metavar="FILE",
        help="Write the figures to FILE, as JSON. Default: they are only printed.",
    )


def write_json(file: Path | None, report: dict[str, Any]) -> None:
    """Write `report` to `file`, unless the flag was not given."""
    if file is not None:
        write_output(file, json.dumps(report, indent=2) + "\n")


def _writable_file(text: str) -> Path:
    """Return a flag's value as the path of a file that can be written, before a benchmark takes its time.

    Raises ArgumentTypeError, which argparse prints with the flag's name, for another value.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"it must be a file, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; choose a file in a folder of yours")
    return path
