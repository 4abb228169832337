"""Chromium for the page, and the checks of every page test."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--no-first-run", "--disable-dev-shm-usage"),
)
PATIENCE_MS = 30_000
HEIGHTS = {360: 740, 900: 900, 1600: 1000}
"""Window heights by width: a phone, half a screen, a full screen."""
AXE = Path(__file__).parents[1] / "page" / "node_modules" / "axe-core" / "axe.min.js"

expect.set_options(timeout=PATIENCE_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's browser; skips the test without a browser."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*SWITCHES])
        yield browser
        browser.close()


@contextlib.contextmanager
def window(
    browser: Browser, width: int = 900, scheme: Any = "light", *, is_touch: bool = False
) -> Iterator[Page]:
    """A window with its own storage, on a phone if `is_touch`. At its end: the console has only
    messages of failed requests, no script has failed, and no request went to another host."""
    size: Any = {"width": width, "height": HEIGHTS[width]}
    context = browser.new_context(
        viewport=size, color_scheme=scheme, has_touch=is_touch, is_mobile=is_touch
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert [text for text in said if not text.startswith("Failed to load resource")] == []
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "data:"))] == []


def open_page(page: Page, url: str, status: str = "ready") -> None:
    """Load the page and wait for the server's state."""
    page.goto(f"{url}/")
    expect(page.locator("#status")).to_have_text(status)


def send(page: Page, text: str) -> None:
    """Type a message and press Enter."""
    page.fill("#question", text)
    page.press("#question", "Enter")


def ask(page: Page, text: str) -> None:
    """Send a message and wait for its answer or its failure."""
    send(page, text)
    expect(page.locator("#send")).to_have_text("Send")


def check(page: Page, state: str) -> None:
    """Assert that axe finds no violation, no element is wider than the window, and the view fills
    the window's height."""
    found = page.evaluate(
        """async () => {
            const found = await axe.run(document, { resultTypes: ["violations"] });
            return found.violations.map(({ id, nodes }) => [id, nodes.map((node) => node.html)]);
        }"""
    )
    assert found == [], f"{state}: {json.dumps(found, indent=1)}"
    wide, high = page.evaluate(
        """() => {
            const { scrollWidth, scrollHeight } = document.documentElement;
            return [scrollWidth - innerWidth, scrollHeight - innerHeight];
        }"""
    )
    assert (wide, high) == (0, 0), f"{state}: the page is larger than the window"


def load_axe(page: Page) -> None:
    """Load axe for `check` into this page, until the page is reloaded."""
    page.evaluate(AXE.read_text())
