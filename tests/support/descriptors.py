"""A shortage of file descriptors in the process of a test."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Let this process open nothing in the block; what is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
