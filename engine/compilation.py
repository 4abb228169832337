"""Compiler: specs to grammars on threads of its own, each once. Knows no requests."""

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from config.errors import Overloaded, UserError
from config.grammar import GrammarSpec
from engine.grammar import Grammar, Vocabulary

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_PENDING = 64
"""Specs that may wait for a thread."""
MAX_KEPT = 256
"""Grammars, or refusals, of the specs that were asked for last."""


class Compiler:
    """Safe to call from any thread, once `start` was called."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._num_pending = 0
        self._vocabulary: Future[Vocabulary] | None = None

    def start(self, folder: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Begin to read the vocabulary; what is compiled meanwhile waits for it."""
        self._vocabulary = self._threads.submit(Vocabulary, folder, vocab_size, eos_ids)

    def compile(self, spec: GrammarSpec) -> "Future[Grammar]":
        """The grammar of `spec`, or a UserError: at once where it was asked for before. Raises
        Overloaded when too many wait."""
        with self._lock:
            found = self._kept.get(spec)
            if found is not None:
                self._kept.move_to_end(spec)
                return found
            if self._num_pending >= MAX_PENDING:
                raise Overloaded(f"{self._num_pending} grammars wait, at most {MAX_PENDING} may")
            self._num_pending += 1
            self._kept[spec] = made = self._threads.submit(self._make, spec)
            while len(self._kept) > MAX_KEPT + MAX_PENDING:
                self._kept.popitem(last=False)
        return made

    def close(self) -> None:
        """Compile nothing more; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, spec: GrammarSpec) -> Grammar:
        assert self._vocabulary is not None, "compile before start"
        try:
            return Grammar(spec, self._vocabulary.result())
        except UserError:
            raise
        except Exception as error:  # the border of this thread: a bug of ours or the library's
            logger.exception("a grammar of kind %s broke the compiler", spec.kind)
            raise UserError(f"the {spec.kind} cannot be compiled: {error}") from error
        finally:
            with self._lock:
                self._num_pending -= 1
