"""States of the page at three widths, light and dark: axe finds no violation, and no element is cut
off."""

from collections.abc import Iterator

import msgspec
import pytest
from page_browser import ask, check, chromium, load_axe, open_page, send, window
from page_replies import LONG, MARKDOWN, THINKS, TOOL_CALL, TOOLS, WIDE
from page_rig import PageServer, serving
from playwright.sync_api import Browser, Page, expect

from engine.client.state import Failure
from engine.transport.messages import EngineStats

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving(reasoning_parser="qwen3") as opened:
        yield opened


@pytest.fixture(scope="module")
def locked() -> Iterator[PageServer]:
    with serving(api_keys=("k",)) as opened:
        yield opened


@pytest.mark.parametrize("scale", (1, 1.5))
def test_the_header_has_room_for_the_name_of_the_model(browser: Browser, scale: float) -> None:
    """The window is a phone's, with the longest status, at normal and at larger text size."""
    with window(browser, 360) as page:
        with serving() as server:
            open_page(page, server.url)
            page.evaluate(
                """(size) => {
                    for (const element of [document.documentElement, document.body])
                        element.style.fontSize = size;
                }""",
                f"{16 * scale}px",
            )
        expect(page.locator("#status")).to_have_text("unreachable")

        name, *others = page.eval_on_selector_all(
            ".top > *",
            """(parts) => parts.map((part) => {
                const { left, right } = part.getBoundingClientRect();
                return [left, right];
            })""",
        )
        assert name[1] - name[0] >= 7 * 16 * scale
        assert all(0 <= left < right <= 360 for left, right in (name, *others))


@pytest.mark.parametrize("width", (360, 900, 1600))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_every_state_is_readable(
    browser: Browser, server: PageServer, locked: PageServer, width: int, scheme: str
) -> None:
    with window(browser, width, scheme) as page:
        open_page(page, server.url)
        load_axe(page)
        check(page, "empty chat")
        chat_states(page, server, is_narrow=width == 360)
        settings_states(page)
        server_states(page, server)
        key_states(page, locked.url)


@pytest.mark.parametrize("width", (360, 900, 1600))
def test_long_names_and_words_fit(browser: Browser, width: int) -> None:
    folder = "/home/someone/models/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4-of-a-long-name"
    names = (folder, "an-adapter-for-the-openings-and-endgames-of-chess")
    with serving(served_model_names=names) as server, window(browser, width) as page:
        assert server.client.ready is not None
        emulated = msgspec.structs.replace(server.client.ready, device="hpu-emulator")
        server.client.ready = emulated
        server.answer(WIDE)
        open_page(page, server.url)
        load_axe(page)
        ask(page, "u" * 300)

        check(page, "long names and words")
        in_view(page, "#send", "#open-settings", ".retry", "#status", "#to-server")
        expect(page.locator("#model")).to_have_text(folder.rpartition("/")[2])
        expect(page.locator("#model")).to_have_attribute("title", folder)


def chat_states(page: Page, server: PageServer, *, is_narrow: bool) -> None:
    server.answer(THINKS + MARKDOWN)
    page.locator(".example").nth(1).click()
    expect(page.locator(".foot .retry")).to_be_visible()
    in_view(page, "#question", "#send", ".foot")
    page.locator(".message .folded summary").click()
    check(page, "answer with reasoning, code and a table")

    server.answer(LONG, pace_s=0.01)
    send(page, "Long?")
    expect(page.locator(".message.open .markdown")).to_contain_text("number 2")
    page.press("#question", "Enter")
    expect(page.locator("#hint")).to_contain_text("An answer is being written")
    check(page, "while an answer is written")
    page.click("#send")
    expect(page.locator(".note").last).to_have_text("You stopped this answer.")
    check(page, "stopped answer")

    page.locator(".retry").click()
    expect(page.locator(".message.open .markdown")).to_contain_text("number 2")
    server.die()
    expect(page.locator(".note").last).to_have_text("This answer is not complete.")
    check(page, "engine that was killed under an answer")
    in_view(page, "#failure", "#question", "#send")

    page.locator(".edit").first.click()
    check(page, "edited question")
    in_view(page, "#edited button", "#question", "#send")
    page.press("#question", "Escape")

    page.fill("#question", "x" * 3000)
    server.rig.state.is_draining = True
    page.press("#question", "Enter")
    expect(page.locator("#failure-text")).to_have_text("The server is shutting down.")
    expect(page.locator("#trouble")).to_contain_text("It takes no new requests")
    check(page, "refused message")
    expect(page.locator("#to-end")).to_be_hidden()
    in_view(page, "#failure", "#question", "#send")
    server.rig.state.is_draining = False
    page.fill("#question", "")
    page.click("#failure-close")
    expect(page.locator("#trouble")).to_be_hidden()
    server.client.lost = Failure("killed")
    expect(page.locator("#status")).to_have_text("restarting")
    check(page, "engine that restarts")
    server.client.lost = None
    expect(page.locator("#trouble")).to_be_hidden()
    awake = server.client.stats
    server.client.stats = EngineStats(sleep="weights_offloaded")
    expect(page.locator("#wake-button")).to_be_visible()
    check(page, "model that sleeps")
    server.client.stats = awake
    expect(page.locator("#trouble")).to_be_hidden()
    if is_narrow:
        page.click("#open-history")
        in_view(page, "#new-chat", "#forget")
        check(page, "list of conversations")
        page.get_by_role("button", name="Rename").first.click()
        check(page, "name of a conversation")
        page.click("#cancel-rename")
        page.fill("#find-chat", "no such words")
        expect(page.locator("#no-chat")).not_to_be_empty()
        check(page, "no conversation found")
        page.fill("#find-chat", "")
        page.click("#forget")
        in_view(page, "#deleted button")
        check(page, "deleted conversations")
        page.click("#deleted button")
        page.keyboard.press("Escape")
        expect(page.locator("#history")).to_be_hidden()


def settings_states(page: Page) -> None:
    page.click("#open-settings")
    page.fill("#tools", "{")
    page.click("#save-settings")
    expect(page.locator("#settings-error")).to_contain_text("The tools are not JSON")
    check(page, "settings with an error")
    page.fill("#tools", TOOLS)
    page.click("#save-settings")
    expect(page.locator("#settings")).to_be_hidden()


def server_states(page: Page, server: PageServer) -> None:
    server.answer(TOOL_CALL)
    ask(page, "Weather?")
    page.locator(".calls summary").click()
    check(page, "tool call")
    page.click("#to-server")
    expect(page.locator("#no-decode")).to_be_visible()
    check(page, "server without launches")
    server.fill()
    expect(page.locator("#decode td[data-share]").first).to_be_visible()
    check(page, "server with launches")
    page.locator(".term").last.click()
    check(page, "explained word")
    page.click("[data-shows=padding]")
    check(page, "padding")
    page.route("**/page/state", lambda route: route.abort())
    expect(page.locator("#status")).to_have_text("unreachable")
    check(page, "unreachable server")
    page.unroute("**/page/state")


def key_states(page: Page, url: str) -> None:
    open_page(page, url, "key needed")
    load_axe(page)
    check(page, "key needed")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-error")).to_contain_text("rejected this key")
    check(page, "wrong key")


def in_view(page: Page, *selectors: str) -> None:
    """Assert that the elements are completely visible without scrolling."""
    for selector in selectors:
        expect(page.locator(selector).last).to_be_in_viewport(ratio=0.99)
