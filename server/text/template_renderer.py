"""Renders Jinja chat templates like transformers, within the limits of the sandbox, and adapts the
messages to what a template supports."""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import Template

from config.error_frames import release_frames
from config.errors import UserError
from config.json_text import Json
from server.text.long_texts import without_lone_surrogates
from server.text.messages import (
    Message,
    cut_at_marker,
    joined_text,
    mark_continuation,
    normalize_messages,
    with_short_ids,
)
from server.text.sandbox import Sandbox, TooMuchText
from server.text.system_messages import has_late_system, with_leading_system
from server.text.tool_template import has_tool_messages, with_tools_as_text

MAX_CHARACTERS = 16 * 2**20
MAX_COMPILED = 32
"""Maximum number of cached compiled templates: the model's templates, and the latest templates in
requests."""

_PROBE: Json = {
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

_SHORT_IDS = re.compile(r"length (!=|==|of)? ?9\b")

TextMarker = Callable[[Any], Any]
"""Returns a copy of messages, or of parts of messages, with marked control tokens. Raises
UserError."""


class TextTooLong(UserError):
    """The prompt exceeds the maximum number of characters."""


class TooSlow(BaseException):
    """Raised inside a rendering to stop it. A BaseException, so that a template cannot catch it."""


class RenderRequest(msgspec.Struct, frozen=True):
    """Input of a rendering."""

    template: str
    """Source text of the template."""
    messages: list[Message]
    variables: Json
    """Variables from the client: tools, documents and chat_template_kwargs."""
    builtins: Json
    """Variables from the server: special tokens, add_generation_prompt."""
    continue_final_message: bool = False
    """Whether the prompt ends with the text of the last message."""
    generic_tools: bool = True
    """Whether to render tools as text if the template does not support them."""


class Renderer:
    """Renders chats; caches compiled templates. Thread-safe."""

    def __init__(
        self,
        max_characters: int = MAX_CHARACTERS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sandbox = Sandbox(max_characters, now)
        self._compiled: OrderedDict[str, CompiledTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def cached(self, source: str) -> "CompiledTemplate | None":
        """The compiled template, if it is cached."""
        return self._compiled.get(source)

    def shows_tools(self, source: str) -> bool:
        """Whether the template `source` supports tools. Raises the errors of its compilation."""
        return self._compile(source).shows_tools()

    def render(
        self, request: RenderRequest, mark: TextMarker | None = None, *, is_timed: bool = False
    ) -> str:
        """Render the prompt. Raises UserError, and TextTooLong for a prompt that is too long.
        `mark`: applied to all text of the caller. `is_timed`: record the CPU time of the
        rendering."""
        given, options = request.variables, request.builtins
        try:
            compiled = self._compile(request.template)
            messages = normalize_messages(request.messages)
            if has_late_system(messages) and not compiled.takes_late_system():
                # A developer message applies to the whole conversation; vLLM merges it too.
                merges_all = any(sent.get("role") == "developer" for sent in request.messages)
                messages = with_leading_system(messages, merges_all=merges_all)
            if request.generic_tools and compiled.needs_generic_tools(messages, given):
                takes_system = compiled.takes_role("system")
                messages = with_tools_as_text(
                    messages,
                    given["tools"],
                    takes_system=takes_system,
                    to_json=self._sandbox.to_json,
                )
                given = {**given, "tools": None}
            elif given["tools"] and not compiled.shows_tools():
                raise UserError(
                    "the chat template does not render tools: send no tools, or start the server "
                    "with another --chat-template or with --tool-template auto",
                    param="tools",
                )
            if compiled.needs_short_ids:
                messages = with_short_ids(messages)
            messages = compiled.fit(messages)
            if mark is not None:
                messages, given = mark(messages), mark(given)
            final = (
                mark_continuation(messages, request.template)
                if request.continue_final_message
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
            # Templates are untrusted code: any exception is an error of the request.
            reason = str(error)[:300] or type(error).__name__
            raise UserError(
                f"the chat template rejected the request: {reason}", param="messages"
            ) from error
        return without_lone_surrogates(text if final is None else cut_at_marker(text, final))

    def _compile(self, source: str) -> "CompiledTemplate":
        with self._lock:
            if (cached := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return cached
        compiled = CompiledTemplate(self._sandbox.from_string(source), source)
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


class CompiledTemplate:
    """A compiled template, and what it supports, which is probed once: content formats of each
    role, tools, and system messages after the first message."""

    def __init__(self, template: Template, source: str) -> None:
        self.template = template
        self._renders_calls = "tool_calls" in source
        self.needs_short_ids = _SHORT_IDS.search(source) is not None
        """Whether the template accepts only call ids of 9 letters and digits (Mistral)."""
        # Flatten the ChainMap, which Jinja would search for every prompt.
        template.globals = dict(template.globals)
        self.last_s: float | None = None
        """CPU time of the last timed rendering."""
        self.was_stopped = False
        """Whether a rendering on the event loop was stopped; later renderings then use threads."""
        self._formats: dict[str, tuple[bool, bool]] = {}
        self._shows_tools: bool | None = None
        self._takes_late_system: bool | None = None

    def fit(self, messages: list[Message]) -> list[Message]:
        """Convert contents in place to a format that the template accepts: parts to a text, or a
        text to parts. Contents in an accepted format are not changed."""
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                _, accepts_parts = self._accepted_formats(message["role"])
                if not accepts_parts:
                    message["content"] = joined_text(content)
            elif content:
                accepts_text, accepts_parts = self._accepted_formats(message["role"])
                if accepts_parts and not accepts_text:
                    message["content"] = [{"type": "text", "text": content}]
        return messages

    def shows_tools(self) -> bool:
        """Whether a prompt contains the tools; True if the probe fails."""
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
            except Exception as error:
                # The probe may lack a variable that the template needs: let the request decide.
                self._shows_tools = True
                release_frames(error)
        return self._shows_tools

    def needs_generic_tools(self, messages: list[Message], given: Json) -> bool:
        """Whether to write the tools, calls and results of the request, if any, as text: true if
        the template shows no tools. If the request has only calls and results, a template with
        `tool_calls` renders them itself."""
        if not given["tools"] and (self._renders_calls or not has_tool_messages(messages)):
            return False
        return not self.shows_tools()

    def takes_role(self, role: str) -> bool:
        """Whether the prompt contains the text of messages with `role`."""
        return any(self._accepted_formats(role))

    def takes_late_system(self) -> bool:
        """Whether the prompt contains system messages after the first message."""
        if self._takes_late_system is None:
            before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
            self._takes_late_system = "probe-1" in self._try("system", "probe-1", before)
        return self._takes_late_system

    def _accepted_formats(self, role: str) -> tuple[bool, bool]:
        """(whether a text appears in the prompt, whether both of two text parts appear)."""
        if role not in self._formats:
            parts = [{"type": "text", "text": "probe-1"}, {"type": "text", "text": "probe-2"}]
            text = self._try(role, "probe-1")
            listed = self._try(role, parts)
            # A template that prints the list itself shows the texts in quotes.
            self._formats[role] = (
                "probe-1" in text,
                all(re.search(rf"(?<!['\"]){mark}", listed) for mark in ("probe-1", "probe-2")),
            )
        return self._formats[role]

    def _try(self, role: str, content: object, before: Sequence[Json] = ()) -> str:
        """The prompt with a message of `role`; empty if the template rejects it."""
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
        except Exception as error:  # the template rejects this format
            release_frames(error)
            return ""
