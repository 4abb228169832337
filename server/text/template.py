"""Chat templates: conversations to prompts, as transformers renders them. Knows no tokens."""

import asyncio
import ctypes
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Template

from config.errors import ConfigError, Overloaded, UserError
from server.text.messages import Message, as_strings, continued, cut_at_mark, plain
from server.text.sandbox import Sandbox, TooMuchText
from server.text.tokenizer import without_lone_surrogates

TIME_LIMIT_S = 2.0
MAX_CHARACTERS = 16 * 2**20
MAX_COMPILED = 32
"""Templates kept compiled: the model's own, and the latest that requests brought."""
MAX_PENDING = 1_024
"""Conversations that may wait for a thread."""
SHORT_CHARACTERS = 2_000
SHORT_MESSAGES = 32
QUICK_S = 0.002
"""Where the server's own template took less for the last short conversation, the next one is
rendered where it is asked for: a thread costs several times what the rendering does."""
STOP_GRACE_S = 1.0
"""How long a stopped template may take to notice, before its thread is given up for the request."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def read_template(given: str) -> str:
    """The template that `--chat-template` means: a file, or the text itself. Raises ConfigError."""
    if any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat template {given!r} is neither Jinja text nor a file that can be read"
        ) from error


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

Mark = Callable[[Any], Any]
"""Gives a copy of messages, or parts of them, with marks in some texts. Raises UserError."""


class TextTooLong(UserError):
    """The prompt has more characters than any may have."""


class ChatTemplate:
    """Renders conversations within `time_limit_s` and `max_characters`: on threads, but for short
    ones under a template of the server's own that was seen to be quick."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        *,
        time_limit_s: float = TIME_LIMIT_S,
        max_characters: int = MAX_CHARACTERS,
        threads: int = 2,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`source` is a template, several by name (default, tool_use), or None."""
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._sandbox = Sandbox(max_characters, now)
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="template")
        self._pending = 0

    @property
    def source(self) -> str:
        """The text of all its templates."""
        return "\n".join(self._sources.values())

    @property
    def default(self) -> str | None:
        """The text of the template for requests that name none."""
        return self._sources.get("default")

    async def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        template: str | None = None,
        mark: Mark | None = None,
    ) -> str:
        """The prompt. Raises UserError for what the template refuses, and when it is too slow or
        makes too much; Overloaded when too many conversations wait.

        `kwargs` are the caller's own variables; `template` replaces the model's. `mark` is called
        on all that the caller wrote, as the template will read it.
        """
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        if not messages:
            raise UserError("messages is empty, it must have at least 1 message", param="messages")
        for name in kwargs or {}:
            if name in RESERVED:
                raise UserError(
                    f"chat_template_kwargs sets {name!r}, which is a field of its own",
                    param="chat_template_kwargs",
                )
        source = self._source(template, tools)
        given = {**(kwargs or {}), "tools": tools, "documents": documents}
        options = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        is_short = not (template or tools or documents or kwargs) and _is_short(messages)
        call = partial(
            self._render,
            source,
            messages,
            given,
            options,
            continue_final_message,
            mark,
            is_short=is_short,
        )
        known = self._compiled.get(source)
        if is_short and known is not None and known.is_quick:
            return call()
        if self._pending >= MAX_PENDING:
            raise Overloaded(f"{self._pending} conversations wait for their template")
        self._pending += 1
        try:
            return await self._run(_Job(call))
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Let the threads go; what still waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _source(self, template: str | None, tools: list[dict[str, Any]] | None) -> str:
        if template is not None:
            return self._sources.get(template, template)
        if tools is not None and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" in self._sources:
            return self._sources["default"]
        if self._sources:
            raise UserError(
                f"the model has no default chat template, only {', '.join(sorted(self._sources))}",
                param="chat_template",
            )
        raise UserError(
            "the model has no chat template; use completions, or start with --chat-template",
            param="messages",
        )

    async def _run(self, job: "_Job") -> str:
        future = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        try:
            while True:
                # Time in line does not count, so the limit runs from where the thread began.
                left_s = self._time_limit_s - job.seconds()
                if left_s <= 0:
                    job.stop()
                    await asyncio.wait([future], timeout=STOP_GRACE_S)
                    break
                done, _ = await asyncio.wait([future], timeout=left_s)
                if done:
                    break
        finally:
            if not future.done():
                job.stop()
                future.cancel()
        if not future.cancelled() and future.done():
            try:
                return future.result()
            except _TooSlow:
                pass
        raise UserError(
            f"the chat template took longer than the {self._time_limit_s:g} s it may take",
            param="messages",
        )

    def _render(
        self,
        source: str,
        messages: list[Message],
        given: dict[str, Any],
        options: dict[str, Any],
        carries_on: bool,
        mark: Mark | None,
        *,
        is_short: bool,
    ) -> str:
        try:
            compiled = self._compile(source)
            if given["tools"] and not compiled.shows_tools():
                raise UserError(
                    "the chat template has no place for tools; send none, or start the server "
                    "with another --chat-template",
                    param="tools",
                )
            conversation = compiled.fit(plain(messages))
            if mark is not None:
                conversation, given = mark(conversation), mark(given)
            final = continued(conversation, source) if carries_on else None
            began_s = time.thread_time()
            text = compiled.template.render(messages=conversation, **{**options, **given})
            if is_short:
                compiled.is_quick = time.thread_time() - began_s < QUICK_S
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
        return without_lone_surrogates(text if final is None else cut_at_mark(text, final))

    def _compile(self, source: str) -> "_Compiled":
        with self._lock:
            if (known := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return known
        compiled = _Compiled(self._sandbox.from_string(source))
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


def _is_short(messages: list[Message]) -> bool:
    """Whether these are a few messages with little text and nothing else."""
    if len(messages) > SHORT_MESSAGES:
        return False
    texts = [message.get("content") for message in messages if len(message) == 2]
    words = [text for text in texts if isinstance(text, str)]
    return len(words) == len(messages) and sum(map(len, words)) <= SHORT_CHARACTERS


class _Compiled:
    """A template, and how it wants the content of each role: found out by trying, once."""

    def __init__(self, template: Template) -> None:
        self.template = template
        # A chain of mappings, which Jinja would walk through for every prompt.
        template.globals = dict(template.globals)
        self.is_quick = False
        """Whether the last short conversation took less than QUICK_S."""
        self._takes: dict[str, tuple[bool, bool]] = {}
        self._shows_tools: bool | None = None

    def fit(self, messages: list[Message]) -> list[Message]:
        """Content as the template reads it: one text, unless it walks over parts itself."""
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                _, takes_parts = self._taken(message["role"])
                if not takes_parts:
                    message["content"] = as_strings(content)
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
            except _TooSlow:
                raise
            except Exception:  # it wants more than we give it here: the request will tell
                self._shows_tools = True
        return self._shows_tools

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
        except _TooSlow:
            raise
        except Exception:  # the template refuses this form, which is all we ask
            return ""


class _TooSlow(BaseException):
    """Raised inside a thread whose template ran too long. No template can catch it."""


class _Job:
    """A call that another thread can stop."""

    def __init__(self, call: Callable[[], str]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._began_s: float | None = None

    def run(self) -> str:
        with self._lock:
            self._thread = threading.get_ident()
            self._began_s = time.monotonic()
        try:
            return self._call()
        finally:
            with self._lock:
                thread, self._thread = self._thread, None
                # A stop that has not struck yet must not hit the thread's next job.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), None)

    def seconds(self) -> float:
        """How long it runs; 0 while it waits for a thread."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def stop(self) -> None:
        """Raise _TooSlow where the call is now; nothing happens if it is not running."""
        with self._lock:
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(_TooSlow)
                )
