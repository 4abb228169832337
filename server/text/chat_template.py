"""Chat templates: selects the template for a chat, and the thread or process that renders it.

The model's own template runs on threads with a time limit. Short chats are rendered on the event
loop if the last short rendering was fast; a watchdog thread stops slow renderings. An API server
renders templates in requests in a disposable process with limits.
"""

import asyncio
import contextlib
import ctypes
import json
import resource
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, Generic, TypeVar

from config.error_frames import release_frames
from config.errors import ConfigError, Overloaded, UserError
from config.fair_threads import FairThreads
from config.json_text import Json
from config.model.json_fields import MAX_JSON_BYTES
from config.server import RESERVED_VARIABLES
from config.whole_files import read_limited
from engine.process.isolation import ForkServer, failures_of_requests
from server.http.fair_slots import FairSlots
from server.http.json_encoder import encode_json
from server.text.messages import Message
from server.text.template_renderer import (
    CompiledTemplate,
    Renderer,
    RenderRequest,
    TextMarker,
    TextTooLong,
    TooSlow,
)

TIME_LIMIT_S = 1.5
"""Default limit on the CPU time of a rendering in this process."""
MAX_WALL_FACTOR = 10
"""Maximum wall time of a rendering, in multiples of the limit on its CPU time. A rendering that
takes longer has waited for a busy machine, and may succeed later."""
MAX_PENDING = 1_024
"""Maximum number of renderings that wait for a thread or run there; for templates in requests, of
the waiting renderings alone. Beyond it, only clients with less than their share may add
renderings."""
SHORT_CHARACTERS = 2_000
MAX_INLINE_MESSAGES = 32
MAX_INLINE_S = 0.002
"""Maximum CPU time of the last short rendering for the next short chat to be rendered on the event
loop. A thread costs several times as much as a short rendering."""
INLINE_LIMIT_S = 0.03
"""CPU time after which a rendering on the event loop is stopped and restarted on a thread."""
INLINE_POLL_S = 0.02
INLINE_IDLE_POLLS = 50
MEMORY_POLL_S = 0.05
MAX_GROWTH_BYTES = 512 * 2**20
"""Maximum memory growth of this process during a rendering that takes longer than MEMORY_POLL_S."""
STOP_GRACE_S = 0.3
"""Time to wait for a stopped rendering before its request fails."""
T = TypeVar("T")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_template(given: str) -> str:
    """The template given by --chat-template: the content of a file, or the text itself. Raises
    ConfigError."""
    if any(mark in given for mark in ("{{", "{%", "\n")):
        return given
    try:
        return read_limited(given, MAX_JSON_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat template {given[:400]!r} is neither Jinja text nor a file that can be read: "
            f"{reason}"
        ) from error


class ChatTemplate:
    """Renders chats with a time limit."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        *,
        time_limit_s: float = TIME_LIMIT_S,
        threads: int = 2,
        renderer: Renderer | None = None,
        isolation: ForkServer | None = None,
        generic_tools: bool = True,
    ) -> None:
        """`source`: a template, templates by name (default, tool_use), or None. `time_limit_s`:
        limit on the CPU time of a rendering without `isolation`. `renderer`: None: a Renderer with
        its default limits. `isolation`: renders request templates with its own limits (see
        server/text/isolated_template.py); without it they run like the model's templates.
        `generic_tools`: render tools as text if a template does not support them (see
        server/text/tool_template.py)."""
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(special_tokens)
        self._time_limit_s = time_limit_s
        self._renderer = renderer or Renderer()
        self._isolation = isolation
        self._generic_tools = generic_tools
        self._uses_generic_tools: bool | None = None
        self._inline = _InlineWatchdog()
        self._threads = FairThreads(
            threads,
            "template",
            per_client=max(1, threads // 2),
            max_calls=MAX_PENDING,
            nouns="chats",
        )
        # Separate threads, so that the model's template does not wait for request templates.
        self._isolated = ThreadPoolExecutor(threads, thread_name_prefix="isolated-template")
        self._slots = FairSlots(
            "chat templates", total=threads, per_client=1, max_waiting=MAX_PENDING
        )
        """Shares the threads for request templates among clients."""

    @property
    def source(self) -> str:
        """Concatenated text of all templates."""
        return "\n".join(self._sources.values())

    @property
    def default(self) -> str | None:
        """Template for requests that name no template, unless they have tools and there is a
        template tool_use."""
        return self._sources.get("default")

    def uses_generic_tools(self) -> bool:
        """Whether tools are rendered as text because the model's template does not support them.
        The first call may render the template, within its time limit."""
        if self._uses_generic_tools is None:
            self._uses_generic_tools = self._generic_tools and not self._shows_tools()
        return self._uses_generic_tools

    async def render(
        self,
        messages: list[Message],
        *,
        tools: list[Json] | None = None,
        documents: list[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        template: str | None = None,
        mark: TextMarker | None = None,
        client: str = "",
    ) -> str:
        """Render the prompt. Raises UserError and Overloaded.

        `kwargs`: chat_template_kwargs; `template`: overrides the model's template; `mark`: applied
        to all text of the caller; `client`: API key or address, so that clients share the threads
        for request templates fairly.
        """
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        if not messages:
            raise UserError("messages is empty, it must have at least 1 message", param="messages")
        for name in kwargs or {}:
            if name in RESERVED_VARIABLES:
                raise UserError(
                    f"chat_template_kwargs sets {name!r}, which the server sets from the fields of "
                    "the request: leave it out",
                    param="chat_template_kwargs",
                )
        source = self._source(template, tools)
        _check_roles(messages, source)
        variables = {**(kwargs or {}), "tools": tools, "documents": documents}
        options = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        is_short = not (template or tools or documents or kwargs) and _is_short(messages)
        request = RenderRequest(
            source, messages, variables, options, continue_final_message, self._generic_tools
        )
        is_from_request = template is not None and template not in self._sources
        compiled = self._renderer.cached(source)
        call = partial(self._renderer.render, request, mark, is_timed=is_short)
        if not is_from_request and is_short and compiled and may_run_inline(compiled):
            try:
                return self._inline.run(call)
            except TooSlow as error:
                compiled.was_stopped = True
                release_frames(error)
        if is_from_request and self._isolation is not None:
            async with self._slots.hold(client):
                return await self._render_isolated(self._isolation, request, mark)
        return await self._run(_Job(call))

    def close(self) -> None:
        """Stop the threads; waiting renderings are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._isolated.shutdown(wait=False, cancel_futures=True)
        self._inline.close()
        if self._isolation is not None:
            self._isolation.close()

    def _shows_tools(self) -> bool:
        source = self._sources.get("tool_use", self._sources.get("default"))
        if source is None:
            return False
        job = _Job(partial(self._renderer.shows_tools, source))
        future = self._threads.submit(job.run)
        try:
            while not job.is_over(self._time_limit_s):
                with contextlib.suppress(FutureTimeout):
                    return future.result(timeout=MEMORY_POLL_S)
            job.stop()
        except (
            Exception
        ) as error:  # templates are untrusted code: the request will report the error
            release_frames(error)
        return True

    def _source(self, template: str | None, tools: list[Json] | None) -> str:
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
            "the model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            param="messages",
        )

    async def _run(self, job: "_Job[str]") -> str:
        future = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        excess, before, is_busy = "", _resident_bytes(), False
        try:
            while not excess:
                done, _ = await asyncio.wait([future], timeout=MEMORY_POLL_S)
                if done:
                    return future.result()
                if job.is_over(self._time_limit_s):
                    excess = f"took longer than the {self._time_limit_s:g} s it may take"
                    is_busy = job.cpu_seconds() < self._time_limit_s
                elif job.seconds() == 0.0:
                    before = _resident_bytes()
                elif _resident_bytes() - before > MAX_GROWTH_BYTES:
                    excess = f"took more than the {MAX_GROWTH_BYTES >> 20} MiB it may take"
            job.stop()
            await asyncio.wait([future], timeout=STOP_GRACE_S)
            # The rendering may have finished before it was stopped.
            if future.done():
                if not isinstance(error := future.exception(), TooSlow):
                    return future.result()
                release_frames(error)
        finally:
            if not future.done():
                job.stop()
                future.cancel()
            elif not future.cancelled():
                # Retrieve the error of a rendering that ends while its caller is cancelled: asyncio
                # logs errors that nobody retrieves.
                future.exception()
            # The future's exception would keep the template's variables alive.
            del future
        if is_busy:
            wall_s = self._time_limit_s * MAX_WALL_FACTOR
            raise Overloaded(f"rendering the chat template took longer than {wall_s:g} s")
        raise UserError(f"the chat template {excess}", param="messages")

    async def _render_isolated(
        self, isolation: ForkServer, request: RenderRequest, mark: TextMarker | None
    ) -> str:
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        fields["is_marked"] = mark is not None

        def call() -> Json:
            reply: Json = json.loads(isolation.call(encode_json(fields)))
            return reply

        action, refusal = "rendering the chat template", "the chat template was stopped"
        with failures_of_requests(action, refusal, param="chat_template"):
            reply = await asyncio.get_running_loop().run_in_executor(self._isolated, call)
        if "text" in reply:
            return str(reply["text"])
        kind = TextTooLong if reply["is_too_long"] else UserError
        raise kind(reply["error"], param=reply["param"])


def _check_roles(messages: list[Message], source: str) -> None:
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in ROLES or f"'{role}'" in source or f'"{role}"' in source:
            continue
        raise UserError(
            f"messages[{index}].role is {str(role)[:40]!r}, this model accepts {', '.join(ROLES)}",
            param=f"messages[{index}].role",
        )


def _resident_bytes() -> int:
    """Resident memory of this process in bytes: the second field of statm (proc(5))."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def may_run_inline(compiled: CompiledTemplate) -> bool:
    """Whether a short chat may be rendered on the event loop."""
    last_s = compiled.last_s
    return last_s is not None and last_s < MAX_INLINE_S and not compiled.was_stopped


def _is_short(messages: list[Message]) -> bool:
    if len(messages) > MAX_INLINE_MESSAGES:
        return False
    texts = [message.get("content") for message in messages if len(message) == 2]
    words = [text for text in texts if isinstance(text, str)]
    return len(words) == len(messages) and sum(map(len, words)) <= SHORT_CHARACTERS


class _Job(Generic[T]):
    """A call that another thread can interrupt with TooSlow."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._began_s: float | None = None
        self._clock = 0
        self._began_cpu_s = 0.0
        self._was_stopped = False

    def run(self) -> T:
        with self._lock:
            self._thread = threading.get_ident()
            self._clock = time.pthread_getcpuclockid(self._thread)
            self._began_cpu_s = time.thread_time()
            self._began_s = time.monotonic()
        try:
            return self._call()
        finally:
            with self._lock:
                thread, self._thread = self._thread, None
                if self._was_stopped:
                    # A pending stop must not reach the thread's next task.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), None)

    def seconds(self) -> float:
        """Running time; 0 while the call waits for a thread."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def cpu_seconds(self) -> float:
        """CPU time so far; 0 if the call is not running."""
        with self._lock:
            if self._thread is None:
                return 0.0
            return time.clock_gettime(self._clock) - self._began_cpu_s

    def is_over(self, limit_s: float) -> bool:
        """Whether the call has used `limit_s` of CPU time, or has run for MAX_WALL_FACTOR times as
        long."""
        return self.cpu_seconds() >= limit_s or self.seconds() >= limit_s * MAX_WALL_FACTOR

    def stop(self) -> None:
        """Raise TooSlow in the call if it is running. Only the first `stop` has an effect, because
        a second exception could arrive after the first has ended the call."""
        with self._lock:
            if self._thread is not None and not self._was_stopped:
                self._was_stopped = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(TooSlow)
                )


class _InlineWatchdog:
    """Stops calls on the event loop that take more than INLINE_LIMIT_S of CPU time. A thread polls
    every INLINE_POLL_S while there are calls, because waking it for each call would cost more than
    most calls."""

    def __init__(self) -> None:
        self._job: _Job[str] | None = None
        self._num_calls = 0
        self._is_watched = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(self, call: Callable[[], str]) -> str:
        self._num_calls += 1
        if not self._is_watched:
            self._start()
        self._job = job = _Job(call)
        try:
            return job.run()
        finally:
            self._job = None

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def _start(self) -> None:
        self._is_watched = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="inline", daemon=True)
            self._thread.start()
        self._wake.set()

    def _watch(self) -> None:
        while not self._is_closed:
            seen, num_idle = self._num_calls, 0
            while num_idle < INLINE_IDLE_POLLS and not self._is_closed:
                time.sleep(INLINE_POLL_S)
                job = self._job
                if job is not None and job.cpu_seconds() > INLINE_LIMIT_S:
                    job.stop()
                num_idle = 0 if self._num_calls != seen or job is not None else num_idle + 1
                seen = self._num_calls
            self._wake.clear()
            self._is_watched = False
            # A call that started while `_is_watched` was set has not set `_wake`: keep polling.
            if self._num_calls == seen and not self._is_closed:
                self._wake.wait()
            self._is_watched = True
