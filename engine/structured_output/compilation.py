"""Compiles and caches grammars, on threads, after a trial in an isolated process.

The grammar library is native code: a spec that overflows its stack, or whose compilation does not
end, must not kill the engine. A spec is therefore first compiled, and matched against some tokens,
in a fork with limits. If that succeeds, it is compiled in this process from the same source, with
more stack.

A spec that the library rejects, crashes on, or does not finish within the fork's limits of CPU time
and memory is a UserError, which is cached like a grammar. The same applies to a grammar that was
refused during matching because it took too much CPU time. A trial that failed for another reason
(its wall time on a busy machine, a signal, a lost process) raises Overloaded, and the next request
tries again.

Compilations are queued fairly among clients. A spec that several clients wait for is compiled in
the first turn of any of them; its compilation is cancelled when no client waits for it.
"""

import contextlib
import logging
import os
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future
from pathlib import Path

import msgspec

from config.errors import EngineDied, Overloaded, UserError
from config.fair_threads import FairThreads, client_of_task
from config.native import panics_as_errors
from config.params.structured_output import FREE, GrammarSpec
from engine.process.isolation import (
    Call,
    CallCancelled,
    Cancellation,
    ForkServer,
    Limits,
    failures_of_requests,
)
from engine.structured_output.grammar import Grammar, Vocabulary

logger = logging.getLogger(__name__)

NUM_THREADS = 3
THREADS_PER_CLIENT = 2
"""Maximum threads of a client, so that other clients do not wait for two slow specs of the same
client."""
MAX_PENDING = 64
"""Maximum number of pending specs, waiting or being compiled (a spec in the queues of several
clients counts for each); a client below its fair share may exceed it."""
MAX_CACHED = 256
"""Maximum cached grammars and errors while MAX_PENDING specs are pending; with fewer pending specs,
the cache may use the difference. The least recently requested spec is evicted."""
MAX_CACHED_BYTES = 512 * 2**20
"""Maximum memory of the cached grammars when a spec is added. An evicted grammar stays in memory
while it is used."""
MAX_GRAMMAR_BYTES = 128 * 2**20
"""Maximum memory of a compiled grammar. Larger grammars are refused; a cached grammar that grows
beyond the limit is compiled again for the next request."""
STACK_BYTES = 128 * 2**20
"""Stack of a compiler thread: four times the limit in the fork."""
LIMITS = Limits(cpu_s=1.0, wall_s=1.7, memory_bytes=512 * 2**20, stack_bytes=32 * 2**20)
"""Limits of the fork. Ordinary schemas take 40 ms and 10 MiB; errors must be reported within 2
s."""


class _Setup(msgspec.Struct, array_like=True):
    folder: str
    vocab_size: int
    eos_ids: list[int]


class _Checked(msgspec.Struct, array_like=True):
    """Result of a spec's trial in the fork."""

    source: str = ""
    num_bytes: int = 0
    error: str | None = None


class _Compilation:
    """A spec that is being compiled or waits for a thread. Guarded by the compiler's lock."""

    __slots__ = ("cancellation", "future", "has_started", "spec", "turns", "waiters")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.future: Future[Grammar] = Future()
        self.cancellation = Cancellation()
        self.has_started = False
        self.waiters: Counter[str] = Counter()
        """Number of `compile` calls of each client that waits for the grammar."""
        self.turns: dict[str, Future[None]] = {}
        """Queued calls of the clients that requested the spec before its compilation started, by
        client."""


class GrammarCompiler:
    """Compiles and caches grammars. Thread-safe after `start`."""

    def __init__(self, *, limits_time: bool = True) -> None:
        """`limits_time`: see Grammar."""
        self._limits_time = limits_time
        self._threads = FairThreads(
            NUM_THREADS,
            "grammar",
            per_client=THREADS_PER_CLIENT,
            max_calls=MAX_PENDING,
            nouns="grammars",
        )
        self._lock = threading.Lock()
        self._cached: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._pending: dict[Future[Grammar], _Compilation] = {}
        self._vocabulary: Future[Vocabulary] | None = None
        self._fork_server: ForkServer | None = None

    def start(
        self, folder: str, vocab_size: int, eos_ids: frozenset[int], *, early: bool = False
    ) -> None:
        """Start reading the vocabulary; compilations wait for it. `early`: also start the fork
        server, which would otherwise delay the first spec by about 0.5 s."""
        setup = msgspec.msgpack.encode(_Setup(folder, vocab_size, sorted(eos_ids)))
        self._fork_server = ForkServer("engine.structured_output.compilation", setup, LIMITS)
        # stack_size applies to threads started later, and the pool starts its threads on first use.
        before = threading.stack_size(STACK_BYTES)
        try:
            self._vocabulary = self._threads.submit(Vocabulary, folder, vocab_size, eos_ids)
            for _ in range(NUM_THREADS - 1):
                self._threads.submit(self._vocabulary.exception)
        finally:
            threading.stack_size(before)
        if early:
            self._vocabulary.add_done_callback(self._start_fork_server)

    def _start_fork_server(self, vocabulary: "Future[Vocabulary]") -> None:
        assert self._fork_server is not None
        # Skip if the compiler was closed or the vocabulary could not be read.
        with contextlib.suppress(EngineDied):
            if not vocabulary.cancelled() and vocabulary.exception() is None:
                self._fork_server.start()

    def compile(self, spec: GrammarSpec, client: str = "") -> "Future[Grammar]":
        """Future of the grammar of `spec`, shared by all callers. It fails with a UserError if the
        spec cannot be compiled. Raises Overloaded if MAX_PENDING specs are pending and `client` has
        its share of them."""
        with self._lock:
            future = self._cached.get(spec)
            if future and (refusal := _refusal_of(future)):
                future = self._cached[spec] = Future()
                message = f"the {spec.noun} cannot be enforced: {refusal}"
                future.set_exception(UserError(message, param="structured_outputs"))
            if future is None or _bytes_of(future) > MAX_GRAMMAR_BYTES:
                return self._add(spec, client)
            self._cached.move_to_end(spec)
            if future in self._pending:
                compilation = self._pending[future]
                if not compilation.has_started and client not in compilation.turns:
                    # Queue the spec for this client, too: the turns of other clients may come much
                    # later.
                    compilation.turns[client] = self._take_turn(compilation, client)
                compilation.waiters[client] += 1
            return future

    def withdraw(self, future: "Future[Grammar]", client: str = "") -> None:
        """Undo a call of `compile` whose caller no longer waits for `future`. If no caller
        waits, the spec leaves the queue or its fork is killed. No effect after the end of the
        compilation."""
        with self._lock:
            if future not in self._pending:
                return
            compilation = self._pending[future]
            compilation.waiters[client] -= 1
            if compilation.waiters[client] > 0:
                return
            del compilation.waiters[client]
            if client in compilation.turns:
                compilation.turns.pop(client).cancel()
            if compilation.waiters:
                return
            self._forget(compilation)
            compilation.cancellation.cancel()
        # Outside of the lock: callbacks run at once. No effect once the compilation has started.
        future.cancel()

    def close(self) -> None:
        """Stop all compilations; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._fork_server is not None:
            self._fork_server.close()

    def _add(self, spec: GrammarSpec, client: str) -> "Future[Grammar]":
        """Start a compilation. The caller holds the lock."""
        compilation = _Compilation(spec)
        compilation.turns[client] = self._take_turn(compilation, client)
        compilation.waiters[client] = 1
        cached, future = self._cached, compilation.future
        cached[spec] = future
        self._pending[future] = compilation
        num_bytes = sum(map(_bytes_of, cached.values()))
        while len(cached) > MAX_CACHED + MAX_PENDING or num_bytes > MAX_CACHED_BYTES:
            num_bytes -= _bytes_of(cached.popitem(last=False)[1])
        return future

    def _take_turn(self, compilation: _Compilation, client: str) -> "Future[None]":
        with client_of_task(client):
            return self._threads.submit(self._run, compilation)

    def _run(self, compilation: _Compilation) -> None:
        """Compile in a client's turn, unless an earlier turn of another client has done so."""
        with self._lock:
            if compilation.has_started or compilation.cancellation.is_cancelled:
                return
            compilation.has_started = True
            future = compilation.future
            future.set_running_or_notify_cancel()
        try:
            grammar = self._compile_checked(compilation.spec, compilation.cancellation)
        except BaseException as error:
            self._finish(compilation, has_result=isinstance(error, UserError))
            future.set_exception(error)
            # A reference cycle of the traceback, this frame and the future would keep memory alive.
            del future
        else:
            self._finish(compilation, has_result=True)
            future.set_result(grammar)

    def _finish(self, compilation: _Compilation, *, has_result: bool) -> None:
        """Clean up after a compilation. `has_result`: the grammar, or an error caused by the spec,
        stays cached. Other errors, such as Overloaded, are not cached."""
        with self._lock:
            self._pending.pop(compilation.future, None)
            for turn in compilation.turns.values():
                turn.cancel()
            if not has_result:
                self._forget(compilation)

    def _forget(self, compilation: _Compilation) -> None:
        """Remove a compilation, so that the next call of `compile` starts another. The caller holds
        the lock."""
        self._pending.pop(compilation.future, None)
        if self._cached.get(compilation.spec) is compilation.future:
            del self._cached[compilation.spec]

    def _compile_checked(self, spec: GrammarSpec, cancellation: Cancellation) -> Grammar:
        assert self._vocabulary is not None, "compile before start"
        try:
            with panics_as_errors():
                vocabulary = self._vocabulary.result()
                if spec.kind == FREE:
                    return Grammar(spec, vocabulary, limits_time=self._limits_time)
                checked = self._check(spec, cancellation)
                return Grammar(
                    spec,
                    vocabulary,
                    checked.source,
                    checked.num_bytes,
                    limits_time=self._limits_time,
                )
        except (UserError, Overloaded, EngineDied):
            raise
        except CallCancelled:
            raise Overloaded(f"compiling the {spec.noun} was cancelled") from None
        except MemoryError:
            raise Overloaded(f"the server has no memory left to compile the {spec.noun}") from None
        except Exception as error:  # Thread boundary: a bug in this code or in the library.
            logger.exception("Compiling a grammar of kind %s failed", spec.kind)
            raise UserError(f"the {spec.noun} cannot be compiled: {error}") from error

    def _check(self, spec: GrammarSpec, cancellation: Cancellation) -> _Checked:
        """Compile `spec` in a fork. Raises UserError if the spec caused a failure, Overloaded for
        other failures."""
        assert self._fork_server is not None, "compile before start"
        action, refusal = f"compiling the {spec.noun}", f"the {spec.noun} cannot be compiled"
        with failures_of_requests(action, refusal, param="structured_outputs"):
            answer = self._fork_server.call(msgspec.msgpack.encode(spec), cancellation=cancellation)
        checked = msgspec.msgpack.decode(answer, type=_Checked)
        if checked.error is not None:
            raise UserError(checked.error, param="structured_outputs")
        return checked


def prepare(setup: bytes) -> Call:
    """Entry point of the fork server: compiles and probes specs for a vocabulary."""
    parsed = msgspec.msgpack.decode(setup, type=_Setup)
    vocabulary = Vocabulary(parsed.folder, parsed.vocab_size, frozenset(parsed.eos_ids))
    decode = msgspec.msgpack.Decoder(GrammarSpec).decode
    # Initialize the library before the fork, so that its memory is not counted for a spec. A
    # vocabulary without tokens for JSON may still work with other grammars.
    with contextlib.suppress(UserError):
        Grammar(GrammarSpec("json_object"), vocabulary)

    def check(payload: bytes) -> bytes:
        spec = decode(payload)
        before = _private_bytes()
        try:
            grammar = Grammar(spec, vocabulary)
            num_bytes = max(0, _private_bytes() - before)
            if num_bytes > MAX_GRAMMAR_BYTES:
                raise UserError(
                    f"the {spec.noun} is too large: compiled it takes {num_bytes >> 20} MiB, at "
                    f"most {MAX_GRAMMAR_BYTES >> 20} are allowed"
                )
            checked = _Checked(grammar.source or "", num_bytes)
            # Free the grammar here, in the isolated process: its native destructor may crash too.
            del grammar
        except UserError as error:
            checked = _Checked(error=error.message)
        return msgspec.msgpack.encode(checked)

    return check


def _bytes_of(future: "Future[Grammar]") -> int:
    grammar = _grammar_of(future)
    return grammar.num_bytes if grammar else 0


def _refusal_of(future: "Future[Grammar]") -> str:
    grammar = _grammar_of(future)
    return grammar.refusal if grammar else ""


def _grammar_of(future: "Future[Grammar]") -> Grammar | None:
    """The grammar of a compilation that has succeeded, else None."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def _private_bytes() -> int:
    """Memory of this process in bytes, without file mappings, which forks share."""
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
