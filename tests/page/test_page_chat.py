"""The page's chat in a browser: requests, streaming, storage and copying."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import HEIGHTS, ask, chromium, open_page, send, window
from page_replies import LONG, MARKDOWN, THINKS, TOOL_CALL, TOOLS
from page_rig import PageServer, serving
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.page

COPY_S = 60
FILL_STORAGE = """() => {
    window.put = Storage.prototype.setItem;
    Storage.prototype.setItem = () => { throw new Error("full"); };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with serving(reasoning_parser="qwen3") as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    server.answer("Hello!")
    with window(browser) as opened:
        open_page(opened, server.url)
        yield opened


def bodies(page: Page) -> list[Any]:
    """Bodies of all chat requests from now on."""
    sent: list[Any] = []

    def keep(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append(request.post_data_json)

    page.on("request", keep)
    return sent


def settle(page: Page, **fields: str) -> None:
    """Save the settings with these fields."""
    page.click("#open-settings")
    for name, value in fields.items():
        page.fill(f"#{name.replace('_', '-')}", value)
    page.click("#save-settings")
    expect(page.locator("#settings")).to_be_hidden()


def answers(page: Page) -> Any:
    return page.locator(".message.assistant .markdown")


def test_markdown_is_shown_with_highlighted_code_that_can_be_copied(
    page: Page, server: PageServer
) -> None:
    server.answer(THINKS + MARKDOWN)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])

    ask(page, "Reverse!")

    expect(page.locator(".markdown strong")).to_have_text("reverses")
    expect(page.locator(".markdown td.align-right").first).to_have_text('"ab"')
    expect(page.locator(".hljs-keyword").first).to_have_text("def")
    expect(page.locator(".markdown a")).to_have_attribute("rel", "noopener noreferrer")
    expect(page.locator("details.folded .plain").first).to_be_hidden()
    expect(page.locator("details.folded .plain").first).to_contain_text("I will write it")
    page.click(".code-bar button")
    expect(page.locator(".code-bar button")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == MARKDOWN.split("```python\n")[1].split("```")[0]


def test_numbers_of_nested_lists_fit_in_the_padding(page: Page, server: PageServer) -> None:
    server.answer("1. outer\n\n   100. inner\n   101. inner\n")

    ask(page, "List!")

    inner = page.locator(".markdown ol ol")
    expect(inner).to_have_count(1)
    widths = inner.evaluate("""list => {
        const style = getComputedStyle(list);
        const pen = document.createElement("canvas").getContext("2d");
        pen.font = `${style.fontSize} ${style.fontFamily}`;
        return [pen.measureText("100. ").width, parseFloat(style.paddingLeft)];
    }""")
    assert 0 < widths[0] <= widths[1]


def test_the_note_of_a_copy_goes_with_the_next_question(page: Page, server: PageServer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "Hi")
    page.click("#copy-python")
    expect(page.locator("#hint")).to_have_text("Copied as Python.")
    server.answer(LONG, pace_s=0.01)

    send(page, "More")

    expect(page.locator("#hint")).to_have_text("", timeout=2000)
    page.click("#send")


def test_code_can_be_copied_and_selected_while_the_answer_grows(
    page: Page, server: PageServer
) -> None:
    server.answer("```python\nx = 1\n```\n" + LONG, pace_s=0.01)
    send(page, "Code")
    expect(answers(page)).to_contain_text("number 0")
    block = page.locator(".code").element_handle()
    page.click(".code-bar button")
    # "Copied" or "Not copied": this window may lack the permission.
    expect(page.locator(".code-bar button")).to_contain_text("opied")

    expect(answers(page)).to_contain_text("number 2")

    assert block is not None and block.evaluate("block => block.isConnected")
    page.click("#send")


def test_a_request_has_max_tokens_and_the_settings_of_the_page(page: Page) -> None:
    sent = bodies(page)
    ask(page, "Hi")
    settle(page, system="Be short.", temperature="0.3", max_tokens="77", tools=TOOLS)
    ask(page, "Again")
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    ask(page, "After a reload")

    first, second, third = sent
    assert first["max_tokens"] == 1024 and "temperature" not in first and "tools" not in first
    assert (second["max_tokens"], second["temperature"], second["model"]) == (77, 0.3, "demo")
    assert second["tools"] == json.loads(TOOLS)
    assert second["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Again"},
    ]
    assert third["max_tokens"] == 77


def test_max_tokens_is_the_rest_of_the_context(page: Page) -> None:
    sent = bodies(page)
    settle(page, max_tokens="200000")

    ask(page, "Hi")

    expect(answers(page)).to_have_text("Hello!")
    assert 99_000 < sent[0]["max_tokens"] < 100_000


def test_max_tokens_is_reduced_after_a_text_with_several_tokens_per_character(page: Page) -> None:
    sent = bodies(page)

    # Each character has three bytes and three tokens.
    ask(page, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 33_200)

    expect(answers(page)).to_have_text("Hello!")
    assert 0 < sent[0]["max_tokens"] < 400


def test_a_cut_answer_names_the_setting_or_the_context_that_cut_it(
    page: Page, server: PageServer
) -> None:
    server.answer(LONG)
    settle(page, max_tokens="8")

    ask(page, "Hi")

    expect(page.locator(".note")).to_have_text(
        "The answer has 8 tokens, the maximum in Settings. Raise it there."
    )
    settle(page, max_tokens="1024")
    ask(page, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 33_200)
    expect(page.locator(".note").last).to_have_text(
        "The conversation fills the model's context of 100,000 tokens. Start a new chat."
    )


@pytest.mark.parametrize(("text", "block"), [("```python\nx = 1", ".code"), ("- one\n- two", "ul")])
def test_the_caret_of_a_growing_answer_is_within_its_last_block(
    page: Page, server: PageServer, text: str, block: str
) -> None:
    server.answer(text + " ." * 400, pace_s=0.01)

    send(page, "Go")

    expect(page.locator(f".open .markdown > {block}:last-child")).to_contain_text(".")
    after, within = page.evaluate(
        """block => {
            const last = document.querySelector(`.open .markdown > ${block}:last-child`);
            const inner = last.querySelector("code, li:last-child");
            return [last, inner].map((node) => getComputedStyle(node, "::after").content);
        }""",
        block,
    )
    assert (after, within) == ("none", '" \N{LEFT THREE EIGHTHS BLOCK}"')
    page.click("#send")


def test_an_answer_has_tokens_speed_and_time_to_first_token(page: Page, server: PageServer) -> None:
    server.answer("Hello!", pace_s=0.02)
    with page.expect_response("**/v1/chat/completions") as answered:
        ask(page, "Hi")
    lines = [line for line in answered.value.text().splitlines() if '"usage"' in line]
    usage = json.loads(lines[-1].removeprefix("data: "))["usage"]

    pattern = re.compile(r"^\d tokens · [\d.]+ tokens/s · first token [\d.]+ m?s$")
    expect(page.locator(".foot .quiet")).to_have_text(pattern)
    tokens, speed = re.findall(r"[\d.]+", page.locator(".foot .quiet").inner_text())[:2]
    assert int(tokens) == usage["completion_tokens"]
    assert 0 < float(speed) <= 50


def test_the_speed_of_an_answer_counts_the_time_of_tokens_without_text(
    page: Page, server: PageServer
) -> None:
    settle(page, tools=TOOLS)
    # A token per byte: the page shows the call at its end.
    server.answer(TOOL_CALL, pace_s=0.01)
    ask(page, "Weather?")

    expect(page.locator(".calls summary")).to_have_text("Tool call: get_weather")
    speed = re.search(r"([\d.]+) tokens/s", page.locator(".foot .quiet").inner_text())
    assert speed is not None and 0 < float(speed[1]) <= 100


def test_the_seconds_before_the_first_token_are_counted(page: Page, server: PageServer) -> None:
    server.answer(LONG, pace_s=2.5)
    send(page, "Slow?")

    expect(page.locator(".waiting")).to_have_text(
        re.compile(r"^Waiting for the first token, [12] s")
    )


def test_aliases_of_a_single_model_show_no_model_choice(page: Page) -> None:
    expect(page.locator("#model-choice")).to_be_hidden()


def test_adapters_can_be_chosen_and_the_choice_is_remembered(
    browser: Browser, server: PageServer
) -> None:
    with window(browser) as page:
        state = page.request.get(f"{server.url}/page/state").json()
        state["models"] = ["demo", "org/demo", "chess"]
        page.route("**/page/state", lambda route: route.fulfill(json=state))
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body=""))
        open_page(page, server.url)
        assert page.locator("#model-choice option").all_inner_texts() == ["demo", "chess"]
        page.select_option("#model-choice", "chess")
        page.reload()
        expect(page.locator("#model-choice")).to_have_value("chess")
        sent = bodies(page)

        ask(page, "Hi")

        assert sent[0]["model"] == "chess"


def test_a_field_that_the_server_ignored_is_named_below_the_answer(page: Page) -> None:
    settle(page, other_fields='{"top_pp": 0.5}')
    ask(page, "Hi")
    note = page.locator(".message.assistant .note")
    expect(note).to_have_text(
        "The server knows no such field and ignored: top_pp. See Other fields in Settings."
    )

    settle(page, other_fields='{"top_p": 0.5}')
    ask(page, "Hi")

    expect(note.last).to_be_hidden()


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_buttons_of_a_conversation_say_what_they_copy(
    browser: Browser, server: PageServer, width: int
) -> None:
    with window(browser, width) as page:
        open_page(page, server.url)

        for name in ("curl", "Python"):
            button = page.locator(f"#copy-{name.lower()}")
            expect(button).to_have_text(f"Copy as {name}", use_inner_text=True)
            expect(button).to_be_in_viewport(ratio=0.99)


def test_text_is_shown_in_a_dialog_if_the_clipboard_fails(page: Page) -> None:
    for name in ("curl", "python"):
        expect(page.locator(f"#copy-{name}")).to_be_disabled()
    ask(page, "Hi")
    page.evaluate(
        """() => {
            navigator.clipboard.writeText = () => Promise.reject(new Error("no"));
            document.execCommand = () => false;
        }"""
    )
    page.click("#copy-curl")

    shown = page.locator(".text-dialog textarea")
    expect(shown).to_have_value(re.compile("^curl http"))
    page.keyboard.press("Escape")
    expect(shown).to_have_count(0)


def test_a_stopped_answer_stays_and_can_be_retried(page: Page, server: PageServer) -> None:
    sent = bodies(page)
    server.answer(LONG, "Second.", pace_s=0.01)
    send(page, "Tell")
    expect(answers(page)).to_contain_text("number 1")
    page.click("#send")

    expect(page.locator(".note")).to_have_text("You stopped this answer.")
    expect(answers(page)).to_contain_text("number 1")
    page.click(".retry")
    expect(answers(page)).to_have_text("Second.")
    expect(page.locator("#send")).to_have_text("Send")
    assert [body["messages"] for body in sent] == [[{"role": "user", "content": "Tell"}]] * 2


def test_enter_during_an_answer_keeps_the_message_with_a_hint(
    page: Page, server: PageServer
) -> None:
    server.answer(LONG, pace_s=0.01)
    send(page, "Tell")
    expect(answers(page)).to_contain_text("number 1")

    send(page, "And this?")

    expect(page.locator("#hint")).to_contain_text(
        "An answer is being written. Stop it (Escape) or wait"
    )
    expect(page.locator("#question")).to_have_value("And this?")
    expect(page.locator(".message.user")).to_have_count(1)
    page.click("#send")
    expect(page.locator("#hint")).to_have_text("")


def test_a_repeating_answer_is_stopped_with_a_message(page: Page, server: PageServer) -> None:
    sent = bodies(page)
    server.answer("First. " + "oWLHLEoWLHLE" * 400, pace_s=0.001)
    ask(page, "Reverse")

    expect(page.locator(".note")).to_contain_text("The answer repeated itself")
    expect(page.locator("#failure")).to_be_hidden()
    shown = answers(page).inner_text()
    assert 400 < len(shown) < 2400
    assert len(sent) == 1
    server.answer("oWLHLEoWLHLE" * 50)
    page.click("#open-settings")
    page.uncheck("#ends-repeats")
    page.click("#save-settings")
    ask(page, "Reverse")
    expect(answers(page).last).to_have_text("oWLHLEoWLHLE" * 50)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ha" * 200, True),
        ("ha" * 190, False),
        ("x" + "la femme, " * 40, True),
        ("\n".join(map(str, range(500))), False),
        (
            "| a | b |\n" + "| --- | --- |\n" + "".join(f"| {n} | {n * n} |\n" for n in range(90)),
            False,
        ),
        (LONG, False),
    ],
    ids=("repeats", "too-short", "after-a-start", "counting", "table", "sentences"),
)
def test_repetition_is_detected_as_the_same_text_again(page: Page, text: str, found: bool) -> None:
    code = """async (text) => (await import("./page/files/repetition.js")).repeats(text)"""
    assert page.evaluate(code, text) is found


@pytest.mark.parametrize(("name", "is_demo"), [("demo", True), ("org/model", False)])
def test_the_empty_chat_explains_the_purpose_of_the_demo_model(
    browser: Browser, name: str, is_demo: bool
) -> None:
    with serving(served_model_names=(name,)) as opened, window(browser) as page:
        open_page(page, opened.url)

        expect(page.locator("#model")).to_have_text(name)
        expect(page.locator(".demo-hint")).to_be_visible(visible=is_demo)
        expect(page.locator(".demo-hint")).to_contain_text("often wrong")
        expect(page.locator(".demo-hint")).to_contain_text("greetings")


def test_a_model_without_a_chat_template_is_said_before_the_first_question(
    browser: Browser, server: PageServer
) -> None:
    with window(browser) as page:
        page.route(
            "**/page/state",
            lambda route: route.fulfill(json={**route.fetch().json(), "has_no_template": True}),
        )
        open_page(page, server.url)

        expect(page.locator(".no-template")).to_contain_text("--chat-template FILE")
        expect(page.locator(".examples")).to_be_hidden()
        expect(page.locator(".demo-hint")).to_be_hidden()


def test_conversations_are_kept_opened_and_deleted(page: Page, server: PageServer) -> None:
    ask(page, "First question")
    page.click("#new-chat")
    expect(page.locator(".example")).to_have_count(4)
    ask(page, "Second question")
    page.reload()

    names = page.locator(".chat-name")
    expect(names).to_have_text(["Second question", "First question"])
    names.nth(1).click()
    expect(page.locator(".message.user .plain")).to_have_text("First question")
    expect(answers(page)).to_have_text("Hello!")
    page.click("[aria-label='Delete First question']")
    expect(names).to_have_text(["Second question"])
    expect(page.locator(".message")).to_have_count(0)
    page.click("#forget")
    expect(names).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((name) => /chat:/.test(name))") == []


def test_a_conversation_is_listed_as_soon_as_its_first_message_is_sent(
    page: Page, server: PageServer
) -> None:
    server.answer(LONG, pace_s=0.01)
    send(page, "Tell me")
    expect(answers(page).last).to_contain_text("number 1")
    names = page.locator(".chat-name")

    expect(names).to_have_text("Tell me")
    expect(names).to_have_attribute("aria-current", "true")
    names.click()
    # The answer continues.
    expect(answers(page).last).to_contain_text("number 9")
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    names.click()
    expect(answers(page).last).to_contain_text("number 9")


def test_a_first_message_that_fails_leaves_no_conversation(page: Page, server: PageServer) -> None:
    server.rig.state.is_draining = True
    try:
        send(page, "Lost?")
        expect(page.locator("#failure")).to_be_visible()
    finally:
        server.rig.state.is_draining = False

    expect(page.locator("#question")).to_have_value("Lost?")
    expect(page.locator(".chat-name")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((name) => /chat:/.test(name))") == []


@pytest.mark.parametrize("width", HEIGHTS)
def test_a_wide_table_scrolls_in_its_answer(
    browser: Browser, server: PageServer, width: int
) -> None:
    names = [f"A column of words {index}" for index in range(12)]
    rows = (
        ("", *names, ""),
        ("", *("-" for _ in names), ""),
        ("", *("some words" for _ in names), ""),
    )
    server.answer("\n".join("|".join(row) for row in rows))
    with window(browser, width) as page:
        open_page(page, server.url)
        ask(page, "A table")

        table = page.locator(".markdown .scroll")
        inner, outer = table.evaluate("box => [box.scrollWidth, box.clientWidth]")

        assert inner > outer
        heights = page.locator(".markdown th").evaluate_all("all => all.map(h => h.offsetHeight)")
        # A taller row would mean that words are wrapped.
        assert max(heights) < 60
        fits = "() => document.documentElement.scrollWidth <= innerWidth"
        assert page.evaluate(fits)
        assert page.locator("#messages").evaluate("box => box.scrollWidth <= box.clientWidth")
        table.evaluate("box => box.scrollTo(box.scrollWidth, 0)")
        expect(page.locator(".markdown th").last).to_be_in_viewport(ratio=0.9)


def test_a_deletion_can_be_undone(page: Page, server: PageServer) -> None:
    for text in ("First", "Second", "Third"):
        page.click("#new-chat")
        ask(page, text)
    names = page.locator(".chat-name")

    page.click("[aria-label='Delete Third']")
    expect(page.locator("#deleted")).to_contain_text("Deleted “Third”.")
    expect(page.locator("#announcement")).to_have_text("Deleted “Third”.")
    page.click("#deleted button")
    expect(names).to_have_text(["Third", "Second", "First"])
    expect(page.locator(".message.user .plain")).to_have_text("Third")
    expect(page.locator("#deleted")).to_be_hidden()
    page.click("[aria-label='Delete First']")
    page.click("#forget")
    expect(page.locator("#deleted")).to_contain_text("Deleted 2 chats.")
    expect(names).to_have_count(0)
    page.click("#deleted button")

    expect(names).to_have_text(["Third", "Second"])
    page.reload()
    expect(names).to_have_text(["Third", "Second"])


def test_undoing_a_deletion_restores_the_answer_that_it_stopped(
    page: Page, server: PageServer
) -> None:
    ask(page, "First")
    server.answer(LONG, pace_s=0.01)
    send(page, "Tell")
    expect(answers(page).last).to_contain_text("number 1")
    page.click("[aria-label='Delete First']")
    expect(page.locator("#send")).to_have_text("Send")

    page.click("#deleted button")

    expect(answers(page).last).to_contain_text("number 1")
    page.reload()
    page.click(".chat-name")
    expect(answers(page).last).to_contain_text("number 1")


def test_an_answer_that_was_replaced_can_be_brought_back(page: Page, server: PageServer) -> None:
    server.answer("One.", "Two.")
    ask(page, "Hi")
    page.click(".retry")
    expect(answers(page)).to_have_text("Two.")

    page.click("#replaced button")

    expect(answers(page)).to_have_text("One.")
    expect(page.locator("#replaced")).to_be_hidden()
    page.reload()
    page.click(".chat-name")
    expect(answers(page)).to_have_text("One.")
    page.click(".retry")
    expect(page.locator("#replaced")).to_be_visible()
    ask(page, "Next")
    expect(page.locator("#replaced")).to_be_hidden()


def test_an_edited_question_replaces_the_rest_of_the_conversation(
    page: Page, server: PageServer
) -> None:
    ask(page, "One")
    ask(page, "Two")
    page.fill("#question", "a draft")
    sent = bodies(page)
    server.answer("Edited!")

    page.get_by_role("button", name="Edit One").press("Enter")
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#question")).to_have_value("One")
    expect(page.locator("#announcement")).to_contain_text("You edit an earlier message.")
    ask(page, "Uno")

    expect(page.locator(".message.user .plain")).to_have_text(["Uno"])
    expect(answers(page)).to_have_text(["Edited!"])
    expect(page.locator("#title")).to_have_text("Uno")
    assert [body["messages"] for body in sent] == [[{"role": "user", "content": "Uno"}]]
    expect(page.locator("#question")).to_have_value("a draft")
    expect(page.locator("#edited")).to_be_hidden()
    page.reload()
    expect(page.locator(".chat-name")).to_have_text(["Uno"])


def test_edited_messages_can_be_brought_back(page: Page) -> None:
    ask(page, "One")
    ask(page, "Two")
    page.get_by_role("button", name="Edit One").click()
    ask(page, "Uno")

    page.click("#replaced button")

    expect(page.locator(".message.user .plain")).to_have_text(["One", "Two"])
    expect(page.locator(".chat-name")).to_have_text(["One"])


def test_an_edit_that_is_cancelled_or_fails_changes_nothing(page: Page) -> None:
    ask(page, "One")
    ask(page, "Two")
    page.fill("#question", "a draft")
    page.get_by_role("button", name="Edit One").click()
    page.press("#question", "Escape")
    expect(page.locator("#question")).to_have_value("a draft")
    expect(page.locator("#edited")).to_be_hidden()

    page.get_by_role("button", name="Edit Two").click()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Dos")

    expect(page.locator("#failure")).to_be_visible()
    expect(page.locator(".message.user .plain")).to_have_text(["One", "Two"])
    expect(page.locator("#question")).to_have_value("Dos")
    expect(page.locator("#edited")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    page.press("#question", "Enter")
    expect(page.locator(".message.user .plain")).to_have_text(["One", "Dos"])
    expect(page.locator("#question")).to_have_value("a draft")


def test_a_conversation_is_exported_as_markdown(page: Page, server: PageServer) -> None:
    server.answer(THINKS + MARKDOWN)
    expect(page.locator("#export")).to_be_disabled()
    ask(page, "Reverse a string!")

    with page.expect_download() as waiting:
        page.click("#export")

    text = Path(waiting.value.path()).read_text(encoding="utf-8")
    assert waiting.value.suggested_filename == "Reverse-a-string.md"
    assert text.startswith("# Reverse a string!\n\n## You\n\nReverse a string!\n\n## Answer\n\n> ")
    assert text.strip().endswith(MARKDOWN.strip())


def test_other_fields_are_sent_and_the_fields_of_the_page_refused(page: Page) -> None:
    sent = bodies(page)
    settle(page, other_fields='{"top_p": 0.9, "seed": 1, "stop": ["END"]}')

    script = copied(page, "#copy-python", "Hi")

    assert [sent[0][name] for name in ("top_p", "seed", "stop")] == [0.9, 1, ["END"]]
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=COPY_S, check=True
    )
    assert ran.stdout == "Hello!\n"
    page.click("#open-settings")
    for text, error in (
        ("{", "The other fields are not JSON"),
        ("[1]", "The other fields are not a JSON object"),
        ('{"n": 2, "stream": false}', "The page sets n, stream itself"),
    ):
        page.fill("#other-fields", text)
        page.click("#save-settings")
        expect(page.locator("#settings-error")).to_contain_text(error)
        expect(page.locator("#other-fields")).to_be_focused()


def test_the_words_about_the_speed_need_no_mouse(page: Page) -> None:
    ask(page, "Hi")

    page.locator(".stats").press("Enter")

    expect(page.locator("#hint")).to_contain_text("A token is a word or a piece of a word.")


def test_a_long_title_ends_with_an_ellipsis(page: Page) -> None:
    ask(page, "What do the four seasons of the year have to do with the axis of the earth?")

    title = "What do the four seasons of the year have to do with the…"
    expect(page.locator("#title")).to_have_text(title)
    expect(page.locator(".chat-name")).to_have_text(title)


@pytest.mark.parametrize(("width", "is_focused"), [(360, False), (900, True), (1600, True)])
def test_the_input_is_focused_only_on_wide_screens_in_the_chat_view(
    browser: Browser, server: PageServer, width: int, is_focused: bool
) -> None:
    with window(browser, width) as page:
        open_page(page, server.url)
        assert page.evaluate("document.activeElement.id") == ("question" if is_focused else "")
        page.goto(f"{server.url}/#server")
        page.reload()
        expect(page.locator("#server-view")).to_be_visible()
        assert page.evaluate("document.activeElement.id") == ""


def test_escape_closes_a_dialog_before_it_stops_an_answer(page: Page, server: PageServer) -> None:
    server.answer(LONG, pace_s=0.01)
    send(page, "Tell")
    expect(answers(page)).to_contain_text("number 1")
    page.click("#open-settings")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#send")).to_have_text("Stop")

    page.keyboard.press("Escape")

    expect(page.locator(".note")).to_have_text("You stopped this answer.")


def test_a_deleted_conversation_does_not_return_with_its_answer(
    page: Page, server: PageServer
) -> None:
    ask(page, "First")
    server.answer(LONG, pace_s=0.01)
    send(page, "Tell")
    expect(answers(page).last).to_contain_text("number 1")

    page.click("[aria-label='Delete First']")

    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".chat-name")).to_have_count(0)
    server.answer("Hello!")
    ask(page, "Next")
    expect(page.locator(".chat-name")).to_have_text(["Next"])


def test_an_abandoned_answer_does_not_end_the_next_answer(page: Page, server: PageServer) -> None:
    server.answer(LONG, pace_s=0.01)
    send(page, "First")
    expect(answers(page)).to_contain_text("number 1")

    page.evaluate(
        """() => {
            document.getElementById("new-chat").click();
            document.getElementById("question").value = "Second";
            document.getElementById("ask").requestSubmit();
        }"""
    )

    expect(answers(page)).to_contain_text("number 2")
    expect(page.locator("#send")).to_have_text("Stop")
    expect(page.locator(".message.user .plain")).to_have_text("Second")
    page.click("#send")
    expect(page.locator(".chat-name")).to_have_text(["Second", "First"])


def test_browser_storage_is_bounded(page: Page) -> None:
    kept = page.evaluate(
        """async () => {
            const storage = await import("./page/files/storage.js");
            const chat = (id, content) => ({ id, messages: [{ role: "user", content }] });
            for (let i = 0; i < 60; i++) storage.saveConversation(chat(`c${i}`, "x"));
            const count = storage.conversations().length;
            const isTooLongKept = storage.saveConversation(chat("long", "x".repeat(500001)));
            // Fifty of 400,000 characters are more than a browser gives.
            let kept = true;
            for (let index = 0; index < 50; index++) {
                kept &&= storage.saveConversation(chat(`d${index}`, "x".repeat(400000)));
            }
            return [count, isTooLongKept, kept, storage.conversations()[0].id];
        }"""
    )

    assert kept == [50, False, True, "d49"]


def test_corrupt_storage_does_not_break_the_page(page: Page) -> None:
    page.evaluate(
        """() => {
            localStorage.setItem("gaudiserve:/:chat:bad", "{");
            localStorage.setItem("gaudiserve:/:chat:odd", '{"messages": 3}');
            localStorage.setItem("gaudiserve:/:settings", "[");
        }"""
    )
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")

    ask(page, "Hi")

    expect(answers(page)).to_have_text("Hello!")


def test_a_tool_call_is_folded_and_the_next_message_is_its_result(
    page: Page, server: PageServer
) -> None:
    sent = bodies(page)
    settle(page, tools=TOOLS)
    server.answer(TOOL_CALL, "It is warm.")

    ask(page, "Weather?")

    expect(page.locator(".calls summary")).to_have_text("Tool call: get_weather")
    expect(page.locator(".calls .plain")).to_be_hidden()
    page.click(".calls summary")
    expect(page.locator(".calls .plain")).to_contain_text('"city": "Paris"')
    expect(page.locator("#question")).to_have_attribute("placeholder", "Result of get_weather")
    ask(page, "25 degrees")
    expect(answers(page).last).to_have_text("It is warm.")
    *_, called, result = sent[1]["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {
        "role": "tool",
        "content": "25 degrees",
        "tool_call_id": called["tool_calls"][0]["id"],
    }


def test_a_truncated_tool_call_is_not_answered_by_the_next_message(page: Page) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": '{"ci'}}
    half = f"data: {json.dumps({'choices': [{'delta': {'tool_calls': [call]}}]})}\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=half),
    )
    ask(page, "Weather?")
    expect(page.locator(".note")).to_have_text("This answer is not complete.")
    page.unroute("**/v1/chat/completions")
    sent = bodies(page)

    ask(page, "Never mind")

    expect(answers(page).last).to_have_text("Hello!")
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "assistant", "user"]
    assert all("tool_calls" not in message for message in sent[0]["messages"])


def test_the_view_scrolls_with_an_answer_only_from_the_end_of_the_list(
    page: Page, server: PageServer
) -> None:
    settle(page, max_tokens="20000")
    server.answer(LONG.replace(". ", ".\n\n"), pace_s=0.002)
    messages = page.locator("#messages")
    send(page, "Tell")
    expect(answers(page)).to_contain_text("number 40.")
    gap = "list => list.scrollHeight - list.scrollTop - list.clientHeight"
    assert messages.evaluate(gap) < 80
    messages.evaluate("list => { list.scrollTop = 100; }")
    expect(page.locator("#to-end")).to_be_visible()

    expect(answers(page)).to_contain_text("number 80.")

    assert messages.evaluate("list => list.scrollTop") == 100
    page.click("#to-end")
    expect(page.locator("#to-end")).to_be_hidden()
    expect(answers(page)).to_contain_text("number 120.")
    assert messages.evaluate(gap) < 80
    page.click("#send")


def test_the_copied_curl_command_works(page: Page, server: PageServer) -> None:
    command = copied(page, "#copy-curl", """It's "$HOME" \\ `id`""")

    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=COPY_S, check=True
    )

    answer = json.loads(ran.stdout)
    assert answer["choices"][0]["message"]["content"] == "Hello!"
    prompt = server.client.queues[-1].prompt
    asked = page.evaluate(
        """async (ids) => {
        const sent = { method: "POST", headers: { "Content-Type": "application/json" } };
        const body = JSON.stringify({ tokens: ids });
        return (await (await fetch("detokenize", { ...sent, body })).json()).prompt;
    }""",
        prompt,
    )
    assert """It's "$HOME" \\ `id`""" in asked


def test_the_copied_python_script_works(page: Page, server: PageServer) -> None:
    settle(page, tools=TOOLS, temperature="0.5")
    script = copied(page, "#copy-python", "It's \"é\" \\ \n'''x'''")

    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=COPY_S, check=True
    )

    assert ran.stdout == "Hello!\n"


def test_the_copied_python_script_prints_tool_calls(page: Page, server: PageServer) -> None:
    settle(page, tools=TOOLS)
    server.answer("Hello!", TOOL_CALL)
    script = copied(page, "#copy-python", "Weather?")

    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=COPY_S, check=True
    )

    assert ran.stdout.startswith("get_weather({") and "Paris" in ran.stdout


def copied(page: Page, button: str, question: str) -> str:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, question)
    page.click(button)
    expect(page.locator("#hint")).to_contain_text("Copied as")
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def test_copied_commands_contain_a_key_variable_only_if_the_page_has_a_key(page: Page) -> None:
    made = page.evaluate(
        """async () => {
            const { curl, lastRequest, python } = await import("./page/files/snippets.js");
            const body = lastRequest({ model: "m", messages: [], max_tokens: 1 });
            return [curl("u", body, true), python("u", body, true), curl("u", body, false)];
        }"""
    )

    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in made[0]
    assert 'os.environ["OPENAI_API_KEY"]' in made[1]
    assert (
        "OPENAI_API_KEY" not in made[2] and '"content": "What is the capital of Japan?"' in made[2]
    )


def test_enter_that_ends_a_composition_sends_nothing(page: Page) -> None:
    sent = bodies(page)
    page.fill("#question", "にほん")
    key = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true})"

    page.evaluate(f"document.getElementById('question').dispatchEvent({key})")

    assert page.input_value("#question") == "にほん" and not sent


def test_the_chat_works_with_the_keyboard_alone(page: Page) -> None:
    names = []
    for _ in range(20):
        names.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")

    first = names.index("skip")
    assert names[0] == "question"
    assert names[first : first + 4] == ["skip", "to-chat", "to-server", "new-chat"]
    page.focus("#skip")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    assert {"messages", "example", "question", "open-settings", "send"} <= set(names)
    page.focus("#question")
    page.keyboard.type("Two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .plain")).to_have_text("Two\nlines")
    expect(page.locator("#send")).to_have_text("Send")
    page.focus(".retry")
    page.keyboard.press("Enter")
    expect(page.locator("#messages")).to_be_focused()
    expect(page.locator("#send")).to_have_text("Send")
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()


def test_a_conversation_that_is_not_saved_says_so_until_the_notice_is_closed(page: Page) -> None:
    page.evaluate(FILL_STORAGE)
    page.clock.install()
    notice = page.locator("#unsaved")

    ask(page, "Hi")
    page.clock.fast_forward(60_000)
    expect(notice).to_contain_text("This conversation is not saved")
    notice.get_by_role("button").click()
    ask(page, "Again")

    expect(notice).to_be_hidden()
    page.click("#new-chat")
    ask(page, "Another")
    expect(notice).to_contain_text("This conversation is not saved")


def test_the_notice_ends_when_the_conversation_is_saved(page: Page) -> None:
    page.evaluate(FILL_STORAGE)
    ask(page, "Hi")
    expect(page.locator("#unsaved")).to_be_visible()

    page.evaluate("() => { Storage.prototype.setItem = window.put; }")
    ask(page, "Again")

    expect(page.locator("#unsaved")).to_be_hidden()


def test_enter_on_a_phone_begins_a_line(browser: Browser, server: PageServer) -> None:
    server.answer("Hello!")
    with window(browser, 360, is_touch=True) as page:
        open_page(page, server.url)

        page.fill("#question", "one")
        page.press("#question", "Enter")
        page.locator("#question").press_sequentially("two")

        expect(page.locator("#question")).to_have_value("one\ntwo")
        page.tap("#send")
        expect(answers(page)).to_have_text("Hello!")


def test_chats_are_found_by_their_words_and_renamed(page: Page) -> None:
    ask(page, "First question")
    page.click("#new-chat")
    ask(page, "Second question")
    names = page.locator(".chat-name")

    page.fill("#find-chat", "FIRST")
    expect(names).to_have_text(["First question"])
    page.fill("#find-chat", "third")
    expect(page.locator("#no-chat")).to_have_text("No chat has these words.")
    page.fill("#find-chat", "")
    page.get_by_role("button", name="Rename Second question").click()
    page.fill("#chat-title", "Renamed")
    page.press("#chat-title", "Enter")

    expect(names.first).to_have_text("Renamed")
    expect(page.locator("#title")).to_have_text("Renamed")
    assert page.evaluate("document.activeElement.ariaLabel") == "Rename Renamed"
    page.reload()
    expect(names).to_have_text(["Renamed", "First question"])


def test_a_renamed_chat_keeps_its_name_when_its_first_question_is_edited(page: Page) -> None:
    ask(page, "First question")
    page.get_by_role("button", name="Rename First question").click()
    page.fill("#chat-title", "Kept")
    page.press("#chat-title", "Enter")

    page.get_by_role("button", name="Edit").click()
    ask(page, "Other question")

    expect(page.locator("#title")).to_have_text("Kept")


def test_the_theme_is_kept_in_the_browser(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)

    page.click("#open-settings")
    page.select_option("#theme", "dark")
    page.click("#save-settings")

    dark = page.evaluate(colour)
    assert dark != light
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    assert page.evaluate(colour) == dark
    page.click("#open-settings")
    page.select_option("#theme", "auto")
    page.click("#save-settings")
    assert page.evaluate(colour) == light
