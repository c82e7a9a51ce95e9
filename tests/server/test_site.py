"""The documentation as a site: it builds without a warning, and opens in a browser without a server or a network."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.chromium import expect

import vllm_mp

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as tools/build-docs builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(
        [*command, "--site-dir", str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.with_name("index.html") if path.name == "README.html" else path for path in pages}
    assert {path for path in pages if not (site / path).is_file()} == set()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = (site / "api/python.html").read_text()
    assert [name for name in vllm_mp.__all__ if f'id="vllm_mp.{name}"' not in text] == []


def test_no_page_fetches_anything_but_files_of_the_site(site: Path, browser: "Browser") -> None:
    page = browser.new_page()
    foreign: list[str] = []
    here = site.as_uri()
    page.on("request", lambda request: None if request.url.startswith((here, "data:")) else foreign.append(request.url))
    # 404.html has addresses from the root of a server, because a server shows it at any path.
    for path in sorted({*site.rglob("*.html")} - {site / "404.html"}):
        page.goto(path.as_uri())
        page.wait_for_load_state()
        assert page.locator("h1").first.is_visible(), path
    assert foreign == []


def test_search_finds_pages_without_a_server(site: Path, browser: "Browser") -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("takeover")
    found = page.locator(".md-search-result__item", has_text="Recovery")
    expect(found.first).to_be_visible(timeout=30_000)
