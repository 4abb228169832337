"""Renders conversations by Jinja templates, as transformers does, within the sandbox's bounds.

Runs wherever it is called: server/text/chat_template.py chooses the thread or the process.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import Template

from config.errors import UserError
from server.text.long_texts import without_lone_surrogates
from server.text.messages import (
    Message,
    cut_at_marker,
    joined_text,
    mark_continuation,
    normalize_messages,
)
from server.text.sandbox import Sandbox, TooMuchText
from server.text.tool_template import has_tool_messages, with_tools_as_text

MAX_CHARACTERS = 16 * 2**20
MAX_COMPILED = 32
"""Templates kept compiled: the model's own, and the latest that requests brought."""

_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_5c1e",
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}

TextMarker = Callable[[Any], Any]
"""Gives a copy of messages, or parts of them, with marks in some texts. Raises UserError."""


class TextTooLong(UserError):
    """The prompt has more characters than any may have."""


class TooSlow(BaseException):
    """Raised inside a rendering that is stopped. No template can catch it."""


class RenderRequest(msgspec.Struct, frozen=True):
    """What one rendering reads."""

    template: str
    """The template."""
    messages: list[Message]
    variables: dict[str, Any]
    """The caller's: tools, documents and variables."""
    builtins: dict[str, Any]
    """Ours: special tokens, add_generation_prompt."""
    continue_final_message: bool = False
    """Whether the prompt ends with the last message's text."""
    generic_tools: bool = True
    """Whether a template without a place for tools gets them as text."""


class Renderer:
    """Renders, with each template compiled once. Safe to call from any thread."""

    def __init__(
        self,
        max_characters: int = MAX_CHARACTERS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sandbox = Sandbox(max_characters, now)
        self._compiled: OrderedDict[str, CompiledTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, source: str) -> "CompiledTemplate | None":
        """A template that was compiled before."""
        return self._compiled.get(source)

    def shows_tools(self, source: str) -> bool:
        """Whether the template `source` has a place for tools. Raises what the template raises
        when it is compiled."""
        return self._compile(source).shows_tools()

    def render(
        self, conversation: RenderRequest, mark: TextMarker | None = None, *, is_timed: bool = False
    ) -> str:
        """The prompt. Raises UserError for whatever the template does not take, and TextTooLong.

        `mark` is called on all that the caller wrote, as the template will read it. `is_timed`:
        keep how long the template took.
        """
        given, options = conversation.variables, conversation.builtins
        try:
            compiled = self._compile(conversation.template)
            messages = normalize_messages(conversation.messages)
            if conversation.generic_tools and compiled.needs_generic_tools(messages, given):
                takes_system = compiled.takes_role("system")
                messages = with_tools_as_text(messages, given["tools"], takes_system=takes_system)
                given = {**given, "tools": None}
            elif given["tools"] and not compiled.shows_tools():
                raise UserError(
                    "the chat template has no place for tools; send none, or start the server "
                    "with another --chat-template or with --tool-template auto",
                    param="tools",
                )
            messages = compiled.fit(messages)
            if mark is not None:
                messages, given = mark(messages), mark(given)
            final = (
                mark_continuation(messages, conversation.template)
                if conversation.continue_final_message
                else None
            )
            began_s = time.thread_time()
            text = compiled.template.render(messages=messages, **{**options, **given})
            if is_timed:
                compiled.last_s = time.thread_time() - began_s
        except UserError:
            raise
        except TooMuchText as error:
            raise TextTooLong(f"the chat template: {error}", param="messages") from error
        except MemoryError as error:
            raise UserError("the chat template ran out of memory", param="messages") from error
        except Exception as error:
            # A template is a program of others: whatever it raises is its answer to the caller.
            reason = str(error)[:300] or type(error).__name__
            raise UserError(
                f"the chat template does not take this: {reason}", param="messages"
            ) from error
        return without_lone_surrogates(text if final is None else cut_at_marker(text, final))

    def _compile(self, source: str) -> "CompiledTemplate":
        with self._lock:
            if (known := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return known
        compiled = CompiledTemplate(self._sandbox.from_string(source), source)
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


class CompiledTemplate:
    """A template, and how it wants the content of each role: found out by trying, once."""

    def __init__(self, template: Template, source: str) -> None:
        self.template = template
        self._renders_calls = "tool_calls" in source
        # A chain of mappings, which Jinja would walk through for every prompt.
        template.globals = dict(template.globals)
        self.last_s: float | None = None
        """Processor time of the last rendering that was timed."""
        self.was_stopped = False
        """Whether a rendering on the event loop had to be stopped: none is begun there again."""
        self._takes: dict[str, tuple[bool, bool]] = {}
        self._shows_tools: bool | None = None

    def fit(self, messages: list[Message]) -> list[Message]:
        """Content as the template reads it: one text, unless it walks over parts itself."""
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                _, takes_parts = self._taken(message["role"])
                if not takes_parts:
                    message["content"] = joined_text(content)
            elif content:
                takes_text, takes_parts = self._taken(message["role"])
                if takes_parts and not takes_text:
                    message["content"] = [{"type": "text", "text": content}]
        return messages

    def shows_tools(self) -> bool:
        """Whether the prompt has what `tools` has."""
        if self._shows_tools is None:
            try:
                text = self.template.render(
                    messages=[{"role": "user", "content": "x"}],
                    tools=[_PROBE],
                    bos_token="",
                    eos_token="",
                )
                self._shows_tools = _PROBE["function"]["name"] in text
            except TooSlow:
                raise
            except Exception:  # it wants more than we give it here: the request will tell
                self._shows_tools = True
        return self._shows_tools

    def needs_generic_tools(self, messages: list[Message], given: dict[str, Any]) -> bool:
        """Whether there are tools, calls or results, and the template does not render them."""
        if not given["tools"] and (self._renders_calls or not has_tool_messages(messages)):
            return False
        return not self.shows_tools()

    def takes_role(self, role: str) -> bool:
        """Whether the prompt shows the text of a message of `role`."""
        return any(self._taken(role))

    def _taken(self, role: str) -> tuple[bool, bool]:
        """(whether a text shows in the prompt, whether each of two text parts does)."""
        if role not in self._takes:
            parts = [{"type": "text", "text": "probe-1"}, {"type": "text", "text": "probe-2"}]
            text = self._try(role, "probe-1")
            walked = self._try(role, parts)
            # A list that is printed as it is shows its texts in quotes.
            self._takes[role] = (
                "probe-1" in text,
                all(re.search(rf"(?<!['\"]){mark}", walked) for mark in ("probe-1", "probe-2")),
            )
        return self._takes[role]

    def _try(self, role: str, content: object) -> str:
        before: list[dict[str, Any]] = []
        if role not in ("system", "user"):
            before = [{"role": "user", "content": "x"}]
        message = {"role": role, "content": content, "tool_call_id": "abcdefghi", "name": "f"}
        after = [{"role": "user", "content": "x"}] if role == "system" else []
        try:
            return self.template.render(
                messages=[*before, message, *after], bos_token="", eos_token=""
            )
        except TooSlow:
            raise
        except Exception:  # the template refuses this form, which is all we ask
            return ""
