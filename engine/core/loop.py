"""EngineLoop: reads an inbox, steps the core and sends its messages."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec

from config.engine import EXTERNAL_LAUNCHER, EngineConfig
from config.errors import (
    CheckpointError,
    ConfigError,
    EngineDied,
    Overloaded,
    ProfileWritten,
    RequestFailed,
    UserError,
    counted,
)
from config.lora.info import LoRAInfo
from config.malloc import trim_memory
from config.params.lora import NamedAdapter
from config.params.structured_output import GrammarSpec
from engine.core.adapter_reader import AdapterReader
from engine.core.admission import queue_is_full
from engine.core.build import build_core
from engine.core.coupled_steps import DPSync, HubClient, StepSync, StopSignal
from engine.core.engine_core import EngineCore
from engine.core.lockstep import Entry, FrontEndChange, LockstepInbox
from engine.executors.base import Executor
from engine.kv_cache.prefix_hashes import block_hashes
from engine.structured_output.compilation import GrammarCompiler
from engine.structured_output.grammar import Grammar
from engine.transport.channels import Pollables, Waiter, WakeUp
from engine.transport.messages import (
    BACKGROUND_WARMUP,
    COMPILE_GRAMMAR,
    FRONT_END_SHIFT,
    LOAD_ADAPTER,
    REGISTER_ADAPTER,
    Abort,
    Adapters,
    AddRequest,
    CancelControl,
    Control,
    Failed,
    Finish,
    FromEngine,
    Progress,
    PromptBlocks,
    Ready,
    Reply,
    StepOutput,
    ToEngine,
)
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import WarmupProgress, WorkerReady

logger = logging.getLogger(__name__)

IDLE_S = 0.25
"""Time without work after which an engine continues the warm-up of its workers; seconds."""
TRIM_AFTER_S = 5.0
"""Idle time after which freed memory is returned to the operating system."""
MAX_ANNOUNCED_BLOCKS = 1024
"""Maximum blocks announced per prompt, equal to the number that a router looks up."""

Emit = Callable[[int | None, FromEngine], None]
"""Sends a message to the front end with this index (None: all). Thread-safe."""


class WakingInbox(SimpleQueue[Entry]):
    """A queue that sets `wake` after each new entry."""

    def __init__(self) -> None:
        super().__init__()
        self.wake = WakeUp()

    def put(self, item: Entry, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.wake.set()


class EngineLoop:
    """Owns a core on the thread that calls `run`. Other threads may call `receive`,
    `front_end_changed` and `stop`.

    A request is rejected at once when the number of inbox entries plus requests with a grammar in
    compilation reaches `max_queue_len`. Aborts, controls and resumed requests are exempt from this
    limit.
    """

    def __init__(
        self, config: EngineConfig, emit: Emit, *, num_front_ends: int, engine: int = 0
    ) -> None:
        self._config = config
        self._emit = emit
        self._num_front_ends = num_front_ends
        self._has_routers = config.data_parallel.data_parallel_size > 1
        self._engine = engine
        self._inbox = WakingInbox()
        self._waiter = Waiter([], [self._inbox.wake.fd])
        """Waits for an inbox entry, a message of a worker or a proposal of another engine."""
        self.stopped = StopSignal()
        self._sync = StepSync(engine)
        self._is_lockstep = config.executor == EXTERNAL_LAUNCHER
        self._lockstep: LockstepInbox | None = None
        """Set if the engines of several ranks step in lockstep."""
        # In lockstep, no time limit: a request could exceed it on one rank and not on another.
        self._compiler = GrammarCompiler(limits_time=not self._is_lockstep)
        self._adapters = AdapterReader(config)
        self._lock = threading.Lock()
        self._compiling: dict[int, tuple[Future[Grammar], str]] = {}
        """Requests whose grammar is being compiled: (future, client) by key. They enter the inbox
        afterwards."""
        self._calls: dict[tuple[int, int], Callable[[], object]] = {}
        """Functions that cancel controls, by (front end, call)."""
        self._ready: Ready | None = None
        """The Ready message once it was sent; None before."""
        self._block_size: int | None = None
        self._all_see_images = False
        """Whether each block hash covers all images of the prompt. Set together with `_block_size`,
        with prefix caching only."""
        self._is_busy = False
        """Whether warm-up of the remaining buckets continues without IDLE_S between buckets. Reset
        by each entry."""

    def receive(self, front_end: int, message: ToEngine) -> None:
        """Receive a message from a front end. With prefix caching, hashes the prompt on the calling
        thread; grammars are compiled and adapters are read on other threads."""
        if isinstance(message, CancelControl):
            self._cancel_controls([(front_end, message.call)])
            return
        if isinstance(message, Control) and message.name == COMPILE_GRAMMAR:
            self._compile(front_end, message)
            return
        if isinstance(message, Control) and message.name == LOAD_ADAPTER:
            self._read_adapter(front_end, message)
            return
        if isinstance(message, Control) and message.name == REGISTER_ADAPTER:
            refusal = UserError(f"control {message.name!r} is reserved for the engine")
            self._emit(front_end, _error_reply(message.call, refusal))
            return
        if isinstance(message, Control) and self._is_lockstep:
            error = f"{message.name} is not possible with the executor {EXTERNAL_LAUNCHER}"
            self._emit(front_end, _error_reply(message.call, UserError(error)))
            return
        if isinstance(message, Abort):
            self._cancel_compiling(message.keys)
        if not isinstance(message, AddRequest):
            self._inbox.put((front_end, message, [], None))
            return
        max_waiting = self._config.scheduler.max_queue_len
        num_waiting = self._inbox.qsize() + len(self._compiling)
        if num_waiting >= max_waiting and message.resumption is None:
            self._reject(message, Overloaded(queue_is_full(num_waiting, max_waiting)))
            return
        hashes: list[bytes] = []
        if self._block_size is not None:
            hashes = block_hashes(
                message.prompt,
                self._block_size,
                message.cache_salt,
                message.adapter,
                message.images,
                all_see_images=self._all_see_images,
            )
            if self._has_routers:
                self._announce(front_end, hashes)
        spec = message.sampling.structured_outputs
        if spec is None:
            self._inbox.put((front_end, message, hashes, None))
            return
        self._compile_for(front_end, message, hashes, spec)

    def front_end_changed(self, front_end: int, *, is_connected: bool) -> None:
        """Handle the disconnect of a front end, which aborts its requests, or the connect of its
        successor."""
        with self._lock:
            gone = [key for key in self._compiling if key >> FRONT_END_SHIFT == front_end]
            calls = [call for call in self._calls if call[0] == front_end]
        self._cancel_compiling(gone)
        self._cancel_controls(calls)
        self._inbox.put(FrontEndChange(front_end, is_connected))

    def _announce(self, front_end: int, hashes: list[bytes]) -> None:
        """Tell the routers of the other front ends which blocks this engine is going to cache."""
        message = PromptBlocks(hashes[:MAX_ANNOUNCED_BLOCKS])
        for other in range(self._num_front_ends):
            if other != front_end and hashes:
                self._emit(other, message)

    def _compile_for(
        self, front_end: int, message: AddRequest, hashes: list[bytes], spec: GrammarSpec
    ) -> None:
        """Compile the grammar of a request, then put the request into the inbox. Completes at once
        or later, on any thread."""

        def done(result: Grammar | Exception) -> None:
            with self._lock:
                if message.key not in self._compiling:
                    return  # aborted in the meantime
                del self._compiling[message.key]
            if isinstance(result, Grammar):
                self._inbox.put((front_end, message, hashes, result))
            else:
                self._reject(message, result)

        # The front end has usually sent COMPILE_GRAMMAR before, so the grammar is already compiled.
        client = f"tenant {message.tenant}"
        try:
            future = self._compiler.compile(spec, client)
        except Overloaded as error:
            self._reject(message, error)
            return
        with self._lock:
            self._compiling[message.key] = (future, client)
        _when_compiled(future, done)

    def _compile(self, front_end: int, control: Control) -> None:
        """Compile the grammar of a control and reply. Completes at once or later, on any thread."""
        name = (front_end, control.call)

        def answer(result: Grammar | Exception) -> None:
            with self._lock:
                if name not in self._calls:
                    return
                del self._calls[name]
            reply = Reply(control.call)
            if isinstance(result, Exception):
                reply = _error_reply(control.call, result)
            self._emit(front_end, reply)

        client = str(control.arguments.get("client", ""))
        try:
            spec = msgspec.convert(control.arguments.get("spec"), GrammarSpec)
            future = self._compiler.compile(spec, client)
        except (msgspec.ValidationError, UserError, Overloaded) as error:
            self._emit(front_end, _error_reply(control.call, error))
            return
        with self._lock:
            self._calls[name] = lambda: self._compiler.withdraw(future, client)
        _when_compiled(future, answer)

    def _read_adapter(self, front_end: int, control: Control) -> None:
        """Check the files of an adapter on another thread, then register the adapter on the loop's
        thread."""
        name = (front_end, control.call)

        def done(future: "Future[LoRAInfo]") -> None:
            with self._lock:
                self._calls.pop(name, None)
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                register = Control(control.call, REGISTER_ADAPTER, {"info": future.result()})
                self._inbox.put((front_end, register, [], None))
                return
            refusal: Exception = UserError(str(error))
            if not isinstance(error, ConfigError):
                logger.error("An adapter cannot be read", exc_info=error)
                refusal = RequestFailed("the adapter cannot be read")
            self._emit(front_end, _error_reply(control.call, refusal))

        adapter = NamedAdapter(*control.arguments["adapter"])
        client = str(control.arguments.get("client", ""))
        try:
            future = self._adapters.submit(adapter, client)
        except Overloaded as error:
            self._emit(front_end, _error_reply(control.call, error))
            return
        with self._lock:
            # A read that has begun is not cancelled: other engines may have registered the adapter.
            self._calls[name] = future.cancel
        future.add_done_callback(done)

    def _cancel_compiling(self, keys: Iterable[int]) -> None:
        """Drop requests whose grammar is being compiled; ignores other keys."""
        with self._lock:
            gone = [self._compiling.pop(key) for key in keys if key in self._compiling]
        for future, client in gone:
            self._compiler.withdraw(future, client)

    def _cancel_controls(self, names: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            gone = [self._calls.pop(name) for name in names if name in self._calls]
        for cancel in gone:
            cancel()

    def _reject(self, message: AddRequest, error: Exception) -> None:
        finish = Finish(
            message.key,
            "error",
            error=str(error),
            param=error.param if isinstance(error, UserError) else None,
            is_retryable=isinstance(error, Overloaded),
        )
        self._emit(message.key >> FRONT_END_SHIFT, StepOutput(step=0, finished=[finish]))

    def stop(self, reason: BaseException) -> None:
        """Make `run` raise `reason`, before its next step at the latest."""
        self.stopped.stop(reason)
        self._inbox.put(reason)

    def run(
        self, executor: Executor, *, freeze_garbage: bool = False, group: HubClient | None = None
    ) -> None:
        """Start the executor, send Ready, and step until `stop`. Never returns normally; blocks
        while there is no work. The caller closes the executor. `freeze_garbage`: for a process that
        runs nothing else. `group`: group of the engines that step together."""
        try:
            self._run(executor, freeze_garbage, group)
        finally:
            self._compiler.close()
            self._adapters.close()

    def _run(self, executor: Executor, freeze_garbage: bool, group: HubClient | None) -> None:
        adapters = self._adapters.read_configured()
        worker = executor.start(self._report)
        if self._is_lockstep:
            self._lockstep = LockstepInbox(executor, self._inbox)
        ends = frozenset(worker.eos_token_ids)
        self._compiler.start(self._config.model, worker.vocab_size, ends, early=freeze_garbage)
        table = make_table(self._config, worker)
        if group is not None:
            self._sync = DPSync(
                group,
                self._engine,
                make_table(self._config, worker),
                max_tokens=worker.bucket_limits.max_num_batched_tokens,
            )
        core = build_core(
            self._config,
            executor,
            worker,
            table,
            time.monotonic,
            sync=self._sync,
            adapters=adapters,
            on_start=self._emit_all,
        )
        own = Pollables(fds=[self._inbox.wake.fd])
        self._waiter = Waiter(*(own | executor.pollables | self._sync.pollables))
        for front_end in range(self._num_front_ends):
            core.add_front_end(front_end)
        if self._config.cache.enable_prefix_caching and worker.bucket_limits.prefix_caching:
            self._block_size = worker.block_size
            self._all_see_images = worker.request_tiles > 0
        if freeze_garbage:
            # Existing objects live until exit: exclude them from garbage collection.
            gc.collect()
            gc.freeze()
        self._emit_adapters(core)
        ready = make_ready(self._engine, worker, self._config)
        self._emit(None, ready)
        self._ready = ready
        num_deferred = 0
        while True:
            if num_deferred != core.num_deferred:
                num_deferred = core.num_deferred
                total = len(worker.buckets) + worker.num_deferred
                self._emit(
                    None, Progress(self._engine, BACKGROUND_WARMUP, total - num_deferred, total)
                )
            self._process_inbox(core)
            self._emit_all(core.step())

    def _emit_all(self, messages: list[tuple[int, StepOutput]]) -> None:
        for front_end, message in messages:
            self._emit(front_end, message)

    def _report(self, progress: WarmupProgress) -> None:
        self.stopped.check()
        stage, done, total = progress.stage, progress.done, progress.total
        self._emit(None, Progress(self._engine, stage, done, total, progress.left_s))

    def _process_inbox(self, core: EngineCore) -> None:
        if self._lockstep is not None:
            for item in self._lockstep.take(has_work=core.has_work):
                self._handle(core, item)
            return
        if core.is_waiting or not core.has_work:
            self._wait(core)
        for _ in range(self._inbox.qsize()):
            self._handle(core, self._inbox.get())

    def _wait(self, core: EngineCore) -> None:
        """Wait until `core` may have work. While idle, continues the warm-up after IDLE_S, or
        returns freed memory to the operating system after TRIM_AFTER_S."""
        self._inbox.wake.clear()
        if self._inbox.qsize():
            return
        if core.is_waiting:
            self._waiter.wait(core.wait_s)
        elif core.num_deferred and not (core.is_warming_up or self._sync.is_coupled):
            if not self._waiter.wait(0.0 if self._is_busy else IDLE_S):
                core.warm_up_next()
                self._is_busy = True
        elif not self._waiter.wait(TRIM_AFTER_S):
            trim_memory()
            self._waiter.wait()

    def _handle(self, core: EngineCore, item: Entry) -> None:
        self._is_busy = False
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, FrontEndChange):
            self._change_front_end(core, item)
            return
        front_end, message, hashes, grammar = item
        if isinstance(message, AddRequest):
            core.add_request(message, hashes, grammar)
        elif isinstance(message, Abort):
            core.abort(message.keys)
        else:
            reply = _answer(core, message)
            # Send outputs before the reply, so that the caller sees the new sleep state with the
            # reply.
            for other, tokens in core.take_outputs():
                self._emit(other, tokens)
            self._emit_adapters(core)
            self._emit(front_end, reply)

    def _change_front_end(self, core: EngineCore, change: FrontEndChange) -> None:
        front_end = change.front_end
        if change.is_connected:
            if self._ready is not None:
                self._emit(front_end, Adapters(core.adapters))
                self._emit(front_end, self._ready)
            core.add_front_end(front_end)
            return
        count = core.remove_front_end(front_end)
        # An API server that was drained has no open requests: a regular stop, not a warning.
        level = logging.WARNING if count else logging.DEBUG
        end = f"{counted(count, 'request')} of it {'is' if count == 1 else 'are'} aborted"
        logger.log(level, "API server %d has disconnected: %s", front_end, end)

    def _emit_adapters(self, core: EngineCore) -> None:
        """Send the served adapters to all front ends if they have changed."""
        infos = core.take_adapters()
        if infos is not None:
            self._emit(None, Adapters(infos))


def _when_compiled(
    future: "Future[Grammar]", on_done: Callable[[Grammar | Exception], None]
) -> None:
    """Call `on_done` with the grammar or the error, unless the engine dies first or the future is
    cancelled."""

    def done(future: "Future[Grammar]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        assert error is None or isinstance(error, Exception)
        # Do not reject when the engine dies: requests may resume on another engine.
        if not isinstance(error, EngineDied):
            on_done(future.result() if error is None else error)

    future.add_done_callback(done)


def describe_failure(error: Exception, engine: int = 0) -> Failed:
    """Failed message of an engine that raised `error`. Logs the traceback of unexpected errors."""
    message = str(error)
    is_end_of_process = isinstance(error, EngineDied) and not error.is_logged
    if not isinstance(error, (ConfigError, EngineDied)):
        message = f"{type(error).__name__}: {error}"
        logger.error("The engine has failed", exc_info=error)
    is_config = isinstance(error, ConfigError)
    is_setting = is_config and not isinstance(error, CheckpointError)
    return Failed(
        engine,
        message,
        is_setting,
        may_follow=not (is_config or is_end_of_process),
        is_external=isinstance(error, EngineDied) and error.is_external,
        is_profile=isinstance(error, ProfileWritten),
    )


def make_table(config: EngineConfig, worker: WorkerReady) -> BucketTable:
    """Bucket table with the worker's prepared buckets."""
    table = BucketTable.of_buckets(worker.buckets, worker.bucket_limits)
    table.prefer_prepared = config.warmup.on_unwarmed_shape == "pad"
    return table


def make_ready(engine: int, worker: WorkerReady, config: EngineConfig) -> Ready:
    """Ready message of a worker: copies fields with equal names and adds the engine's fields."""
    facts = msgspec.structs.asdict(worker)
    return Ready(
        engine=engine,
        num_buckets=len(worker.buckets),
        logprobs_mode=config.logprobs_mode,
        ready_unix_s=time.time(),
        **{name: facts[name] for name in Ready.__struct_fields__ if name in facts},
    )


def _answer(core: EngineCore, control: Control) -> Reply:
    try:
        return Reply(control.call, core.control(control.name, control.arguments))
    except (UserError, RequestFailed) as error:
        return _error_reply(control.call, error)


def _error_reply(call: int, error: Exception) -> Reply:
    return Reply(
        call,
        error=str(error),
        is_refusal=isinstance(error, UserError),
        code=error.code if isinstance(error, UserError) else None,
        is_overload=isinstance(error, Overloaded),
    )
