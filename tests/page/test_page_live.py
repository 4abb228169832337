"""The page of a complete server: images for a vision model, and a killed engine."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import running
from page_browser import ask, chromium, open_page, send, window
from playwright.sync_api import Browser, Page, expect
from tiny_vision import image_bytes, make_tiny_vision, picture

pytestmark = pytest.mark.page

PICTURE = image_bytes(picture(64, 48))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def give(page: Page, kind: str, name: str, data: bytes, media_type: str = "image/png") -> None:
    """Drop a file on the chat, or paste it into the box, like a user."""
    page.evaluate(
        """([kind, name, bytes, type]) => {
            const given = new DataTransfer();
            given.items.add(new File([new Uint8Array(bytes)], name, { type }));
            const event = kind === "drop"
                ? new DragEvent("drop", { dataTransfer: given, bubbles: true })
                : new ClipboardEvent("paste", { clipboardData: given, bubbles: true });
            const target = kind === "drop" ? "chat-view" : "question";
            document.getElementById(target).dispatchEvent(event);
        }""",
        [kind, name, list(data), media_type],
    )


def test_images_can_be_chosen_dropped_pasted_removed_and_sent(
    browser: Browser, tmp_path: Path
) -> None:
    folder = make_tiny_vision("llava", tmp_path / "llava")
    (tmp_path / "cat.png").write_bytes(PICTURE)
    flags = ("--dtype=float32", "--max-model-len=512")
    sent: list[Any] = []
    with running(str(folder), tmp_path / "log", *flags) as live, window(browser) as page:
        page.on(
            "request",
            lambda r: sent.append(r.post_data_json) if "chat/completions" in r.url else None,
        )
        open_page(page, live.url)
        expect(page.locator("#attach")).to_be_visible()
        page.set_input_files("#files", [tmp_path / "cat.png", tmp_path / "cat.png"])
        expect(page.locator("#pictures img")).to_have_count(2)
        give(page, "drop", "dog.png", image_bytes(picture(48, 64)))
        expect(page.locator("#pictures img")).to_have_count(3)
        give(page, "paste", "cow.png", image_bytes(picture(40, 40)))
        expect(page.locator("#pictures img")).to_have_count(4)
        give(page, "drop", "song.mp3", b"ID3", "audio/mpeg")
        expect(page.locator("#hint")).to_have_text("song.mp3 is not a picture.")
        for _ in range(2):
            page.locator("#pictures button").first.click()
        expect(page.locator("#pictures img")).to_have_count(2)
        page.click("#removed button")
        expect(page.locator("#pictures img")).to_have_count(3)
        page.locator("#pictures button").first.click()
        expect(page.locator("#pictures img")).to_have_count(2)

        ask(page, "What is it?")

        expect(page.locator(".message.user img")).to_have_count(2)
        expect(page.locator("#pictures img")).to_have_count(0)
        expect(page.locator("#failure")).to_be_hidden()
        expect(page.locator(".message.assistant .foot")).to_be_visible()
        page.reload()
        page.locator(".chat-name").click()
        expect(page.locator(".message.user")).to_contain_text("(The picture is not saved.)")
    (body,) = sent
    parts = body["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert all(part["image_url"]["url"].startswith("data:image/png;base64,") for part in parts[:2])
    # The context of 512 tokens leaves less than the page's default of 1,024.
    assert 0 < body["max_tokens"] < 512


def test_an_answer_survives_an_engine_kill_and_a_text_model_offers_no_images(
    browser: Browser, tmp_path: Path
) -> None:
    with running("demo", tmp_path / "log") as live, window(browser) as page:
        open_page(page, live.url)
        give(page, "drop", "cat.png", PICTURE)
        expect(page.locator("#hint")).to_have_text("This model takes no pictures.")
        expect(page.locator("#pictures img")).to_have_count(0)
        answer = page.locator(".message.assistant .markdown")
        send(page, "Tell me a long story about the sea.")
        expect(answer).to_have_text(re.compile(r"\w+ \w+"))

        os.kill(live.find("gaudiserve: engine"), signal.SIGKILL)

        expect(page.locator("#status")).to_have_text("restarting")
        expect(page.locator("#trouble")).to_contain_text("is being restarted")
        before = answer.inner_text()
        expect(page.locator("#status")).to_have_text("ready", timeout=120_000)
        expect(answer).not_to_have_text(before, timeout=60_000)
        if page.locator("#send").inner_text() == "Stop":
            page.click("#send")
        expect(page.locator("#send")).to_have_text("Send")
        page.click("#to-server")
        expect(page.locator("#decode td[data-share]").first).to_be_visible()
        expect(page.locator("#recent")).to_contain_text("/v1/chat/completions")
