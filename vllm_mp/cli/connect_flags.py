"""The check of flags that would have no effect on a running core."""

import argparse
import dataclasses
from collections.abc import Mapping

from vllm_mp.engine_args import AsyncEngineArgs


def check_connect(
    args: argparse.Namespace, allowed: tuple[str, ...] = ("tokenizer",), defaults: Mapping[str, object] | None = None
) -> None:
    """Raise ValueError for flags that would be ignored: a core that --connect names already has its options.

    `allowed` are the engine options that concern the client alone. `defaults` holds the defaults of flags that differ
    from those of the options.
    """
    if args.connect is None:
        if args.key_file is not None:
            raise ValueError("--key-file needs --connect ADDRESS; add it, or leave out --key-file")
        return
    for field in dataclasses.fields(AsyncEngineArgs):
        default = (defaults or {}).get(field.name, field.default)
        if field.name not in allowed and getattr(args, field.name) != default:
            raise ValueError(
                f"--{field.name.replace('_', '-')} has no effect on a running core; give it to "
                "`vllm-mp engine`, or leave out --connect"
            )
