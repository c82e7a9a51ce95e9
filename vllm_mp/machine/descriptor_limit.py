"""The limit of files and connections that a process may have open."""

import contextlib
import resource

_MANY = 2**16
"""Limit to ask for if the system sets none."""


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors as far as permitted; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY if hard == resource.RLIM_INFINITY else hard
    if soft not in (wanted, resource.RLIM_INFINITY):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft
