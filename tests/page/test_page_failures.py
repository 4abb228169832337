"""Failures on the page: the message is in view, and no text is lost."""

import json
from collections.abc import Iterator
from functools import partial

import pytest
from page_browser import HEIGHTS, ask, chromium, open_page, send, window
from page_replies import LONG
from page_rig import PageServer, serving
from playwright.sync_api import Browser, Page, Route, expect

from engine.client.state import Failure
from server.serving.state import PastRestart

pytestmark = pytest.mark.page

MARKUP = '<img src=x onerror="document.title = 1"><script>document.title = 1</script>'
KEY = "ключ-€"
CHAT = "**/v1/chat/completions"
DONE = "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[PageServer]:
    with serving() as opened:
        opened.answer("Hello!")
        yield opened


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    with window(browser) as opened:
        open_page(opened, server.url)
        yield opened


def refused(page: Page, text: str, reason: str, *, earlier: int = 0) -> None:
    """Assert that the message is in the box again, the reason is in view, and the conversation is
    unchanged."""
    expect(page.locator("#failure-text")).to_contain_text(reason)
    expect(page.locator("#failure")).to_be_in_viewport(ratio=0.99)
    expect(page.locator("#question")).to_have_value(text)
    expect(page.locator(".message")).to_have_count(earlier)


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_refusal_of_a_text_that_is_too_long_is_in_view(
    browser: Browser, server: PageServer, width: int
) -> None:
    text = "word " * 30_000
    with window(browser, width) as page:
        open_page(page, server.url)
        ask(page, "Hi")

        ask(page, text)

        refused(page, text.strip(), "You can also start a new chat.", earlier=2)
        expect(page.locator("#failure-text")).to_contain_text("100000 tokens")
        page.fill("#question", "Shorter")
        page.press("#question", "Enter")
        expect(page.locator(".message")).to_have_count(4)
        expect(page.locator("#failure")).to_be_hidden()


def test_a_shutting_down_server_is_reported(page: Page, server: PageServer) -> None:
    server.rig.state.is_draining = True

    ask(page, "Hi")

    refused(page, "Hi", "The server is shutting down.")
    expect(page.locator("#status")).to_have_text("draining")
    expect(page.locator("#trouble")).to_have_text(
        "The server is shutting down. It takes no new requests."
    )


def test_a_starting_server_shows_its_progress(page: Page, server: PageServer) -> None:
    state = server.rig.state
    state.pipeline, state.stage = None, "loading the weights"
    expect(page.locator("#trouble")).to_have_text(
        "The server is starting: loading the weights. It accepts no requests yet."
    )

    ask(page, "Hi")

    refused(page, "Hi", "The server is starting: loading the weights. It accepts no requests yet.")


def test_an_engine_crash_leaves_a_partial_answer_and_a_message(
    page: Page, server: PageServer
) -> None:
    server.answer(LONG, pace_s=0.01)
    send(page, "Tell")
    answer = page.locator(".message.assistant .markdown")
    expect(answer).to_contain_text("number 2")

    server.die()

    expect(page.locator("#failure-text")).not_to_have_text("")
    expect(page.locator("#failure")).to_be_in_viewport(ratio=0.99)
    failure = page.locator("#failure-text").inner_text()
    assert failure not in page.locator("#messages").inner_text()
    expect(page.locator(".note")).to_have_text("This answer is not complete.")
    server.answer("Whole.")
    page.click(".retry")
    expect(answer).to_have_text("Whole.")
    expect(page.locator("#failure")).to_be_hidden()


def test_a_retry_that_fails_keeps_the_old_answer(page: Page, server: PageServer) -> None:
    ask(page, "Hi")
    server.rig.state.is_draining = True

    page.click(".retry")

    refused(page, "", "The server is shutting down.", earlier=2)
    expect(page.locator(".message.assistant .markdown")).to_have_text("Hello!")


def test_a_failed_engine_is_reported(page: Page, server: PageServer) -> None:
    server.client.failure = "out of memory"

    expect(page.locator("#status")).to_have_text("failed")
    expect(page.locator("#trouble")).to_have_text(
        "The engine has failed: out of memory. The server's log says more."
    )
    ask(page, "Hi")
    expect(page.locator("#question")).to_have_value("Hi")
    expect(page.locator("#failure")).to_be_visible()


def test_the_reason_of_a_restart_is_shown_during_and_after_the_restart(
    page: Page, server: PageServer
) -> None:
    reason = f"the engine was killed {MARKUP}"
    page.click("#to-server")
    expect(page.locator("#restarts")).to_be_hidden()

    server.client.lost = Failure(reason)

    expect(page.locator("#trouble")).to_contain_text(f"is being restarted: {reason}.")
    server.client.lost = None
    server.rig.state.engine_restarts.append(PastRestart(0, 1_790_000_000.0, 2.5, reason))
    expect(page.locator("#restart-list li")).to_contain_text(
        f"engine 0 was back after 2.50 s: {reason}"
    )
    expect(page.locator("#trouble")).to_be_hidden()


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_notice_of_a_restart_covers_nothing_and_does_not_move_the_text(
    browser: Browser, server: PageServer, width: int
) -> None:
    server.answer("\n\n".join(f"Line {index}." for index in range(60)))
    with window(browser, width) as page:
        open_page(page, server.url)
        ask(page, "Hi")
        page.locator("#messages").evaluate("list => { list.scrollTop = 100; }")
        expect(page.locator("#to-end")).to_be_visible()
        # The browser scrolls by whole pixels.
        before = pytest.approx(page.locator(".markdown").bounding_box(), abs=1)

        server.client.lost = Failure("the engine was killed")

        expect(page.locator("#trouble")).to_be_in_viewport(ratio=0.99)
        notice, bar = (page.locator(name).bounding_box() for name in ("#trouble", ".bar"))
        assert notice is not None and bar is not None
        assert notice["y"] + notice["height"] <= bar["y"]
        assert page.locator(".markdown").bounding_box() == before
        server.client.lost = None
        expect(page.locator("#trouble")).to_be_hidden()
        assert page.locator(".markdown").bounding_box() == before


def test_the_page_clears_its_figures_when_the_server_is_gone(browser: Browser) -> None:
    with window(browser) as page:
        with serving() as server:
            server.fill()
            open_page(page, server.url)
            page.click("#to-server")
            expect(page.locator("#running")).to_have_text("3")
            page.click("#to-chat")

        expect(page.locator("#status")).to_have_text("unreachable")
        expect(page.locator("#trouble")).to_contain_text("The server cannot be reached.")
        send(page, "Hi")
        refused(page, "Hi", "The server cannot be reached.")
        page.click("#to-server")
        for name in ("running", "waiting", "kv", "hits", "padding", "graphs"):
            expect(page.locator(f"#{name}")).to_have_text("\N{EN DASH}")
        expect(page.locator("#bars span")).to_have_count(0)
        # The figures of an unreachable server are unknown and must not be shown as 0.
        for name in ("recent", "no-prefill", "no-decode"):
            expect(page.locator(f"#{name}")).to_have_text("\N{EN DASH}")
        expect(page.locator("td[data-share]")).to_have_count(0)
        expect(page.locator("#latencies")).to_have_text("")
        # The lowest label of the scale is above the table.
        assert page.evaluate(
            """() => {
                const low = document.querySelector("#ticks span").getBoundingClientRect();
                return low.bottom <= document.querySelector(".tall").getBoundingClientRect().top;
            }"""
        )


def test_a_broken_connection_is_reported(page: Page) -> None:
    page.route(CHAT, lambda route: route.abort())
    ask(page, "Hi")
    refused(page, "Hi", "The server cannot be reached. Is it still running?")
    page.unroute(CHAT)

    half = 'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
    page.route(CHAT, partial(stream, half))
    page.press("#question", "Enter")

    expect(page.locator(".note")).to_have_text("This answer is not complete.")
    expect(page.locator("#failure-text")).to_have_text(
        "The connection ended before the answer was complete."
    )
    expect(page.locator(".message.assistant .markdown")).to_have_text("Half")


def stream(body: str, route: Route) -> None:
    route.fulfill(status=200, content_type="text/event-stream", body=body)


def test_a_wrong_key_is_reported(browser: Browser) -> None:
    with serving(api_keys=(KEY,)) as server, window(browser) as page:
        server.answer("Hello!")
        open_page(page, server.url, "key needed")
        expect(page.locator("#key-error")).to_be_hidden()
        expect(page.locator("#key")).to_be_focused()
        send(page, "Hi")
        refused(page, "Hi", "The server requires an API key")
        for key in (MARKUP, "falsch-€"):
            page.fill("#key", key)
            page.click("#key-form button")
            expect(page.locator("#key-error")).to_have_text(
                "The server rejected this key. Check it and enter it again."
            )
        # The message stays, although the page continues to poll without a key.
        for _ in range(2):
            page.wait_for_event("response", lambda r: r.url.endswith("/page/state"))
        expect(page.locator("#key-error")).to_contain_text("rejected this key")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#failure")).to_be_hidden()
        expect(page.locator("#question")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .markdown")).to_have_text("Hello!")
        expect(page.locator("#failure")).to_be_hidden()


def test_a_refused_key_of_a_server_is_not_deleted_for_another_path(browser: Browser) -> None:
    with serving(api_keys=(KEY,)) as server, window(browser) as page:
        open_page(page, server.url, "key needed")
        page.evaluate("sessionStorage.setItem('gaudiserve:/other/:key', 'theirs')")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_contain_text("rejected this key")

        kept = page.evaluate("Object.entries(sessionStorage)")

        assert kept == [["gaudiserve:/other/:key", "theirs"]]
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        expect(page.locator("#status")).to_have_text("ready")
        assert page.evaluate("sessionStorage.getItem('gaudiserve:/:key')") == KEY


def test_an_empty_chat_shows_its_heading_below_the_form_for_the_key(browser: Browser) -> None:
    with serving(api_keys=(KEY,)) as server, window(browser, 360) as page:
        open_page(page, server.url, "key needed")
        send(page, "Hi")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        expect(page.locator("#key-error")).to_contain_text("rejected this key")

        expect(page.locator(".welcome h2")).to_be_in_viewport(ratio=0.99)


HOSTILE = (
    MARKUP,
    "[a](javascript:document.title=1) [b](data:text/html,x) ![c](https://example.com/c.png)",
    "<a href='javascript:1'>x</a><svg onload=document.title=1><style>*{display:none}</style>",
    '```<b>"onload=1\n<script>document.title = 1</script>\n```',
    "| a |\n| :-- |\n| <img src=x onerror=document.title=1> |",
    "$$\\href{javascript:1}{x}$$ <math><mi xlink:href='javascript:1'>x</mi></math>",
)


def test_names_answers_and_errors_are_not_rendered_as_html(browser: Browser) -> None:
    with serving(served_model_names=(MARKUP,)) as server, window(browser) as page:
        open_page(page, server.url)
        expect(page.locator("#model")).to_have_text(MARKUP)
        page.route(CHAT, lambda route: route.fulfill(status=502, body=MARKUP))
        ask(page, MARKUP)
        refused(page, MARKUP, "The server answered with status 502.")
        page.unroute(CHAT)
        page.route(CHAT, partial(stream, event({"error": {"message": MARKUP}})))
        page.press("#question", "Enter")
        refused(page, MARKUP, MARKUP)
        page.unroute(CHAT)
        call = {"index": 0, "id": "1", "function": {"name": MARKUP, "arguments": MARKUP}}
        for text in HOSTILE:
            page.fill("#question", "")
            delta = {"reasoning": text, "content": text, "tool_calls": [call]}
            body = event({"choices": [{"delta": delta, "finish_reason": "stop"}]}) + DONE
            page.route(CHAT, partial(stream, body))
            page.click("#new-chat")
            ask(page, text)
            expect(page.locator(".message.assistant .retry")).to_be_visible()
            page.unroute(CHAT)
            assert page.locator("img, math, style, iframe").count() == 0
            # The page has a script, and a chart in the view of the server.
            assert (page.locator("script").count(), page.locator("svg").count()) == (1, 1)
            for link in page.locator(".markdown a").all():
                assert (link.get_attribute("href") or "").startswith("https:")

        assert page.title() == f"{MARKUP} · gaudiserve"


def event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


def test_the_policy_stops_a_string_that_would_become_markup(
    browser: Browser, server: PageServer
) -> None:
    # A page without `window`, because the browser logs the blocked string.
    page = browser.new_page()
    open_page(page, server.url)

    tried = page.evaluate(
        """() => {
            try { document.body.innerHTML = "<b>"; } catch (error) { return error.name; }
        }"""
    )

    assert tried == "TypeError"
    page.close()
