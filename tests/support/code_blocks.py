"""The code blocks of the README and of the pages in docs, and how Python blocks run.

The blocks of a page run in its order and share their names, among which are all public names of `vllm_mp`. A comment
above a Python block, `<!-- given: llm, prompts -->`, names what the test provides beside these: fixtures, or
`the names of MODULE`. A block that awaits at its top runs in a coroutine. A block that imports an engine's class is a
script: it runs as it is, copied into a file, and shares no names.
"""

import ast
import asyncio
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TIMEOUT_S = 120.0
_FENCE = re.compile(r"( *)```(\w*)")
_GIVEN = re.compile(r" *<!-- given: (.+) -->")
_MODULE = "the names of "
_IMPORT_OF_ENGINE = re.compile(r"^from vllm_mp import .*LLM\b", re.MULTILINE)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page."""

    page: str
    line: int
    """The line of the fence that begins it, from 1."""
    language: str
    text: str
    given: tuple[str, ...]
    """What its comment names."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_script(self) -> bool:
        """The block is a whole program, which a reader can copy into a file and run."""
        return self.language == "python" and _IMPORT_OF_ENGINE.search(self.text) is not None


def blocks_of(page: Path) -> Iterator[CodeBlock]:
    """Yield the code blocks of `page`; raise ValueError for a block without an end."""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        begin = _FENCE.fullmatch(lines[number])
        number += 1
        if begin is None:
            continue
        indent, fence = begin[1], number
        while number < len(lines) and lines[number].strip() != "```":
            number += 1
        name = str(page.relative_to(ROOT))
        if number == len(lines):
            raise ValueError(f"{name}:{fence}: the code block has no end")
        text = "".join(line.removeprefix(indent) + "\n" for line in lines[fence:number])
        given = _GIVEN.fullmatch(lines[fence - 2]) if fence > 1 else None
        yield CodeBlock(name, fence, begin[2], text, tuple(given[1].split(", ")) if given else ())
        number += 1


def compiled(block: CodeBlock, replaced: Callable[[str], str] = str) -> Any:
    """Return the code of a Python block after `replaced`. It has the line numbers of the page."""
    text = "\n" * block.line + replaced(block.text)
    return compile(text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def provided(block: CodeBlock, fixture: Callable[[str], Any]) -> dict[str, Any]:
    """Return the names that the comment of `block` gives."""
    names: dict[str, Any] = {}
    for given in block.given:
        if given.startswith(_MODULE):
            names |= vars(importlib.import_module(given.removeprefix(_MODULE)))
        else:
            names[given] = fixture(given)
    return names


def run_python(code: Any, names: dict[str, Any], runner: asyncio.Runner) -> None:
    """Run the code of a Python block with `names`, to which it adds its own."""
    result = eval(code, names)
    if inspect.iscoroutine(result):
        runner.run(result)


def run_script(block: CodeBlock, folder: Path) -> None:
    """Run the text of a block as a file in `folder`. Raises AssertionError unless it prints a result and no warning."""
    script = folder / "script.py"
    script.write_text(block.text)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{block.place} prints nothing"
    assert not re.search("warn|Traceback", done.stderr, re.IGNORECASE), f"{block.place}\n{done.stderr}"
