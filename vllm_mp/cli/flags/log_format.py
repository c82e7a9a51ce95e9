"""The flag that chooses the form of the log."""

import argparse

from vllm_mp.machine.log_setup import FORMAT_VARIABLE, FORMATS


def add_log_format_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--log-format`, which the start of each command reads."""
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        help="Write the log of all processes as lines of text, or as a JSON object on each line. Default: "
        f"{FORMAT_VARIABLE}, or text.",
    )
