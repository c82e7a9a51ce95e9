"""The death of a shared core, of which its successor knows more than its clients saw."""

from typing import NamedTuple, Self

from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.cores.recovery.suspects import Entry
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.outputs.stream import RequestStream


class UnexplainedDeath(NamedTuple):
    """A death as one client saw it, and the requests that the core had of this client."""

    death: Death
    had: list[tuple[Entry, int]]
    """Each request, and the number of its tokens at that time."""

    @classmethod
    def of(cls, death: Death, live: list[Entry]) -> Self:
        """Return the record of a `death` of a core with the requests `live`."""
        return cls(death, [(entry, entry[1].num_tokens) for entry in live])

    def may_be_due_to(self, stream: RequestStream) -> bool:
        """Return whether `stream` may have been in the step, and so may have caused the death."""
        in_step = self.death.in_step
        return not self.death.is_step_known or any(awaited.slot in in_step for awaited in stream.awaited)

    def explained_by(self, old: Core, new: Core) -> Death:
        """Return the death of `old` with what its successor `new` says of it, if that knows of this death."""
        last = new.welcome.last_death
        if last is None or last.incarnation != old.connection.incarnation:
            return self.death
        return self.death._replace(
            cause=last.cause,
            in_step=dict(last.in_step),
            num_in_step=last.num_in_step,
            is_from_outside=last.is_from_outside,
            kind=last.kind,
            is_step_known=True,
            incarnation=last.incarnation,
            calls=tuple(last.calls),
        )

    def live(self) -> list[Entry]:
        """Return the requests that have not ended, and that no other core has got beyond the step."""
        return [
            (stream, awaited)
            for (stream, awaited), num_tokens in self.had
            if not stream.is_over and awaited.finish is None and awaited.num_tokens <= num_tokens
        ]
