"""Compiles each grammar once, on threads, after a trial in an isolated process.

The grammar library is native code: a spec that overflows its stack, or that it does not finish
compiling, must not end the engine. So a spec is first compiled and followed for some tokens in a
fork with limits. If that succeeds, it is compiled here from the same source, with more stack.

A spec that the library refuses, crashes on, or does not finish within the processor time and memory
of a fork is a UserError, which is cached like a grammar. A trial that another cause ended (its wall
time on a busy machine, a signal, a lost process) raises Overloaded, and the next request tries
again."""

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from config.errors import EngineDied, Overloaded, UserError
from config.native import panics_as_errors
from config.params.structured_output import FREE, GrammarSpec
from engine.process.isolation import (
    Call,
    ForkServer,
    Limits,
    failures_of_requests,
)
from engine.structured_output.grammar import Grammar, Vocabulary

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_PENDING = 64
"""Specs that may wait for a thread, or be compiled."""
MAX_CACHED = 256
"""Compiled grammars and errors of the most recently requested specs."""
MAX_CACHED_BYTES = 512 * 2**20
"""Memory of the cached grammars. A grammar in use stays in memory after its eviction."""
MAX_GRAMMAR_BYTES = 128 * 2**20
"""A cached grammar that has grown beyond it is compiled again for the next request."""
STACK_BYTES = 128 * 2**20
"""Four times the limit in the fork."""
LIMITS = Limits(cpu_s=1.0, wall_s=1.7, memory_bytes=512 * 2**20, stack_bytes=32 * 2**20)
"""Ordinary schemas take 40 ms and 10 MiB; an error must be reported within 2 s."""


class _Setup(msgspec.Struct, array_like=True):
    folder: str
    vocab_size: int
    eos_ids: list[int]


class _Checked(msgspec.Struct, array_like=True):
    """The result of a spec's trial."""

    source: str = ""
    num_bytes: int = 0
    error: str | None = None


class GrammarCompiler:
    """May be called from any thread, after `start`."""

    def __init__(self, *, limits_time: bool = True) -> None:
        """`limits_time`: as in Grammar."""
        self._limits_time = limits_time
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._cached: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._num_pending = 0
        self._vocabulary: Future[Vocabulary] | None = None
        self._fork_server: ForkServer | None = None

    def start(
        self, folder: str, vocab_size: int, eos_ids: frozenset[int], *, early: bool = False
    ) -> None:
        """Start reading the vocabulary; compilations wait for it. `early`: also start the fork
        server, for which the first spec would otherwise wait for about 0.5 s."""
        setup = msgspec.msgpack.encode(_Setup(folder, vocab_size, sorted(eos_ids)))
        self._fork_server = ForkServer("engine.structured_output.compilation", setup, LIMITS)
        # A thread takes the size that is set when it starts, and it starts with its first work.
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
        # Nothing to start if closed meanwhile, or if the model has no vocabulary.
        with contextlib.suppress(EngineDied):
            if not vocabulary.cancelled() and vocabulary.exception() is None:
                self._fork_server.start()

    def compile(self, spec: GrammarSpec) -> "Future[Grammar]":
        """A future of the grammar of `spec`, or of a UserError. Raises Overloaded when too many
        wait."""
        with self._lock:
            cached_future = self._cached.get(spec)
            if cached_future is not None and _bytes_of(cached_future) <= MAX_GRAMMAR_BYTES:
                self._cached.move_to_end(spec)
                return cached_future
            if self._num_pending >= MAX_PENDING:
                raise Overloaded(f"{self._num_pending} grammars wait, at most {MAX_PENDING} may")
            self._num_pending += 1
            cached = self._cached
            cached[spec] = future = self._threads.submit(self._compile_checked, spec)
            num_bytes = sum(map(_bytes_of, cached.values()))
            while len(cached) > MAX_CACHED + MAX_PENDING or num_bytes > MAX_CACHED_BYTES:
                num_bytes -= _bytes_of(cached.popitem(last=False)[1])
        # Outside of the lock: it may run at once.
        future.add_done_callback(lambda done: self._forget_interrupted(spec, done))
        return future

    def close(self) -> None:
        """Compile nothing more; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._fork_server is not None:
            self._fork_server.close()

    def _forget_interrupted(self, spec: GrammarSpec, done: "Future[Grammar]") -> None:
        """Drop a result that says nothing about `spec` from the cache."""
        if not done.cancelled() and isinstance(done.exception(), UserError | None):
            return
        with self._lock:
            if self._cached.get(spec) is done:
                del self._cached[spec]

    def _compile_checked(self, spec: GrammarSpec) -> Grammar:
        assert self._vocabulary is not None, "compile before start"
        try:
            with panics_as_errors():
                vocabulary = self._vocabulary.result()
                if spec.kind == FREE:
                    return Grammar(spec, vocabulary, limits_time=self._limits_time)
                checked = self._check(spec)
                return Grammar(
                    spec,
                    vocabulary,
                    checked.source,
                    checked.num_bytes,
                    limits_time=self._limits_time,
                )
        except (UserError, Overloaded, EngineDied):
            raise
        except MemoryError:
            raise Overloaded(f"there is no memory to compile the {spec.kind}") from None
        except Exception as error:  # the border of this thread: a bug of ours or the library's
            logger.exception("a grammar of kind %s broke the compiler", spec.kind)
            raise UserError(f"the {spec.kind} cannot be compiled: {error}") from error
        finally:
            with self._lock:
                self._num_pending -= 1

    def _check(self, spec: GrammarSpec) -> _Checked:
        """Compile `spec` in a fork. Raises UserError when the spec is to blame for a failure, else
        Overloaded."""
        assert self._fork_server is not None, "compile before start"
        action, refusal = f"compiling the {spec.kind}", f"the {spec.kind} cannot be compiled"
        with failures_of_requests(action, refusal, param="structured_outputs"):
            answer = self._fork_server.call(msgspec.msgpack.encode(spec))
        checked = msgspec.msgpack.decode(answer, type=_Checked)
        if checked.error is not None:
            raise UserError(checked.error, param="structured_outputs")
        return checked


def prepare(setup: bytes) -> Call:
    """Entry of the fork server: compiles specs for one vocabulary and follows them a little."""
    parsed = msgspec.msgpack.decode(setup, type=_Setup)
    vocabulary = Vocabulary(parsed.folder, parsed.vocab_size, frozenset(parsed.eos_ids))
    decode = msgspec.msgpack.Decoder(GrammarSpec).decode
    # Initializes the library once, so that this memory is not counted below. A vocabulary that
    # cannot spell JSON may still spell other grammars.
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
                    f"the {spec.kind} is too large: compiled it takes {num_bytes >> 20} MiB, at "
                    f"most {MAX_GRAMMAR_BYTES >> 20} are allowed"
                )
            checked = _Checked(grammar.source or "", num_bytes)
            # Freeing runs native code too.
            del grammar
        except UserError as error:
            checked = _Checked(error=error.message)
        return msgspec.msgpack.encode(checked)

    return check


def _bytes_of(future: "Future[Grammar]") -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().num_bytes


def _private_bytes() -> int:
    """Memory of this process without file mappings, which forks share."""
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
