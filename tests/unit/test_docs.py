"""The pages name files, links, commands and tests that exist, and their code blocks are valid."""

import argparse
import ast
import functools
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from support.code_blocks import PAGES, ROOT, CodeBlock, blocks_of, compiled
from support.shell_blocks import NOT_RUN, check_arguments, commands, not_run, words_of

from vllm_mp import cli

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
_FOLDERS = ("vllm_mp", "client", "core", "kernels", "tests", "tools", "docs", "deploy", "examples", ".ci")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`([^`\n]+)`", re.DOTALL)
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, _FOLDERS))})/[\w./-]*[\w/]")
_SUFFIXES = (".py", ".h", ".cpp", ".md", ".svg", ".toml", ".sh")
_OTHER_NAMES = {"llama.cpp", "utils.py"}
"""Words that look like file names: an engine, and an example of a bad name."""
_MAX_GLOSSARY_ROWS = 30
_FUNCTION = re.compile(r"`([\w/]+\.py)`: `([\w.]+)`")
"""A file, and a function or class in it."""
_MAX_LINES_OF_ARCHITECTURE = 200
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_OTHER_FLAGS = {"--build-arg", "--cpus", "--install", "--preload", "--rm", "--unix-socket", "--worker"}
"""Flags of docker, wsl, gunicorn and curl, and of a core that is planned."""
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
"""A file below tests, and a test in it."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of `page`."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _paths(text: str) -> set[str]:
    """Return the paths of the repository that `text` names."""
    return {path.rstrip(".") for path in _PATH.findall(text)}


def _files_in_code(text: str) -> set[str]:
    """Return the words in backticks that look like the name of a file of the repository."""
    words = {word for code in _CODE.findall(text) for word in code.split()}
    return {word for word in words - _OTHER_NAMES if word.endswith(_SUFFIXES) and re.fullmatch(r"[\w./-]+", word)}


@functools.cache
def _definitions(source: Path) -> set[str]:
    """Return the functions and classes of a file; each method as `name` and as `Class.name`."""
    nodes = list(ast.walk(ast.parse(source.read_text())))
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = {f"{node.name}.{child.name}" for node in classes for child in node.body if isinstance(child, named)}
    return methods | {node.name for node in nodes if isinstance(node, named)}


def _faults(find: Callable[[Path], Iterable[object]]) -> list[str]:
    """Return what `find` finds wrong with each page, as lines that begin with the page."""
    return [f"{_name(page)}: {fault}" for page in PAGES for fault in find(page)]


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    def broken_links(page: Path) -> Iterator[str]:
        for link in _LINK.findall(page.read_text()):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                yield link
            elif anchor and anchor not in _anchors(target):
                yield f"{link}, and {_name(target)} has no such heading"

    assert _faults(broken_links) == []


def test_every_path_of_the_repository_that_a_page_names_exists() -> None:
    assert _faults(lambda page: [path for path in _paths(page.read_text()) if not (ROOT / path).exists()]) == []


def test_every_file_name_in_backticks_is_a_file_of_the_repository() -> None:
    names = {path.name for folder in _FOLDERS for path in (ROOT / folder).rglob("*")}
    names |= {path.name for path in ROOT.iterdir()}
    assert (
        _faults(lambda page: [w for w in _files_in_code(page.read_text()) if w.rpartition("/")[2] not in names]) == []
    )


def test_every_function_that_a_page_names_with_its_file_is_defined_there() -> None:
    def missing(page: Path) -> list[tuple[str, str]]:
        named = _FUNCTION.findall(page.read_text())
        return [(path, name) for path, name in named if name not in _definitions(ROOT / path)]

    assert _faults(missing) == []


def test_architecture_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= _MAX_LINES_OF_ARCHITECTURE


def test_glossary_has_at_most_30_words() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.partition("## Glossary")[2].partition("\n## ")[0]
    words = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")][2:]
    assert 0 < len(words) <= _MAX_GLOSSARY_ROWS
    assert len(words) == len(set(words))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=_name)
def test_code_blocks_are_valid_in_their_languages(page: Path) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        assert block.language in _CHECKS, f"{block.place}: use one of {', '.join(_CHECKS)}"
        _CHECKS[block.language](block)
    # With an `if` around each block, a block that is cut off does not go on in the next one.
    shell = "".join(f"if true; then :\n{block.text}\nfi\n" for block in blocks if block.language == "bash")
    done = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _check_flags(block: CodeBlock) -> None:
    """Check the flags of a shell block as far as they are of this repository."""
    for command in commands(block):
        words = words_of(command)
        if words[0].endswith("vllm-mp"):
            check_arguments(words[1:])
        for word in words:
            tool = ROOT / word
            if word.startswith("tools/") and tool.is_file() and tool.name != "test":
                flags = {flag.partition("=")[0] for flag in words if flag.startswith("--")}
                unknown = [flag for flag in sorted(flags) if flag not in _source_of(tool)]
                assert not unknown, f"{block.place}: {word} has no such flags"


_CHECKS: dict[str, Callable[[CodeBlock], object]] = {
    "bash": _check_flags,
    "json": lambda block: json.loads(block.text),
    "python": compiled,
    "text": lambda block: block.text,
    "toml": lambda block: tomllib.loads(block.text),
    "yaml": lambda block: yaml.safe_load(block.text),
}
"""The languages of code blocks, and what raises an error for a block that is not valid."""


@functools.cache
def _source_of(tool: Path) -> str:
    """Return the text of a tool and of the modules that only tools and tests use, where its flags may be."""
    modules = (ROOT / "vllm_mp/testing").rglob("*.py")
    return "\n".join(path.read_text() for path in (tool, *modules))


def test_every_flag_in_backticks_is_one_of_a_command_or_a_tool() -> None:
    known = _known_flags()

    def unknown(page: Path) -> set[str]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        return {flag for code in re.findall(r"`([^`]+)`", text) for flag in _FLAG.findall(code)} - known

    assert _faults(unknown) == []


def _known_flags() -> set[str]:
    """Return the flags of all commands, and those that the text of a tool has."""
    flags = set(_OTHER_FLAGS)
    parsers = [cli.parser()]
    for parser in parsers:
        parser.load()
        for action in parser._actions:
            flags.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    for tool in (ROOT / "tools").rglob("*"):
        if tool.is_file() and tool.suffix != ".pyc":
            flags.update(_FLAG.findall(_source_of(tool)))
    return flags


def test_commands_that_no_test_runs_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    places: dict[str, list[str]] = {begin: [] for begin in NOT_RUN}
    for block in BLOCKS:
        for command in commands(block) if block.language == "bash" else []:
            if (begin := not_run(command)) is not None:
                places[begin].append(block.place)
    assert [begin for begin, found in places.items() if not found] == [], "no page has these commands"
    with capsys.disabled():
        for begin, found in places.items():
            print(f"\nnot run: {begin} ({NOT_RUN[begin]}): {', '.join(dict.fromkeys(found))}", end="")


def test_every_test_that_a_page_names_with_its_function_exists() -> None:
    def missing(page: Path) -> list[str]:
        named = _TEST.findall(page.read_text())
        return [f"{path}::{name}" for path, name in named if name not in _test_functions(path)]

    assert _faults(missing) == []


def _test_functions(path: str) -> set[str]:
    source = ROOT / "tests" / path
    return _definitions(source) if source.is_file() else set()


def test_every_line_about_vllm_has_a_test_or_a_reason() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/using/from_vllm.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert len(rows) > 100
    for first, *rest in rows:
        assert rest[-1] or rest[0].startswith("not served"), f"{first} has no test"


def test_every_page_in_docs_is_reachable_from_the_readme() -> None:
    reached, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in reached:
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in _LINK.findall(page.read_text()) if "://" not in link]
        queue += [(page.parent / path).resolve() for path in links if path.endswith(".md")]
    assert sorted(map(_name, set(PAGES) - reached)) == []


def test_navigation_of_the_site_has_every_page() -> None:
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(listed) == sorted([*pages, "CONTRIBUTING.md"]), "list the pages under nav in mkdocs.yml"


def test_every_page_that_code_names_exists() -> None:
    files = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    sources = [path for path in files if path.suffix in (".py", ".h", ".cpp") or path.parent.name in ("tools", ".ci")]
    wrong = [
        f"{_name(source)}: {page}"
        for source in sources
        for page in re.findall(r"(?<![\w/.])docs/[\w/.-]+\.(?:md|json|svg)", source.read_text())
        if not (ROOT / page).exists()
    ]
    assert wrong == []
