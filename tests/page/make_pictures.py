"""Makes the screenshots of docs/page.md, from a server with scripted answers: `make
page-pictures`. docs/page-pictures.json has the line that the page shows about the server."""

import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
from page_browser import chromium, expect, open_page, send
from page_replies import MARKDOWN, THINKS
from page_rig import STATS, PageServer, serving
from playwright.sync_api import Browser, Page

DOCS = Path(__file__).parents[2] / "docs"
DESK, PHONE, VIEW = (1200, 960), (390, 780), (1200, 905)
"""Window sizes. In `DESK`, question and answer fit without scrolling; `VIEW` is the server view's,
and ends above its tables."""
FACTS = DOCS / "page-pictures.json"
POLL_MS = 2000
POLLS = 145
"""Polls of the picture's course of output tokens, nearly five minutes."""
UPTIME_S = 9_000
"""Longer than the course and than the longest of the recent requests."""
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


def fill(server: PageServer) -> None:
    """Add the figures of a server that has worked for `UPTIME_S`, on a device with buckets and
    graphs."""
    server.fill()
    ready = server.client.ready
    assert ready is not None
    server.client.ready = msgspec.structs.replace(ready, device="hpu-emulator", dtype="bfloat16")

    def put() -> None:
        server.rig.state.created = int(time.time()) - UPTIME_S
        # The page shows the number of open requests only.
        requests: Any = range(STATS.running + STATS.waiting)
        server.rig.state.active_requests.update(requests)

    server.call(put)


def worked(browser: Browser, server: PageServer) -> Page:
    """A new window with the view of a server that has written tokens for some minutes."""
    page = browser.new_page(viewport={"width": VIEW[0], "height": VIEW[1]}, color_scheme="light")
    page.clock.install(time=0)
    open_page(page, server.url)
    page.clock.pause_at(60_000)
    page.click("#to-server")
    decoded = STATS.useful_tokens["decode"]
    for step in range(POLLS):
        decoded += round(960 + 320 * math.sin(step / 9) + 120 * math.sin(1.7 * step))
        prefilled = STATS.useful_tokens["prefill"] + 3_100 * step
        tokens = {"prefill": prefilled, "decode": decoded}
        server.client.stats = msgspec.structs.replace(STATS, useful_tokens=tokens)
        page.clock.run_for(POLL_MS)
        computed = sum(tokens.values()) + sum(STATS.padding_tokens.values())
        # The clock stands still until the page has drawn the answer.
        expect(page.locator("#padded")).to_have_text(f"of {computed:,} computed tokens")
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
            shown = page.locator("#facts").inner_text()
            FACTS.write_text(json.dumps({"shown": shown}) + "\n", encoding="utf-8")
            phone = opened(browser, server.url, PHONE, "dark")
            phone.screenshot(path=DOCS / "page-phone.png")
            fill(server)
            worked(browser, server).screenshot(path=DOCS / "page-server.png")


if __name__ == "__main__":
    main()
