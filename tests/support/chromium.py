"""Headless Chromium through Playwright, which only `tools/setup-venv test-all` installs."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextlib.contextmanager
def running_chromium() -> Iterator["Browser"]:
    """Run Chromium; skip the test if it is not installed."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; tools/install-chromium installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


def expect(locator: "Locator") -> Any:
    """Return Playwright's assertions about what `locator` finds, which wait until they hold."""
    from playwright.sync_api import expect as assertions_about

    return assertions_about(locator)
