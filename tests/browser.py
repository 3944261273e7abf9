"""A real browser for tests: Debian's chromium through Playwright, with its pictures kept outside the repository."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 60_000
"""Milliseconds that the browser waits for something to appear."""
SCREENSHOTS = Path(os.environ.get("ROLLOUTS_SCREENSHOTS") or Path(tempfile.gettempdir()) / "rollouts-screenshots")

expect.set_options(timeout=PATIENCE)

Scheme = Literal["light", "dark"]


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Skips where there is no chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


def open_page(browser: Browser, url: str, scheme: Scheme = "light", width: int = 1300, height: int = 900) -> Page:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    return page


def keep(page: Page, name: str, whole: bool = True) -> None:
    """Keep a picture of the page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole)
