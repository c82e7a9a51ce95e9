"""The flag that names a file with further flags."""

import argparse


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, whose file the parser reads (`FlexibleArgumentParser`)."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="Read options from FILE, in YAML: a line `max-model-len: 4096` is the flag of that name. Flags on the "
        "command line replace those of the file. Default: none.",
    )
