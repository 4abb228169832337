"""EngineClient: interface through which a front end requests tokens. SingleEngineClient: base class
of the clients of a single engine."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from config.errors import EngineDied, Overloaded, RequestFailed, UserError
from config.lora.info import LoRAInfo
from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.client.queue_limits import QueueLimits
from engine.client.request_limits import NO_LIMITS, RequestLimits
from engine.client.resumption import (
    NoObserver,
    Resumer,
    ResumptionObserver,
    fail_poison_request,
    resume_order,
)
from engine.client.state import EngineState, FailedState, Failure, Lost, Running, Starting
from engine.client.ttft import Share, merged, tokens_ahead
from engine.process.child_process import ProcessEnd
from engine.transport.channels import HIGH_WATER
from engine.transport.messages import (
    ENGINE_SHIFT,
    FRONT_END_SHIFT,
    LOAD_ADAPTER,
    RESTART_SHIFT,
    SLEEP,
    UNLOAD_ADAPTER,
    WAKE_UP,
    Abort,
    Adapters,
    AddRequest,
    CancelControl,
    Control,
    EngineStats,
    Failed,
    FromEngine,
    Progress,
    PromptBlocks,
    Ready,
    Reply,
    StepOutput,
    ToEngine,
)
from hpu.protocol import TOKEN_BYTES

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0
SLOW_CONTROLS_S = {SLEEP: 600.0, WAKE_UP: 7200.0, LOAD_ADAPTER: 600.0}
"""Timeouts of control calls that move or read weights, or that warm up; seconds."""

CAUSE_GRACE_S = 0.5
"""Maximum wait for the cause of an engine's end after the end was noticed; seconds."""

MAX_RETRY_AFTER_S = 3600


class EngineClient(Protocol):
    """Client of a single engine, or of several engines behind a router. The interface is the same
    whether an engine runs in another process or in a thread of this process. SingleEngineClient
    documents the methods."""

    @property
    def engines(self) -> "Sequence[SingleEngineClient]":
        """The client of each engine, by engine number."""

    @property
    def ready(self) -> Ready | None:
        """The engine's report at the end of its start-up; None until it accepts requests."""

    @property
    def progress(self) -> Progress | None:
        """Latest progress of the start-up, of a wake-up or of the warm-up after the start, if
        any."""

    @property
    def failure(self) -> str | None:
        """Why requests cannot be served: all engines have ended, or an engine ended before all
        were ready. None otherwise."""

    @property
    def has_failed(self) -> bool:
        """Whether there is a `failure`."""

    @property
    def is_misconfigured(self) -> bool:
        """Whether an engine ended with a ConfigError that is not a CheckpointError."""

    @property
    def has_profile(self) -> bool:
        """Whether an engine has ended with a ProfileWritten."""

    @property
    def is_failure_logged(self) -> bool:
        """Whether the engine has reported the failure itself, so that a front end need not log it
        as an error."""

    @property
    def lost(self) -> Failure | None:
        """Why no engine runs while a crashed engine is being restarted; None if an engine runs, or
        if no engine is being restarted."""

    @property
    def is_restarting(self) -> bool:
        """Whether no engine runs while a crashed engine is being restarted."""

    def resume(self, observer: "ResumptionObserver[SingleEngineClient]") -> None: ...

    @property
    def stats(self) -> EngineStats:
        """The latest gauges and counters; with several engines, their sums (see router.summed)."""

    @property
    def adapters(self) -> Mapping[str, LoRAInfo]:
        """Served LoRA adapters, by name."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def add(
        self, request: AddRequest, request_limits: RequestLimits = NO_LIMITS
    ) -> RequestOutputQueue:
        """Send a sequence to an engine."""

    def check_ttft(
        self, num_tokens: int, *, priority: int, request_limits: RequestLimits
    ) -> None: ...

    def abort(self, keys: list[int]) -> None: ...

    async def control(self, name: str, **arguments: Any) -> Any: ...

    async def wait_ready(self) -> Ready: ...

    def fail(self, message: str, *, is_config: bool = False) -> None: ...


class SingleEngineClient:
    """Base class of the clients of a single engine. A subclass implements `start`, `close` and
    `_send`, and passes messages from the engine to `_receive`."""

    def __init__(
        self,
        index: int,
        limits: QueueLimits,
        *,
        engine: int = 0,
        restart: int = 0,
    ) -> None:
        """`index`: number of this front end. `limits`: limits of this front end, shared by the
        clients of all its engines. `engine`: number of the engine. `restart`: how many times this
        front end was restarted; each key contains it modulo 256, so that a restarted front end does
        not reuse recent keys."""
        self.engine = engine
        self.state: EngineState = Starting()
        self.progress: Progress | None = None
        """See EngineClient.progress."""
        self.stats = EngineStats()
        """The latest gauges and counters."""
        self.adapters: Mapping[str, LoRAInfo] = {}
        """Served LoRA adapters, by name."""
        self._registered: Mapping[str, LoRAInfo] = {}
        """The adapters that the engine has now, without adapters that it must load again after a
        crash."""
        self.wanted_adapters: Callable[[], Mapping[str, LoRAInfo]] = lambda: self.state.adapters
        """Returns the adapters that a restarted engine must serve, by name."""
        self._on_stats: Callable[[EngineStats], None] = _ignore
        self._on_prompt: Callable[[list[bytes]], None] = _ignore
        self._on_failure: Callable[[int, Failure], None] = lambda engine, failure: self.end(failure)
        self._settled = asyncio.Event()
        """Set when the engine is ready or has failed."""
        first_key = (index << FRONT_END_SHIFT) | (engine << ENGINE_SHIFT)
        first_key |= restart % 2 ** (ENGINE_SHIFT - RESTART_SHIFT) << RESTART_SHIFT
        self._limits = limits
        self._router = OutputRouter(first_key, limits, by_share=limits.max_ttft_s > 0)
        self._heard_at_s = 0.0
        self.pid = 0
        """Process id of the engine on its host; 0 until the engine has reported it."""
        self.has_hung = False
        """Whether the engine was killed because it sent nothing for too long. Set by the caller
        that kills it."""
        self._resumer = Resumer(self._router, self._send)
        self._resumes = False
        """Whether requests are kept when the engine crashes."""
        self._observer: ResumptionObserver[SingleEngineClient] = NoObserver()
        self._reloading: set[asyncio.Task[None]] = set()
        """The task that loads and unloads adapters of a restarted engine, while the task runs."""
        self._unsent_aborts: list[int] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count(1)

    @property
    def engines(self) -> "Sequence[SingleEngineClient]":
        return (self,)

    @property
    def ready(self) -> Ready | None:
        return self.state.ready

    @property
    def lost(self) -> Failure | None:
        return self.state.lost

    @property
    def failure(self) -> str | None:
        return self.state.failure

    @property
    def has_failed(self) -> bool:
        return self.state.has_failed

    @property
    def is_restarting(self) -> bool:
        return self.state.is_lost

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs or is in its first start-up."""
        return not self.state.has_failed and not self.state.is_lost

    @property
    def is_misconfigured(self) -> bool:
        return self.state.is_misconfigured

    @property
    def has_profile(self) -> bool:
        return self.state.has_profile

    @property
    def is_failure_logged(self) -> bool:
        return self.state.is_failure_logged

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of this front end's requests that the engine has not scheduled yet."""
        return self._router.num_waiting_tokens

    def silent_s(self) -> float:
        """Seconds for which an engine with open requests has sent nothing; 0 without open requests,
        before the engine is ready, and while it is being restarted."""
        is_waiting = self.state.is_running and not self._router.is_empty
        return time.monotonic() - self._heard_at_s if is_waiting else 0.0

    async def start(self) -> None:
        """Start the engine, or listen for the connection of an engine process; `wait_ready` waits
        for the end of the engine's start-up."""
        raise NotImplementedError

    async def close(self) -> None:
        """Disconnect. Open queues end with EngineDied. Safe to call twice."""
        raise NotImplementedError

    def _send(self, message: ToEngine) -> bool:
        """Send without waiting; False if the engine cannot take a message now."""
        raise NotImplementedError

    def on_stats(self, observe: Callable[[EngineStats], None] | None) -> None:
        """Call `observe` with every EngineStats that arrives. Skipping an EngineStats would lose
        samples: the engine sends each sample once."""
        self._on_stats = observe or _ignore

    def on_prompt(self, observe: Callable[[list[bytes]], None]) -> None:
        """Call `observe` with each PromptBlocks.hashes: the leading block hashes of a prompt that
        another front end sent to this engine."""
        self._on_prompt = observe

    def resume(self, observer: "ResumptionObserver[SingleEngineClient]") -> None:
        """Keep open requests when the engine crashes from now on, until `fail` or `end` is called.
        `observer` is notified of crashes and replacements, and may move requests to other engines
        (`adopt`). The remaining requests are sent again when a new engine is ready."""
        self._resumes, self._observer = True, observer

    def on_failure(self, decide: Callable[[int, Failure], None]) -> None:
        """Call `decide` with the engine's number and the failure when the engine fails, instead of
        ending this client; `decide` is responsible for calling `end`."""
        self._on_failure = decide

    def add(
        self, request: AddRequest, request_limits: RequestLimits = NO_LIMITS
    ) -> RequestOutputQueue:
        """Set the key, the timeout and the tenant of a sequence, and send it.

        The prompt contains the placeholder tokens of its images; `sampling.n` is ignored. A
        continuation of a sequence that was accepted before is exempt from the front end's limits on
        waiting requests (see AddRequest.is_continuation for its order). While the engine is being
        restarted, the request waits for the new engine.

        Raises Overloaded when too many requests or prompt tokens wait, the engine is not ready or
        it has left too many messages unread, EngineDied when the engine has failed,
        DeadlineExceeded when the deadline of `request_limits` has passed, and UserError when the
        request cannot be encoded (while the engine is being restarted, such a request ends with an
        error later). Does not wait.
        """
        self.state.check(self.progress)
        timeout_s = request_limits.timeout_s()
        if self._router.is_empty:
            self._heard_at_s = time.monotonic()
        queue = self._router.open(
            request.prompt.nbytes // TOKEN_BYTES,
            is_continuation=request.is_continuation,
            share=(request.priority, request_limits.tenant),
        )
        queue.deadline_s = request_limits.deadline_s
        request.key, request.timeout_s, request.tenant = queue.key, timeout_s, request_limits.tenant
        if self._resumes:
            queue.message = request
        try:
            # While the engine is being restarted, `_resumer` sends the request later.
            sent = self.state.is_lost or self._send(request)
        except (TypeError, ValueError) as error:
            self._router.discard(queue.key)
            raise UserError(f"the request cannot be encoded: {error}") from error
        if not sent:
            self._router.discard(queue.key)
            raise _unread()
        return queue

    def check_ttft(self, num_tokens: int, *, priority: int, request_limits: RequestLimits) -> None:
        """Raise Overloaded if the expected time to first token of a prompt of `num_tokens` exceeds
        max_ttft_s."""
        expected_s = self.ttft_s(num_tokens, (priority, request_limits.tenant))
        check_ttft(expected_s, self._limits.max_ttft_s)

    def ttft_s(self, num_tokens: int, share: Share) -> float:
        """Expected time to first token of a prompt of `num_tokens`, in seconds; 0 if no tokens are
        queued before it, the engine has not measured its prefill rate yet, or max_ttft_s is 0."""
        stats = self.stats
        if self._router.shares is None or not stats.prefill_tokens_per_s:
            return 0.0
        reported = {(priority, tenant): count for priority, tenant, count in stats.waiting_shares}
        waiting = merged(reported, self._router.shares)
        ahead = tokens_ahead(waiting, share, num_tokens, fair_share=self._limits.fair_share)
        if not ahead:
            return 0.0
        return (ahead + stats.prefilling_tokens + num_tokens) / stats.prefill_tokens_per_s

    def abort(self, keys: list[int]) -> None:
        """Abort the requests with these keys; safe at any time, and for unknown or finished keys.
        The queues end with a Finish of reason abort."""
        self._unsent_aborts += self._router.abort(keys)
        self._send_aborts()

    async def control(self, name: str, **arguments: Any) -> Any:
        """Call the engine and wait for its answer. Raises UserError when the engine refuses the
        call, RequestFailed when the call fails or is not answered within CONTROL_TIMEOUT_S (or
        SLOW_CONTROLS_S), Overloaded when the engine is not ready, is being restarted, has no room
        or has left too many messages unread, and EngineDied when it has failed."""
        self.state.check(self.progress)
        self.state.check_running()
        return await self._call(name, arguments)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        timeout_s = SLOW_CONTROLS_S.get(name, CONTROL_TIMEOUT_S)
        call = next(self._call_numbers)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(Control(call, name, arguments)):
                raise _unread()
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise RequestFailed(
                f"the engine did not answer {name} within {timeout_s:g} s"
            ) from None
        finally:
            del self._calls[call]
            if answer.cancelled():
                self._send(CancelControl(call))

    async def wait_ready(self) -> Ready:
        """Wait for the end of the start-up. Raises EngineDied when it fails, ConfigError if an
        invalid setting is the cause, ProfileWritten at the end of a profile run."""
        await self._settled.wait()
        return self.state.report()

    def fail(self, message: str, *, is_config: bool = False) -> None:
        """Report that the engine has ended. Call it on the thread of the event loop. `is_config`:
        an invalid setting is the cause. Only the first call counts."""
        self._fail(Failure(message, is_config))

    def end(self, failure: Failure) -> None:
        """End all open requests and control calls with `failure`, or with the cause that a crashed
        engine reported itself. Only the first call counts."""
        failure = self.state.cause(failure)
        self.state.settle()
        self._stop_reloading()
        if not self.state.has_failed:
            self.state = FailedState(failure, self.state.ready)
            self._router.fail(failure.message)
            self._settled.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDied(failure.message))

    def _lose(self, failure: Failure) -> None:
        """Handle an engine crash: keep the requests until an engine resumes them, or fail them if
        resumption is off or the engine was never ready."""
        if self.state.is_lost and self._resumes:
            # The new engine crashed before it was ready; keep the first cause.
            return
        if not (self.state.is_running and self._resumes):
            self._fail(failure)
            return
        lost = self.state = Lost(self.state.report(), failure, self.adapters)
        self._resumer.withdraw()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(lost.restarting())
        if failure.is_external is None:
            loop = asyncio.get_running_loop()
            lost.wait_for_cause(loop.call_later(CAUSE_GRACE_S, self._attribute_crash, lost, True))
        else:
            self._attribute_crash(lost, failure.is_external)

    def _attribute_crash(self, lost: EngineState, is_external: bool) -> None:
        """Fail the poison request, if there is one, and report the crash to the observer."""
        lost.settle()
        is_external = is_external and not self.has_hung
        has_poison = fail_poison_request(self._router, is_external=is_external)
        lost.num_requests = len(self._router.queues)
        self._observer.engine_lost(self, has_poison=has_poison)

    @property
    def is_crash_pending(self) -> bool:
        return self.state.is_pending

    def set_exit_cause(self, end: ProcessEnd) -> None:
        """Handle the end of an engine process that the launcher restarts; `end` is the cause. A
        late call, when the next process already takes requests, has no effect."""
        if self.state.is_running and self.pid not in (0, end.pid):
            return
        failure = Failure(end.description, is_external=end.is_external)
        self._lose(failure)
        self.state.explain(failure)
        if self.state.is_pending:
            self._attribute_crash(self.state, end.is_external)

    def _reload_adapters(self) -> None:
        """Make the adapters of the restarted engine the `wanted_adapters`, then resume."""
        configured = tuple(self._registered)

        async def reload() -> None:
            tried: set[tuple[str, str]] = set()
            # The wanted adapters may change meanwhile.
            while calls := {
                call: arguments
                for call, arguments in self._adapter_calls(configured).items()
                if call not in tried
            }:
                for (control, name), arguments in calls.items():
                    await self._change_adapter(control, name, arguments)
                tried.update(calls)
            self._restore()

        self._stop_reloading()
        if self._adapter_calls(configured):
            task = asyncio.ensure_future(reload())
            self._reloading.add(task)
            task.add_done_callback(self._reloading.discard)
        else:
            self._restore()

    def _adapter_calls(self, configured: Sequence[str]) -> dict[tuple[str, str], dict[str, object]]:
        """Arguments of the calls after which the restarted engine serves the wanted adapters, by
        control and adapter name. Adapters that are not in `configured`, the names at the start of
        the engine, are not unloaded: another front end may have loaded them."""
        wanted, has = self.wanted_adapters(), self._registered
        changed = [
            name
            for name in configured
            if name in has and (name not in wanted or wanted[name].content != has[name].content)
        ]
        calls: dict[tuple[str, str], dict[str, object]] = {
            (UNLOAD_ADAPTER, name): {"lora_name": name} for name in changed
        }
        for name, info in wanted.items():
            if name not in has:
                calls[LOAD_ADAPTER, name] = {"adapter": info.named}
        return calls

    async def _change_adapter(self, control: str, name: str, arguments: dict[str, object]) -> None:
        """Make a call of `_adapter_calls`. Another front end may have unloaded the adapter.
        Requests for an adapter that cannot be loaded fail on their own."""
        try:
            await self._call(control, arguments)
        except (UserError, RequestFailed, Overloaded) as error:
            if control == LOAD_ADAPTER:
                logger.warning("The restart has lost the adapter %s: %s", name, error)

    def _stop_reloading(self) -> None:
        """Stop loading adapters, since the restarted engine or this client has ended. The task
        could wait for minutes, and then resume the requests on an engine that may not be ready."""
        for task in self._reloading:
            task.cancel()

    def _restore(self) -> None:
        """Resume the requests of the crashed engine on the new engine."""
        lost = self.state
        if not lost.is_lost:
            return
        if lost.is_pending:
            self._attribute_crash(lost, True)
        self.has_hung = False
        pause = lost.pause()
        self.state = Running(lost.report())
        self.adapters = self._registered
        self._resumer.adopt(self.queues, self._router)
        self._observer.engine_restored(self, pause)

    def adopt(self, other: "SingleEngineClient", queues: "Sequence[RequestOutputQueue]") -> None:
        """Resume open requests of `other`, whose engine has crashed, on this engine."""
        self._resumer.adopt(queues, other._router)

    @property
    def queues(self) -> "list[RequestOutputQueue]":
        """Queues of the open requests, in the order in which a new engine resumes them."""
        return sorted(self._router.queues, key=resume_order)

    def _fail(self, failure: Failure) -> None:
        self._on_failure(self.engine, failure)

    def _receive(self, message: FromEngine) -> None:
        self._heard_at_s = time.monotonic()
        if isinstance(message, StepOutput):
            self._router.deliver(message)
            if message.stats is not None:
                self.stats = message.stats
                self._on_stats(message.stats)
            if self._unsent_aborts:
                self._send_aborts()
            if not self._resumer.is_done:
                self._resumer.proceed()
        elif isinstance(message, Reply):
            self._answer(message)
        elif isinstance(message, Adapters):
            self._registered = {info.name: info for info in message.infos}
            # A request for an adapter that will be loaded again is accepted meanwhile.
            self.adapters = self.state.adapters if self.state.is_lost else self._registered
        elif isinstance(message, Progress):
            self.progress = message
        elif isinstance(message, Ready):
            self.state = self.state.on_ready(message)
            self._settled.set()
            if self.state.is_lost:
                self._reload_adapters()
        elif isinstance(message, Failed):
            failure = Failure(
                message.message,
                message.is_config,
                is_logged=True,
                may_follow=message.may_follow,
                is_external=message.is_external,
                is_profile=message.is_profile,
            )
            (self._fail if message.is_stopped else self._lose)(failure)
        elif isinstance(message, PromptBlocks):
            self._on_prompt(message.hashes)

    def _send_aborts(self) -> None:
        # Aborts must not be lost: if the engine takes no message now, send the aborts after its
        # next StepOutput.
        if self._unsent_aborts and self._send(Abort(self._unsent_aborts)):
            self._unsent_aborts = []

    def _answer(self, reply: Reply) -> None:
        answer = self._calls.get(reply.call)
        if answer is None or answer.done():
            return
        if reply.is_refusal:
            answer.set_exception(UserError(reply.error or "refused", code=reply.code))
        elif reply.is_overload:
            answer.set_exception(Overloaded(reply.error or "no room"))
        elif reply.error is not None:
            answer.set_exception(RequestFailed(reply.error))
        else:
            answer.set_result(reply.value)


def check_ttft(expected_s: float, max_ttft_s: float) -> None:
    """Raise Overloaded if the expected time to first token exceeds a limit; 0: no limit."""
    if expected_s > max_ttft_s > 0:
        raise Overloaded(
            f"The first token is expected in {expected_s:.1f} s, which is more than "
            f"{max_ttft_s:g} s (--max-ttft).",
            retry_after_s=min(math.ceil(expected_s), MAX_RETRY_AFTER_S),
            is_slow=True,
        )


def _unread() -> Overloaded:
    return Overloaded(f"The engine has left {HIGH_WATER} messages unread.")


def _ignore(_: object) -> None:
    """Observer that does nothing."""
