"""The report of a campaign: what was sent, what came back, which promises were broken."""

import dataclasses
from collections import Counter
from collections.abc import Iterator


@dataclasses.dataclass
class CampaignReport:
    """What was sent, what came back, and which promises were broken."""

    sent: Counter[str] = dataclasses.field(default_factory=Counter)
    """Messages by kind."""
    answers: Counter[str] = dataclasses.field(default_factory=Counter)
    """Reactions of the attacked side by kind."""
    breaches: list[str] = dataclasses.field(default_factory=list)
    before: dict[str, int] = dataclasses.field(default_factory=dict)
    """Resources that the attacked side held after warming up."""
    after: dict[str, int] = dataclasses.field(default_factory=dict)
    """Resources that the attacked side holds at the end."""
    calm_answers: int = 0
    """Completions of well-behaved requests."""
    seconds: float = 0.0

    @property
    def num_sent(self) -> int:
        return self.sent.total()

    def lines(self) -> Iterator[str]:
        """Yield the lines of a readable table."""
        for title, counts in (("sent", self.sent), ("answered", self.answers)):
            for name, count in counts.most_common():
                yield f"{title:>9}  {name:<44} {count:>14,}"
        for name, before in self.before.items():
            yield f"{'held':>9}  {name:<44} {before:>14,} -> {self.after.get(name, 0):,}"
        rate = self.num_sent / max(self.seconds, 1e-9)
        yield (
            f"{self.num_sent:,} messages in {self.seconds:.0f} s ({rate:,.0f}/s), "
            f"{self.calm_answers:,} calm completions"
        )
        for breach in self.breaches[:20]:
            yield f"BREACH: {breach:.1000}"
        yield "passed" if not self.breaches else f"FAILED: {len(self.breaches)} breaches"
