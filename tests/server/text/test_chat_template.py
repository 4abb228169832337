"""Chat templates render as in transformers, and cannot block the server."""

import asyncio
import contextlib
import gc
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import text_folders
from core_waits import core_wait_s
from delays import least_awaited
from releases import transformers_before
from transformers import PreTrainedTokenizerFast
from waits import WAIT_S, until

from config.errors import ConfigError, Overloaded, UserError
from config.fair_threads import current_client
from config.malloc import trim_memory
from engine.process.isolation import ForkServer
from server.text import chat_template
from server.text.chat_template import (
    ChatTemplate,
    _InlineWatchdog,
    may_run_inline,
    read_template,
)
from server.text.control_tokens import ControlMarker
from server.text.isolated_template import isolated_templates
from server.text.messages import MAX_ARGUMENTS_CHARACTERS
from server.text.sandbox import MAX_WRITTEN_ITEMS
from server.text.template_renderer import Renderer, TextTooLong, TooSlow

CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Features of Llama 2's template: bos, trim, checked alternation, macros, loop controls.
STRICT = """{{ bos_token }}
{%- macro show(text) %}{{ '[' ~ text | trim ~ ']' }}{% endmacro %}
{% for message in messages %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant') }}
    {% endif %}
    {% if message.content == 'skip' %}
        {% continue %}
    {% endif %}
    {% generation %}
{{ show(message.content) }}{{ eos_token if message.role == 'assistant' }}
    {% endgeneration %}
{% endfor %}
{% if documents %}
{% for document in documents %}
{{ document.title }}: {{ document['text'] }}
{% endfor %}
{% endif %}"""

TOOLS = """{% set ns = namespace(count=0, first=none) %}
{% if tools %}
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{% endfor %}
</tools>
{% endif %}
{% for message in messages %}
{% if message.role == 'assistant' and message.tool_calls is defined %}
{% for call in message.tool_calls %}
{% set ns.count = ns.count + 1 %}
<call {{ ns.count }}>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }};{% endfor %}
</call>
{% endfor %}
{% elif message.role == 'tool' %}
<result {{ message.tool_call_id }}>{{ message.content }}</result>
{% else %}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}
{{ message.role }}: {{ message.content | default('nothing') }} & <{{ message.content | length }}>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %} quick{% endif %}{% endif %}"""  # noqa: E501 - lines of a template are what they are

PARTS_ONLY = """{% for message in messages %}<{{ message.role }}>
{%- for part in message.content if part.type == 'text' %}{{ part.text }}|{% endfor %}
{% endfor %}"""

EITHER = """{% for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part['text'] | trim }}+{% endfor %}{% endif %}
{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "strict": STRICT, "tools": TOOLS}
HELLO = [{"role": "user", "content": " Hello <b>you</b> & é 你好 "}]
TALK = [
    *HELLO,
    {"role": "assistant", "content": "Hi\n"},
    {"role": "user", "content": "skip"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <cold> & é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLED = [
    {"role": "user", "content": "Is it cold?"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "a1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a1", "content": "-3 °C"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "-3 is cold"},
    {"role": "user", "content": "Thanks"},
]


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=text_folders.byte_level(), bos_token="<s>", eos_token="</s>"
    )
    rendered = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    assert isinstance(rendered, str)
    return rendered


def ours(source: str | dict[str, str] | None, **limits: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **limits)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [HELLO, TALK], ids=["hello", "talk"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
async def test_prompts_equal_transformers(
    name: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    expected = theirs(TEMPLATES[name], messages, add_generation_prompt=add_generation_prompt)

    rendered = await ours(TEMPLATES[name]).render(
        messages, add_generation_prompt=add_generation_prompt
    )

    assert rendered == expected


async def test_tools_calls_results_and_reasoning_render_like_transformers() -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "add_generation_prompt": True}
    expected = theirs(TOOLS, CALLED, **options, enable_thinking=False)

    rendered = await ours(TOOLS).render(CALLED, **options, kwargs={"enable_thinking": False})

    assert rendered == expected


async def test_documents_reach_the_template() -> None:
    documents = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]
    expected = theirs(STRICT, HELLO, documents=documents)

    rendered = await ours(STRICT).render(HELLO, documents=documents, add_generation_prompt=False)

    assert rendered == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "text",
    [
        "The answer is",
        "Trailing space ",
        pytest.param(
            "  both  \n",
            marks=pytest.mark.skipif(
                transformers_before("4.57"),
                reason="transformers before 4.57 drops the blanks at the end of a final message "
                "that begins with some, though the template kept both",
            ),
        ),
    ],
)
async def test_a_final_message_is_continued_like_in_transformers(name: str, text: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": text}]
    expected = theirs(TEMPLATES[name], messages, continue_final_message=True)

    rendered = await ours(TEMPLATES[name]).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )

    assert rendered == expected


async def test_arguments_written_as_json_text_reach_the_template_as_an_object() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"city": "Zürich", "days": 3}'}}]
    messages = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": calls}]

    rendered = await ours(TOOLS).render(messages)

    assert 'city="Zürich";days=3;' in rendered
    assert calls[0]["function"]["arguments"] == '{"city": "Zürich", "days": 3}'


@pytest.mark.parametrize(
    "arguments",
    ["", " ", "{", '{"a": "b', '{"a": 1}}', "null", "[]", '"x"', "5", "[" * 100_000, None, [], 5],
)
async def test_arguments_of_earlier_calls_other_than_objects_become_empty(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [HELLO[0], {"role": "assistant", "tool_calls": [call]}]

    rendered = await ours(TOOLS).render(messages)

    assert "<call 1>f\n</call>" in rendered


async def test_calls_of_custom_tools_have_one_argument() -> None:
    call = {"type": "custom", "id": "c", "custom": {"name": "patch", "input": "*** Begin"}}
    messages = [HELLO[0], {"role": "assistant", "tool_calls": [call]}]

    rendered = await ours(TOOLS).render(messages)

    assert 'input="*** Begin";' in rendered


LLAMA = """{% for m in messages %}{% if 'tool_calls' in m %}
{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""


async def test_an_empty_list_of_calls_is_dropped() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "yes", "tool_calls": []}]

    rendered = await ours(LLAMA).render(messages)

    assert "[assistant]yes" in rendered


async def test_unknown_parts_of_earlier_answers_are_dropped() -> None:
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]
    messages = [*HELLO, {"role": "assistant", "content": parts}]

    rendered = await ours(LLAMA).render(messages)

    assert rendered.endswith("[assistant]yes")


MISTRAL = """{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}
{% if c.id | length != 9 %}{{ raise_exception('IDs should have length 9!') }}{% endif %}
<{{ c.id }}>{% endfor %}{% if m.role == 'tool' %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"""


@pytest.mark.parametrize("given", ["call_0123456789", "toolu_1", "abcDEF123"])
async def test_call_ids_are_shortened_for_templates_that_require_it(
    given: str,
) -> None:
    call = {"id": given, "function": {"name": "f", "arguments": "{}"}}
    messages = [
        HELLO[0],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": given, "content": "x"},
    ]

    rendered = await ours(MISTRAL).render(messages)

    found = re.findall(r"<(\w+)>", rendered)
    assert len(found) == 2 and len(set(found)) == 1 and len(found[0]) == 9
    assert (found[0] == given) == (len(given) == 9)


SYSTEM_FIRST = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}
{% endif %}{{ ' [calls]' if m.tool_calls else ' [' ~ m.role ~ ']' ~ m.content }}{% endfor %}"""
SYSTEM_DROPPED = re.sub("{{ raise.*}}", "{% continue %}", SYSTEM_FIRST)


def said(words: str) -> list[dict[str, Any]]:
    """Messages from `role:content` words."""
    messages: list[dict[str, Any]] = []
    for word in words.split():
        role, content = word.split(":")
        if role == "calls":
            calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            message = {"role": role, "content": content}
            messages.append({**message, "tool_call_id": "1"} if role == "tool" else message)
    return messages


@pytest.mark.parametrize("template", [SYSTEM_FIRST, SYSTEM_DROPPED])
@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("system:S developer:D user:a", "[system]S+D [user]a"),
        ("developer:D developer:E user:a", "[system]D+E [user]a"),
        ("system:I user:a developer:D", "[system]I+D [user]a"),
        ("user:a assistant:b developer:D user:c", "[system]D [user]a [assistant]b [user]c"),
        ("system:S user:a system:T developer:D", "[system]S+T+D [user]a"),
        ("system:S user:a system:T", "[system]S [user]a+T"),
        ("user:a system:T", "[user]a+T"),
        ("user:a system:T assistant:b", "[user]a+T [assistant]b"),
        ("user:a assistant:b system:T user:c", "[user]a [assistant]b [user]T+c"),
        ("user:a assistant:b system:T", "[user]a [assistant]b [user]T"),
        ("user:a assistant:b system:T assistant:c", "[user]a [assistant]b [user]T [assistant]c"),
        ("user:a calls: tool:r tool:s system:T", "[user]a [calls] [tool]r [tool]s+T"),
        ("user:a calls: system:T tool:r tool:s", "[user]a [calls] [tool]r [tool]s+T"),
        (
            "user:a calls: system:T tool:r user:b",
            "[user]a [calls] [tool]r [user]T+b",
        ),
    ],
)
async def test_late_system_messages_move_to_a_place_that_the_template_accepts(
    template: str, sent: str, shown: str
) -> None:
    rendered = await ours(template).render(said(sent))

    assert " ".join(rendered.replace("\n\n", "+").split()) == shown


async def test_late_system_messages_stay_if_the_template_renders_them() -> None:
    rendered = await ours(LLAMA).render(said("system:S user:a developer:D assistant:b system:T"))

    assert rendered == "[system]S[user]a[system]D[assistant]b[system]T"


async def test_long_arguments_are_refused_before_they_are_decoded() -> None:
    text = "[" * (MAX_ARGUMENTS_CHARACTERS + 1)
    calls = [{"function": {"name": "f", "arguments": text}}]

    with pytest.raises(UserError) as caught:
        await ours(TOOLS).render([HELLO[0], {"role": "assistant", "tool_calls": calls}])

    assert caught.value.message == (
        f"the arguments of a tool call have {len(text)} characters, at most "
        f"{MAX_ARGUMENTS_CHARACTERS} are allowed"
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_past_reasoning_is_accepted_with_both_names(name: str) -> None:
    messages = [HELLO[0], {"role": "assistant", "content": "Hi", name: "greet back"}]

    rendered = await ours(TOOLS).render(messages)

    assert "<think>greet back</think>" in rendered


async def test_developer_messages_are_system_messages() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]

    rendered = await ours(CHATML).render(messages)

    assert rendered.startswith("<|im_start|>system\nBe brief.<|im_end|>")


async def test_text_parts_are_joined_for_a_template_that_expects_a_string() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " world"}]

    rendered = await ours(CHATML).render([{"role": "user", "content": parts}])
    expected = await ours(CHATML).render([{"role": "user", "content": "Hello world"}])

    assert rendered == expected


async def test_a_template_that_iterates_over_parts_gets_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": parts}]

    rendered = await ours(PARTS_ONLY).render(messages)

    assert rendered == "<system>sys|<user>one|two|"


async def test_a_template_that_accepts_strings_and_parts_gets_content_as_sent() -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": " sys"}, {"role": "user", "content": parts}]

    rendered = await ours(EITHER).render(messages, add_generation_prompt=False)

    assert rendered == theirs(EITHER, messages)


async def test_parts_other_than_text_are_refused_by_name() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

    with pytest.raises(UserError, match="'image_url' is not supported"):
        await ours(CHATML).render(messages)


async def test_template_refusals_are_user_errors() -> None:
    messages = [*HELLO, *HELLO]

    with pytest.raises(UserError, match="Roles must alternate") as caught:
        await ours(STRICT).render(messages)

    assert caught.value.param == "messages"


UNCOMPILED = {
    "digits": "{{ %s }}" % ("9" * 100_000),
    "hexadecimal": "{{ 0x%s }}" % ("f" * 1_000_000),
    "loops": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
}
"""Templates that cannot be compiled."""


@pytest.mark.parametrize("name", UNCOMPILED)
async def test_an_invalid_model_template_fails_requests(name: str) -> None:
    template = ours(UNCOMPILED[name])

    assert not template.uses_generic_tools()
    with pytest.raises(UserError, match="chat template rejected the request"):
        await template.render(HELLO)


@pytest.mark.parametrize(
    "broken",
    [
        *("{% for", "{{ messages.x.y }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"),
        UNCOMPILED["digits"],
    ],
)
async def test_broken_and_unsafe_templates_are_user_errors(broken: str) -> None:
    with pytest.raises(UserError, match="chat template rejected the request"):
        await ours(CHATML).render(HELLO, template=broken)


async def test_templates_cannot_modify_their_arguments() -> None:
    with pytest.raises(UserError):
        await ours("{{ messages.append(1) }}").render(HELLO)


async def test_lone_surrogates_in_messages_become_replacement_characters() -> None:
    rendered = await ours("{{ messages[0].content }}").render(
        [{"role": "user", "content": "\ud800"}]
    )

    assert rendered == "\ufffd"


async def test_named_templates_are_selected_like_in_transformers() -> None:
    template = ours(
        {"default": "plain", "tool_use": "with {{ tools[0].function.name }}", "rag": "rag"}
    )

    chosen = [
        await template.render(HELLO),
        await template.render(HELLO, tools=[WEATHER]),
        await template.render(HELLO, template="rag"),
    ]

    assert chosen == ["plain", "with weather", "rag"]


async def test_a_missing_template_is_reported_with_a_remedy() -> None:
    with pytest.raises(UserError, match="--chat-template"):
        await ours(None).render(HELLO)


async def test_kwargs_reach_the_template_but_may_not_replace_fields() -> None:
    template = ours("{{ mood }} {{ bos_token }}")

    rendered = await template.render(HELLO, kwargs={"mood": "fine", "bos_token": "B"})
    with pytest.raises(UserError) as caught:
        await template.render(HELLO, kwargs={"messages": []})

    assert rendered == "fine B"
    assert caught.value.param == "chat_template_kwargs"


async def test_strftime_now_uses_the_clock_of_the_server() -> None:
    template = ours(
        "{{ strftime_now('%d %b %Y') }}", renderer=Renderer(now=lambda: datetime(2026, 2, 3))
    )

    assert await template.render(HELLO) == "03 Feb 2026"


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def test_an_endless_template_is_stopped_and_its_thread_renders_the_next_template() -> None:
    template = ours(CHATML, time_limit_s=0.2, threads=1)

    with pytest.raises(UserError, match=r"0\.2 s") as caught:
        await asyncio.wait_for(template.render(HELLO, template=SLOW), WAIT_S)
    rendered = await asyncio.wait_for(template.render(HELLO), WAIT_S)

    assert caught.value.param == "messages"
    assert "Hello" in rendered


async def test_a_rendering_that_gets_no_processor_may_be_sent_again() -> None:
    template = ours(CHATML, time_limit_s=0.1, threads=1)
    resumes = threading.Event()

    def mark(_: Any) -> Any:
        resumes.wait(WAIT_S)
        return _

    with pytest.raises(Overloaded, match=r"longer than 1 s"):
        await template.render(HELLO, mark=mark)
    resumes.set()

    assert "Hello" in await asyncio.wait_for(template.render(HELLO), WAIT_S)


def test_a_template_that_is_probed_slowly_on_a_busy_machine_shows_its_tools() -> None:
    template = ours("{{ messages[0].content }}", time_limit_s=0.1)
    shows_tools = template._renderer.shows_tools

    def slow(source: str) -> bool:
        time.sleep(0.2)
        return shows_tools(source)

    template._renderer.shows_tools = slow  # type: ignore[method-assign]

    assert template.uses_generic_tools()


async def test_a_slow_template_does_not_block_the_loop() -> None:
    template = ours(SLOW, time_limit_s=0.3)

    async def longest_gap_s() -> float:
        gaps_s = []
        render = asyncio.create_task(template.render(HELLO))
        while not render.done():
            before_s = time.monotonic() - core_wait_s()
            await asyncio.sleep(0.005)
            gaps_s.append(time.monotonic() - core_wait_s() - before_s)
        assert isinstance(render.exception(), UserError)
        return max(gaps_s)

    assert await least_awaited(longest_gap_s, 0.2) < 0.2


async def test_a_fast_template_renders_short_conversations_without_a_thread() -> None:
    template = ours(CHATML, time_limit_s=60, threads=1)
    for _ in range(3):
        await template.render(HELLO)
    slow = asyncio.create_task(template.render(HELLO, template=SLOW))
    await asyncio.sleep(0)

    rendered = await template.render(HELLO)
    was_slow = slow.done()

    assert "Hello" in rendered
    assert not was_slow
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_time_in_the_queue_does_not_count_towards_the_time_limit() -> None:
    template = ours(CHATML, time_limit_s=0.3, threads=1)
    slow = [asyncio.create_task(template.render(HELLO, template=SLOW)) for _ in range(2)]
    await asyncio.sleep(0)

    rendered = await template.render(HELLO)

    assert "Hello" in rendered
    assert all(
        isinstance(e, UserError) for e in await asyncio.gather(*slow, return_exceptions=True)
    )


async def test_slow_renderings_of_a_client_leave_a_thread_to_other_clients() -> None:
    template = ours(CHATML, time_limit_s=60, threads=2)

    async def render(client: str, source: str | None) -> str:
        current_client.set(client)
        return await template.render(HELLO, template=source)

    slow = [asyncio.create_task(render("slow", SLOW)) for _ in range(4)]
    await asyncio.sleep(0)
    rendered = await asyncio.create_task(render("other", None))

    assert "Hello" in rendered
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    template.close()


async def test_waiting_chats_of_a_client_do_not_lock_out_another_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MAX_PENDING", 4)
    template = ours(CHATML, time_limit_s=60, threads=2)

    async def render(client: str, source: str | None) -> str:
        current_client.set(client)
        return await template.render(HELLO, template=source)

    slow = [asyncio.create_task(render("slow", SLOW)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4 chats of this client wait or run, at most 4"):
        await asyncio.create_task(render("slow", SLOW))
    rendered = await asyncio.create_task(render("other", None))

    assert "Hello" in rendered
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    template.close()


async def test_a_cancelled_caller_stops_the_template() -> None:
    template = ours(SLOW, time_limit_s=60, threads=1)
    left = asyncio.create_task(template.render(HELLO))
    await asyncio.sleep(0.05)

    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    rendered = await asyncio.wait_for(template.render(HELLO, template=CHATML), WAIT_S)

    assert "Hello" in rendered


async def test_an_error_of_a_rendering_whose_caller_is_cancelled_at_its_end_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = ours(CHATML, time_limit_s=60, threads=1)
    begins, fails = threading.Event(), threading.Event()

    def mark(_: Any) -> Any:
        begins.set()
        fails.wait(WAIT_S)
        raise UserError("refused")

    left = asyncio.create_task(template.render(HELLO, mark=mark))
    await asyncio.to_thread(begins.wait, WAIT_S)
    fails.set()
    # Blocks the loop until the thread has ended the rendering and the loop has to handle the end.
    template._threads.shutdown(wait=True)
    asyncio.get_running_loop().call_soon(left.cancel)
    await asyncio.wait([left], timeout=WAIT_S)
    del left
    gc.collect()

    assert "never retrieved" not in caplog.text


DOUBLING = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = GROW %}{% endfor %}"


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxx{% endfor %}{% endfor %}",
        DOUBLING.replace("GROW", "n.s + n.s"),
        DOUBLING.replace("GROW", "n.s ~ n.s"),
        DOUBLING.replace("GROW", "[n.s, n.s] | join"),
        DOUBLING.replace("GROW", "n.s.join(['', n.s, ''])"),
        DOUBLING.replace("GROW", "n.s | replace('a', n.s)"),
        DOUBLING.replace("GROW", "n.s.replace('a', n.s)"),
        DOUBLING.replace("GROW", "'%s%s' % (n.s, n.s)"),
        DOUBLING.replace("GROW", "n.s | indent(n.s, true)"),
        DOUBLING.replace("GROW", "[n.s, n.s]") + "{{ n.s }}",
        DOUBLING.replace("GROW", "[n.s, n.s]") + "{{ n.s | tojson }}",
        DOUBLING.replace("GROW", "[n.s, n.s]") + "{{ n.s | string }}",
        DOUBLING.replace("GROW", "[n.s, n.s]") + "{{ n.s ~ '' }}",
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * ['x'] }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ [] | batch(9999999999, 'x') | list }}",
    ],
)
async def test_output_bombs_end_at_the_output_limit(bomb: str) -> None:
    template = ours(bomb, renderer=Renderer(100_000))

    with pytest.raises(UserError, match=r"100000 characters|five digits"):
        await template.render(HELLO)


@pytest.mark.parametrize("grown", ["9 ** 99999", "n.s * n.s"])
async def test_large_numbers_are_refused(grown: str) -> None:
    square = "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = GROW %}{% endfor %}"

    with pytest.raises(UserError, match="too large"):
        await ours(square.replace("GROW", grown)).render(HELLO)


def test_the_chat_template_flag_accepts_a_file_or_the_template_text(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ 'é' }}", encoding="utf-8")

    from_file = read_template(str(tmp_path / "chat.jinja"))
    from_text = read_template("{{ messages }}")

    assert (from_file, from_text) == ("{{ 'é' }}", "{{ messages }}")


def test_the_error_names_a_missing_template_file() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.jinja'"):
        read_template("nowhere.jinja")
    with pytest.raises(ConfigError, match="it has more, at most 33554432 are allowed"):
        read_template("/dev/zero")


async def test_tools_that_a_template_would_drop_are_refused() -> None:
    # The template names tools, but not the tools of the request.
    template = ours(
        "{% for m in messages %}{{ m.content }}{{ m.tools }}{% endfor %}", generic_tools=False
    )

    with pytest.raises(UserError, match=r"does not render tools.*--tool-template auto") as caught:
        await template.render(HELLO, tools=[WEATHER])

    assert caught.value.param == "tools"
    assert not template.uses_generic_tools()


MOODY = "{% if 'slow' in messages[0].content %}" + SLOW + "{% endif %}{{ messages[0].content }}"


async def test_a_template_that_is_slow_for_some_contents_blocks_the_loop_only_briefly() -> None:
    assert await least_awaited(gap_beside_a_moody_template_s, 0.2) < 0.2


async def gap_beside_a_moody_template_s() -> float:
    """The longest gap of the loop, or twice the third longest if that is longer."""
    template = ours(MOODY, time_limit_s=0.3)
    for _ in range(3):
        await template.render(HELLO)
    compiled = template._renderer.cached(MOODY)
    assert compiled is not None and may_run_inline(compiled)
    gaps_s = []

    for _ in range(3):
        render = asyncio.create_task(template.render([{"role": "user", "content": "slow"}]))
        while not render.done():
            # CPU seconds of this process: other processes may use the same cores.
            before_s = time.process_time()
            await asyncio.sleep(0.001)
            gaps_s.append(time.process_time() - before_s)
        assert isinstance(render.exception(), UserError)

    assert await template.render(HELLO) == HELLO[0]["content"]
    assert not may_run_inline(compiled)
    template.close()
    # The rendering is stopped on the loop the first time, and later runs elsewhere.
    return max(max(gaps_s), 2 * sorted(gaps_s)[-3])


async def test_a_stopped_rendering_leaves_nothing_behind_on_its_thread() -> None:
    watch = _InlineWatchdog()
    endless = threading.Event()

    def spin(stop_after: int) -> str:
        while not endless.is_set():
            stop_after -= 1
            if not stop_after:
                return "done"
        return ""

    for place in range(30):
        # Some calls end by themselves at the moment when they would be stopped.
        with contextlib.suppress(TooSlow):
            watch.run(lambda count=place * 60_000 + 1: spin(count))  # type: ignore[misc]
        sum(range(10_000))

    with pytest.raises(TooSlow):
        watch.run(lambda: spin(-1))
    watch.close()


@pytest.fixture(scope="module")
def isolation() -> Iterator[ForkServer]:
    server = isolated_templates(None)
    server.start()
    yield server
    server.close()


GREEDY = [
    "{{ '{:{w}}'.format('x', w=10**10) }}",
    "{% set n = namespace(all=[]) %}{% for i in range(99999) %}"
    "{% set n.all = n.all + ['x' * 1000000 ~ i] %}{% endfor %}",
    "{{ [1] | slice(10**9) | list | length }}",
    SLOW,
    "{{ lipsum.__globals__ }}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
]


@pytest.mark.parametrize(
    "operation",
    [
        "{{ ns.a == ns.b }}",
        "{{ 1 if ns.a in [ns.b] }}",
        "{{ {ns.t: 1} }}",
        "{{ {}[ns.t] }}",
        "{{ [ns.a, ns.b] | sort }}",
        "{{ [ns.t, ns.t] | unique | list }}",
        "{{ [ns.a].index(ns.b) }}",
        "{{ {}.get(ns.t) }}",
        "{{ ns.a is eq(ns.b) }}",
        "{{ [ns.a] | select('equalto', ns.b) | list }}",
    ],
)
async def test_a_comparison_of_nested_values_is_refused_before_it_runs(operation: str) -> None:
    nested = (
        "{% set ns = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(40) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
        "{% endfor %}"
    )
    template = ours(nested + operation, time_limit_s=20.0)

    # A comparison that runs exceeds the time limit.
    with pytest.raises(UserError, match="compares a value of more than 262144 items"):
        await template.render(HELLO)


@pytest.mark.parametrize(
    "template", ["{{ messages[0] | tojson }}", "{{ messages[0].x }}", "{{ messages[0].content }}"]
)
async def test_a_value_with_too_many_items_is_refused_before_it_is_rendered(template: str) -> None:
    many = [1] * MAX_WRITTEN_ITEMS
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": many}}}
    messages = [{"role": "user", "content": "hi", "x": many}]
    if "content" in template:
        # The template does not render calls.
        messages.append({"role": "assistant", "tool_calls": [call]})

    with pytest.raises(UserError, match=f"writes a value of more than {MAX_WRITTEN_ITEMS} items"):
        await ours(template, time_limit_s=20.0).render(messages)


async def test_comparisons_give_the_results_of_jinja() -> None:
    template = ours(
        "{% set x = [1, 2] %}{{ x == [1, 2] }} {{ 1 < 2 <= 2 }} {{ 'a' in {'a': 1} }} "
        "{{ {'b': x}['b'] == x }} {{ x | sort(reverse=true) }} {{ 2 is gt 1 }} {{ x is iterable }}"
    )

    rendered = await template.render(HELLO)

    assert rendered == "True True True True [2, 1] True True"


@pytest.mark.parametrize("greedy", GREEDY, ids=range(len(GREEDY)))
async def test_a_hostile_request_template_neither_blocks_the_server_nor_uses_its_memory(
    isolation: ForkServer, greedy: str
) -> None:
    template = ours(CHATML, isolation=isolation)
    # Wait until the fork server has started.
    await template.render(HELLO, template="{{ messages[0].content }}")
    process = psutil.Process()
    before = process.memory_info().rss

    async def delay_s() -> float:
        """The second longest gap of the loop, or 1/20 of the whole time if that is longer."""
        began_s, gaps_s = time.monotonic(), [0.0]
        render = asyncio.create_task(template.render(HELLO, template=greedy))
        while not render.done():
            before_s = time.monotonic() - core_wait_s()
            await asyncio.sleep(0.005)
            gaps_s.append(time.monotonic() - core_wait_s() - before_s)
        # Overloaded on a busy machine, where the wall time ends before the CPU time.
        assert isinstance(render.exception(), UserError | Overloaded)
        return max(sorted(gaps_s)[-2], (time.monotonic() - began_s) / 20)

    assert await least_awaited(delay_s, 0.1) < 0.1
    assert process.memory_info().rss - before < 50 * 2**20
    assert "Hello" in await template.render(HELLO)


async def test_accepted_roles_are_the_apis_and_the_templates_roles() -> None:
    critic = [{"role": "critic", "content": "bad"}]

    with pytest.raises(
        UserError, match=r"messages\[0\].role is 'critic', .*system.* tool"
    ) as error:
        await ours(CHATML).render(critic)
    named = await ours("{% if messages[0].role == 'critic' %}yes{% endif %}").render(critic)

    assert error.value.param == "messages[0].role"
    assert named == "yes"


async def test_the_models_own_template_has_a_limit_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 64 * 2**20
    monkeypatch.setattr(chat_template, "MAX_GROWTH_BYTES", limit)
    template = ours(GREEDY[1], time_limit_s=30.0)
    process = psutil.Process()
    before = process.memory_info().rss

    with pytest.raises(UserError, match="more than the 64 MiB"):
        await template.render(HELLO)

    # The thread may still hold the last text when the caller receives its error.
    def is_freed() -> bool:
        gc.collect()
        trim_memory()
        return process.memory_info().rss - before < limit

    await until(is_freed)
    template.close()


async def test_templates_of_another_client_do_not_wait_for_slow_templates(
    isolation: ForkServer,
) -> None:
    template = ours(CHATML, isolation=isolation)
    slow = [
        asyncio.create_task(template.render(HELLO, template=SLOW, client="slow")) for _ in range(6)
    ]
    await asyncio.sleep(0.01)

    rendered = await template.render(HELLO, template="{{ messages[0].content }}", client="other")

    assert "Hello" in rendered
    assert sum(task.done() for task in slow) <= 1
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_isolated_prompts_equal_transformers(isolation: ForkServer, name: str) -> None:
    template = ours(CHATML, isolation=isolation)
    tools = [WEATHER] if name == "tools" else None
    messages = CALLED if name == "tools" else TALK

    rendered = await template.render(messages, tools=tools, template=TEMPLATES[name])

    assert rendered == theirs(TEMPLATES[name], messages, tools=tools, add_generation_prompt=True)


async def test_isolated_template_refusals_are_user_errors(
    isolation: ForkServer,
) -> None:
    template = ours(CHATML, isolation=isolation)

    with pytest.raises(UserError, match="Only users"):
        await template.render(HELLO, template="{{ raise_exception('Only users') }}")
    with pytest.raises(TextTooLong):
        await template.render(
            HELLO, template="{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}"
        )


async def test_control_tokens_in_messages_are_marked_in_isolated_rendering() -> None:
    marker = ControlMarker(["<|end|>"], [], "MARK")
    server = isolated_templates(marker)
    template = ours(CHATML, isolation=server)

    rendered = await template.render(
        [{"role": "user", "content": "a <|end|> b"}],
        template="{{ messages[0].content }}<|end|>",
        mark=marker.mark_texts,
    )

    assert rendered == "a <MARK|end|> b<|end|>"
    template.close()
