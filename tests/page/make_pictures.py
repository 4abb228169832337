"""Makes the screenshots of docs/page.md, from a server with scripted answers: `make
page-pictures`."""

from pathlib import Path

from page_browser import chromium, expect, open_page, send
from page_replies import MARKDOWN, THINKS
from page_rig import serving
from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[2] / "docs"
DESK, PHONE = (1200, 880), (390, 780)
QUESTION = "Write a Python function that reverses a string, with a test."


def opened(browser: Browser, url: str, size: tuple[int, int], scheme: str) -> Page:
    """A new window with the page, in which a question was asked."""
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    open_page(page, url)
    send(page, QUESTION)
    expect(page.locator(".foot .retry")).to_be_visible()
    return page


def main() -> None:
    """Write the screenshots to docs/."""
    # A script writes the answer, so the name must not belong to a real model.
    names = ("your-model",)
    with serving(context=8192, reasoning_parser="qwen3", served_model_names=names) as server:
        server.answer(THINKS + MARKDOWN, pace_s=0.03)
        with chromium() as browser:
            page = opened(browser, server.url, DESK, "light")
            page.screenshot(path=DOCS / "page.png")
            phone = opened(browser, server.url, PHONE, "dark")
            phone.screenshot(path=DOCS / "page-phone.png")
            server.fill()
            page.click("#to-server")
            expect(page.locator("#running")).to_have_text("3")
            page.screenshot(path=DOCS / "page-server.png")


if __name__ == "__main__":
    main()
