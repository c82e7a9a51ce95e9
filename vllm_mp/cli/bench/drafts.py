"""What an engine has drafted while it was measured."""

from typing import Any


async def read_drafts(llm: Any) -> dict[str, Any]:
    """Return the counters of drafts of `llm`, an `AsyncLLM`; {} without speculation."""
    status = await llm.core_status()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    return {name: status[name] for name in names if name in status}


def print_drafts(figures: dict[str, Any]) -> None:
    """Print what `read_drafts` has returned."""
    if not figures:
        return
    drafted, accepted = figures["num_draft_tokens"], figures["num_accepted_tokens"]
    share = f" ({100 * accepted / drafted:.0f} %)" if drafted else ""
    by_position = " ".join(f"{count:,}" for count in figures["num_accepted_tokens_per_pos"])
    print(f"drafts: {drafted:,} tokens, {accepted:,} accepted{share}; by position {by_position}")
