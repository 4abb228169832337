"""Compiles each grammar once, on threads, after a trial in an isolated process.

The grammar library is native code: a spec that overflows its stack, or whose compilation does not
end, must not kill the engine. A spec is therefore first compiled, and matched against some tokens,
in a fork with limits. If that succeeds, it is compiled in this process from the same source, with
more stack.

A spec that the library refuses, crashes on, or does not finish within the fork's limits of
processor time and memory is a UserError, which is cached like a grammar. A trial that failed for
another reason (its wall time on a busy machine, a signal, a lost process) raises Overloaded, and
the next request tries again."""

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
"""Maximum specs that wait for a thread or are being compiled."""
MAX_CACHED = 256
"""Maximum cached grammars and errors; the least recently requested spec is evicted."""
MAX_CACHED_BYTES = 512 * 2**20
"""Maximum memory of the cached grammars. An evicted grammar stays in memory while it is used."""
MAX_GRAMMAR_BYTES = 128 * 2**20
"""Size above which a cached grammar is compiled again for the next request."""
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
    """The result of a spec's trial in the fork."""

    source: str = ""
    num_bytes: int = 0
    error: str | None = None


class GrammarCompiler:
    """Compiles and caches grammars. Thread-safe after `start`."""

    def __init__(self, *, limits_time: bool = True) -> None:
        """`limits_time`: see Grammar."""
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
        server, which would otherwise delay the first spec by about 0.5 s."""
        setup = msgspec.msgpack.encode(_Setup(folder, vocab_size, sorted(eos_ids)))
        self._fork_server = ForkServer("engine.structured_output.compilation", setup, LIMITS)
        # stack_size applies to threads started later, and the pool starts its thread on first work.
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
        # Skip if closed meanwhile, or if the model has no vocabulary.
        with contextlib.suppress(EngineDied):
            if not vocabulary.cancelled() and vocabulary.exception() is None:
                self._fork_server.start()

    def compile(self, spec: GrammarSpec) -> "Future[Grammar]":
        """A future of the grammar of `spec`, or of a UserError. Raises Overloaded if too many specs
        are pending."""
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
        # Outside of the lock: the callback may run at once.
        future.add_done_callback(lambda done: self._forget_interrupted(spec, done))
        return future

    def close(self) -> None:
        """Stop compiling; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._fork_server is not None:
            self._fork_server.close()

    def _forget_interrupted(self, spec: GrammarSpec, done: "Future[Grammar]") -> None:
        """Drop a cached result that was not caused by `spec`, such as Overloaded."""
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
        except Exception as error:  # thread boundary: a bug of ours or of the library
            logger.exception("a grammar of kind %s broke the compiler", spec.kind)
            raise UserError(f"the {spec.kind} cannot be compiled: {error}") from error
        finally:
            with self._lock:
                self._num_pending -= 1

    def _check(self, spec: GrammarSpec) -> _Checked:
        """Compile `spec` in a fork. Raises UserError if the spec caused a failure, else
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
    """Entry point of the fork server: compiles and probes specs for a vocabulary."""
    parsed = msgspec.msgpack.decode(setup, type=_Setup)
    vocabulary = Vocabulary(parsed.folder, parsed.vocab_size, frozenset(parsed.eos_ids))
    decode = msgspec.msgpack.Decoder(GrammarSpec).decode
    # Initializes the library before the fork, so that this memory is not counted for a spec. A
    # vocabulary that cannot spell JSON may still work with other grammars.
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
            # Freeing also runs native code.
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
