"""What a template process and its parent tell each other, over a socket that keeps the borders of messages.

The template first sends `TemplateReady` or `ForkRefusal`. The answer to a `ForkRequest` is `Forked` from the new
process, or `ForkRefusal` from the template.
"""

from typing import Final, TypeAlias

import msgspec

MAX_BYTES: Final = 65_536
"""The maximum size of a message."""
MAX_DESCRIPTORS: Final = 250
"""The maximum number of descriptors that come with a request; Linux passes 253 at a time."""


class ForkRequest(msgspec.Struct, kw_only=True):
    """A core process to fork.

    With the request come the descriptors of its working folder, of its standard input, output and error, and then of
    `inherited`.
    """

    arguments: list[str]
    """Those of `python -m vllm_mp.core`."""
    environment: dict[str, str | None]
    """Variables that have another value than in the template; None: they are not set."""
    inherited: list[int]
    """The numbers that the further descriptors must have in the new process."""


class TemplateReady(msgspec.Struct, kw_only=True, tag=True):
    """The template has imported everything and waits for requests."""

    pid: int
    """Process id of the template."""


class Forked(msgspec.Struct, kw_only=True, tag=True):
    """The answer to a request: the new process, which is a child of the sender of the request."""

    pid: int


class ForkRefusal(msgspec.Struct, kw_only=True, tag=True):
    """The template cannot fork; instead of `TemplateReady` it says that the template ends."""

    reason: str


FromTemplate: TypeAlias = TemplateReady | Forked | ForkRefusal
