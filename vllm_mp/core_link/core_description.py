"""What a core says of itself on its status page, for commands that list the cores of this machine."""

import msgspec


class CoreDescription(msgspec.Struct, kw_only=True, frozen=True):
    """What does not change while a core lives."""

    model: str
    """The name under which the model is served."""
    folders: list[str]
    """The folders whose files the core reads: model, tokenizer."""
    address: str
    """The address at which clients connect; empty: the core serves its parent alone."""
    parent_pid: int
    num_restarts: int
    """Restarts by the parent before this core."""
    started: float
    """In seconds of `time.time()`."""
