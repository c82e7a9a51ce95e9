"""A hook of MkDocs (mkdocs.yml): what the site has that the pages in docs do not hold.

The pages in docs/api have markers, which are replaced by what the code says about itself. CONTRIBUTING.md becomes a
page. A page that loads anything from another host is a warning, which fails the build.
"""

import argparse
import ast
import dataclasses
import functools
import html
import importlib
import inspect
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import vllm_mp
from vllm_mp import cli
from vllm_mp.config.engine_args import AsyncEngineArgs

logger = logging.getLogger("mkdocs.hooks.site_pages")

_CONTRIBUTING = "CONTRIBUTING.md"
_FIRST_HEADING = "model"
"""The heading of the first engine options in the help of a command."""
_MARKER = re.compile(r"^<!-- (names|options|commands|modules)(?:: ([\w ,]+))? -->$", re.MULTILINE)
_LOADED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object)\b[^>]*?\b(?:src|href|data)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
"""What a browser fetches by itself, at another host."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add CONTRIBUTING.md, which lies above docs, as a page."""
    text = (Path(config.config_file_path).parent / _CONTRIBUTING).read_text()
    files.append(File.generated(config, _CONTRIBUTING, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill the markers of a page, and lead its links to CONTRIBUTING.md to the page of the site."""
    markdown = re.sub(rf"\]\(\.\./((?:\.\./)*{_CONTRIBUTING})", r"](\1", markdown)
    listed = {name for _, names in _MARKER.findall(markdown) for name in names.replace(",", " ").split()}
    return _MARKER.sub(lambda marker: _filled(marker[1], marker[2], listed), markdown)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Warn of everything that a browser would fetch from another host to show the page."""
    for address in _LOADED.findall(output):
        logger.warning("%s loads %s", page.file.src_uri, address)
    return output


def _filled(kind: str, names: str | None, listed: set[str]) -> str:
    """Return what the marker `kind` stands for; `listed` are the public names that the page lists in other markers."""
    if kind == "options":
        return _options()
    if kind == "commands":
        benchmarks = (_command(f"bench {name}", f"bench.{name}", text) for name, text in cli.BENCHMARKS.items())
        return "\n".join((*(_command(name, name, text) for name, text in cli.COMMANDS.items()), *benchmarks))
    if kind == "modules":
        return _modules()
    chosen = names.replace(",", " ").split() if names else sorted({*vllm_mp.__all__} - listed)
    if unknown := {*chosen} - {*vllm_mp.__all__}:
        logger.warning("docs/api/python.md lists %s, which vllm_mp does not export", ", ".join(sorted(unknown)))
    return "\n\n".join(f"::: vllm_mp.{name}" for name in chosen)


def _modules() -> str:
    """Return a section for each folder of the product, with the first line of each module."""
    root, sections = Path(vllm_mp.__file__).resolve().parents[1], []
    for top in ("vllm_mp", "client", "core", "kernels"):
        folders = [root / top, *sorted(path for path in (root / top).rglob("*") if path.is_dir())]
        for folder in folders:
            if folder.is_symlink() or not (folder / "__init__.py").exists() or folder.name == "testing":
                continue
            lines = [f"## {folder.relative_to(root)}", "", _first_line(folder / "__init__.py"), ""]
            names = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            sections.append("\n".join([*lines, *(f"- `{path.name}`: {_first_line(path)}" for path in names)]))
    return "\n\n".join(sections)


def _first_line(module: Path) -> str:
    """Return the first line of the docstring of a module."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return text.partition("\n")[0]


def _options() -> str:
    """Return a table of the engine's options."""
    rows = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(AsyncEngineArgs):
        meaning = html.escape(field.metadata["help"], quote=False).replace("|", "&#124;")
        if reason := field.metadata["without_effect"]:
            meaning += f" (without effect: {reason})"
        if choices := field.metadata["choices"]:
            meaning += f" ({', '.join(f'`{choice}`' for choice in choices)})"
        kind = inspect.formatannotation(field.type)
        rows.append(f"| `{field.name}` | `{kind}` | `{field.default!r}` | {meaning} |")
    return "\n".join(rows)


def _command(name: str, module_name: str, summary: str) -> str:
    """Return a section with `summary` and the help of a command, without the options of the engine."""
    module = importlib.import_module(cli.module_of(module_name))
    formatter = functools.partial(argparse.HelpFormatter, width=100)
    parser = argparse.ArgumentParser(f"vllm-mp {name}", f"vllm-mp {name} {module.USAGE}", formatter_class=formatter)
    module.add_arguments(parser)
    text, heading, _ = parser.format_help().partition(f"\n{_FIRST_HEADING}:\n")
    if heading:
        text += f"\n{AsyncEngineArgs.CLI_GROUP}: each engine option is a flag too\n"
    return f"## vllm-mp {name}\n\n{summary}\n\n```text\n{text}```\n"
