"""The status page at / in a real browser: a chat, and figures that update."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, running
from playwright.sync_api import Page, Route, expect, sync_playwright
from tiny_vision import image_bytes, make_tiny_vision, picture

pytestmark = pytest.mark.clients

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--no-first-run", "--disable-dev-shm-usage"),
)
PATIENCE_MS = 30_000


@pytest.fixture
def page() -> Iterator[Page]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=SWITCHES)
        opened = browser.new_page(viewport={"width": 1200, "height": 900})
        opened.set_default_timeout(PATIENCE_MS)
        yield opened
        browser.close()


def test_a_model_of_text_offers_no_pictures(server: LiveServer, page: Page) -> None:
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("ready", timeout=PATIENCE_MS)

    drop(page, "cat.png", image_bytes(picture(64, 48)))

    assert page.locator("#attach").is_hidden()
    expect(page.locator("#pictures")).to_have_text("This model takes no pictures.")
    assert page.locator("#pictures img").count() == 0


def drop(page: Page, name: str, data: bytes) -> None:
    """Drop a file on the chat, as a hand does."""
    page.evaluate(
        """([name, bytes]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
            const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true });
            document.getElementById("chat").dispatchEvent(event);
        }""",
        [name, list(data)],
    )


def test_pictures_are_chosen_dropped_removed_and_sent(
    pytestconfig: pytest.Config, page: Page, tmp_path: Path
) -> None:
    folder = make_tiny_vision("llava", tmp_path / "llava")
    (tmp_path / "cat.png").write_bytes(image_bytes(picture(64, 48)))
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    flags = ("--dtype=float32", "--max-model-len=512")
    python = pytestconfig.getoption("--server-python")
    with running(str(folder), tmp_path / "log", *flags, python=python) as live:
        page.goto(f"{live.url}/")
        expect(page.locator("#attach")).to_be_visible(timeout=PATIENCE_MS)
        page.set_input_files("#files", [tmp_path / "cat.png", tmp_path / "cat.png"])
        expect(page.locator("#pictures img")).to_have_count(2)
        drop(page, "dog.png", image_bytes(picture(48, 64)))
        expect(page.locator("#pictures img")).to_have_count(3)
        page.locator("#pictures button").first.click()
        expect(page.locator("#pictures img")).to_have_count(2)
        page.fill("#question", "What is it?")
        page.press("#question", "Enter")

        expect(page.locator("#send")).to_have_text("Send", timeout=PATIENCE_MS)
        expect(page.locator(".messages .user img")).to_have_count(2)
        expect(page.locator("#pictures img")).to_have_count(0)
        expect(page.locator("#recent")).to_contain_text("/v1/chat/completions", timeout=PATIENCE_MS)
        assert page.locator(".messages .error").count() == 0
    (body,) = sent
    parts = body["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert all(part["image_url"]["url"].startswith("data:image/png;base64,") for part in parts[:2])
    assert parts[0] != parts[1]
    assert said == []


def test_a_chat_works_and_the_figures_update(
    server: LiveServer, page: Page, tmp_path: Path
) -> None:
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    foreign: list[str] = []
    page.on("request", lambda request: foreign.append(request.url))
    # As many requests as the page shows, so that all bars are visible.
    for _ in range(100):
        asked = {"prompt": "a", "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=30).raise_for_status()
    page.goto(f"{server.url}/")
    expect(page.locator("#status")).to_have_text("ready", timeout=PATIENCE_MS)

    page.fill("#question", "Tell me a long story about the sea.")
    page.press("#question", "Enter")

    answer = page.locator(".messages div:not(.user)")
    expect(answer).to_have_text(re.compile(r"\w+ \w+"), timeout=PATIENCE_MS)
    if page.locator("#send").inner_text() == "Stop":
        page.click("#send")
    expect(page.locator("#send")).to_have_text("Send", timeout=PATIENCE_MS)
    expect(page.locator("#recent")).to_contain_text("/v1/chat/completions", timeout=PATIENCE_MS)
    expect(page.locator("#hits")).to_have_text(re.compile(r"\d %"))
    assert page.locator("#decode td[data-share]").count() > 0
    assert page.locator("#prefill td[data-share]").first.get_attribute("title")
    assert page.locator("#bars span").count() > 0
    page.click("[data-shows=padding]")
    expect(page.locator("#decode td[data-share]").first).to_have_text(re.compile("%$"))
    page.screenshot(path=tmp_path / "wide.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    is_wider = page.locator("body").evaluate("body => body.scrollWidth > window.innerWidth")
    assert not is_wider
    assert (tmp_path / "wide.png").stat().st_size > 20_000
    assert said == []
    assert all(url.startswith(server.url) or url.startswith("data:") for url in foreign)


MARKUP = '<img src=x onerror="document.title = 1"><script>document.title = 1</script>'
KEY = "ключ-€"


def test_no_name_answer_or_error_becomes_markup(
    pytestconfig: pytest.Config, tmp_path: Path, page: Page
) -> None:
    flags = (f"--served-model-name={MARKUP}", f"--api-key={KEY}", "--dtype=float32")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    python = pytestconfig.getoption("--server-python")
    with running("demo", tmp_path / "log", *flags, python=python) as live:
        page.goto(f"{live.url}/")
        expect(page.locator("#status")).to_have_text("key needed", timeout=PATIENCE_MS)
        for key, state in ((MARKUP, "key needed"), ("falsch-€", "key needed"), (KEY, "ready")):
            page.fill("#key", key)
            page.click("#key-form button")
            expect(page.locator("#status")).to_have_text(state, timeout=PATIENCE_MS)
        expect(page.locator("#model")).to_have_text(MARKUP)

        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body=MARKUP))
        say(page, MARKUP)
        expect(page.locator("#messages .error")).to_have_text("The server answered 502.")
        page.unroute("**/v1/chat/completions")
        answers = (
            {"error": {"message": MARKUP}},
            {"choices": [{"delta": {"reasoning": MARKUP, "content": MARKUP}}]},
        )
        for answer in answers:
            body = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            page.route("**/v1/chat/completions", partial(fulfil, body))
            say(page, MARKUP)
            expect(page.locator("#messages > div").last).to_contain_text(MARKUP)
            page.unroute("**/v1/chat/completions")

        page.route("**/page/state", lambda route: route.fulfill(status=200, body=MARKUP))
        expect(page.locator("#status")).to_have_text("unreachable", timeout=PATIENCE_MS)

        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert page.title() == f"{MARKUP} · gaudiserve"
        assert errors == []


def fulfil(body: str, route: Route) -> None:
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def say(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
