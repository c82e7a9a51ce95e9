"""What the commands that list things print: tables, sizes and times."""

import shutil
import sys
from collections.abc import Sequence


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the columns below their names, each as wide as its longest cell.

    On a terminal that is too narrow for that, print each row as a block with a line for each cell.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if sys.stdout.isatty() and sum(widths) + 2 * (len(widths) - 1) > shutil.get_terminal_size().columns:
        width = max(map(len, head))
        blocks = ["\n".join(f"{name:<{width}}  {cell}" for name, cell in zip(head, row, strict=True)) for row in rows]
        print("\n\n".join(blocks))
        return
    for row in (head, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def size_text(num_bytes: int) -> str:
    """Return a size for people, such as "516 MiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" and size < 10 else f"{size:.0f} {unit}"


def duration_text(seconds: float) -> str:
    """Return a time span for people, in its largest unit that is below it, such as "3 hours"."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}{'' if seconds < 2 * length else 's'}"
    return f"{seconds:.0f} s"
