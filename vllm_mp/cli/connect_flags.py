"""The check of flags that would have no effect on a running core."""

import argparse
import dataclasses

from vllm_mp.engine_args import AsyncEngineArgs


def flag_of(option: str) -> str:
    """Return the flag of an option."""
    return f"--{option.replace('_', '-')}"


def check_connect(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that would be ignored: a core that --connect names already has its options."""
    if args.connect is None:
        for option in ("key_file", "core_owner"):
            if getattr(args, option) is not None:
                raise ValueError(f"{flag_of(option)} needs --connect ADDRESS; add it, or leave out {flag_of(option)}")
        return
    for field in dataclasses.fields(AsyncEngineArgs):
        # A flag that may be repeated is None if it is not given.
        if field.name not in AsyncEngineArgs.CLIENT_OPTIONS and getattr(args, field.name) not in (None, field.default):
            raise ValueError(
                f"{flag_of(field.name)} has no effect on a running core; give it to "
                "`vllm-mp engine`, or leave out --connect"
            )
