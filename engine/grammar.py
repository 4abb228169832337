"""Grammars: a spec compiled for a vocabulary, and a Guide that follows one output by it. Knows no
requests and no threads; nothing here outlasts its bounds of time and size."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from config.errors import UserError
from config.grammar import GrammarSpec
from engine.json_bounds import check_bounds
from engine.structural_tag import lark_of_tags
from hpu.step import TOKENS_PER_WORD

MAX_GRAMMAR_SIZE = 20_000
MAX_ROW_ITEMS = 8_000
"""Both as the library counts: an object of some 2,000 optional properties."""
PROBE_STEPS = 256
"""A new grammar is followed so far at random: what blows up mostly does so soon."""
START_S, STEP_S = 0.1, 0.002
"""What it may cost to follow an output: at first, and for each token. Ordinary grammars take a
twentieth; a very ambiguous one would hold up everybody's step."""
MAX_MESSAGE_CHARACTERS = 300

JSON_FORM: Any = {
    # One blank at most where JSON allows any number: with free choice small models write blanks
    # until they are cut.
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    "coerce_one_of": True,
    "lenient": False,
}
_JSON_OBJECT = '{"type":"object"}'


class Vocabulary:
    """The tokens that grammars are compiled for."""

    def __init__(self, folder: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Reads tokenizer.json; a second or so for a large one. `vocab_size` is the model's. Raises
        UserError when the model can have no grammars, whoever asks."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise _bad("this model has no tokenizer.json, which structured output needs")
        try:
            self.tokens = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=sorted(eos_ids))
        except ValueError as error:
            raise _bad(
                f"this model's tokenizer is not fit for structured output: {error}"
            ) from None
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids


class Grammar:
    """A compiled spec. Copies of its matcher follow outputs."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """Raises UserError with what is wrong with the spec, or that it is too large. Takes far
        less than a second; other threads run meanwhile."""
        self.vocabulary = vocabulary
        limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, max_items_in_row=MAX_ROW_ITEMS)
        source = _SOURCES[spec.kind](spec.text)
        self._matcher = LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise _bad(f"the {spec.kind} cannot be compiled: {_shown(self._matcher.get_error())}")
        error = self._probe()
        if error is not None:
            raise _bad(f"the {spec.kind} cannot be compiled: {error}")

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning."""
        return self._matcher.deep_copy()

    def _probe(self) -> str | None:
        """Follow it a little, so that what nobody can follow is refused before it runs."""
        guide = Guide(self, min_tokens=0, end_ids=self.vocabulary.eos_ids, ignore_eos=True)
        random = np.random.default_rng(0)
        error = guide.error
        for _ in range(PROBE_STEPS):
            if error is not None:
                return error
            token = int(random.choice(_tokens(guide.words)))
            if token in self.vocabulary.eos_ids:
                return None
            error = guide.advance(token)
        return error


class Guide:
    """Follows one output, token by token.

    `min_tokens` and `ignore_eos` hold as long as the grammar leaves another choice: once it is
    complete, only an end token can follow.
    """

    def __init__(
        self, grammar: Grammar, *, min_tokens: int, end_ids: frozenset[int], ignore_eos: bool
    ) -> None:
        """`end_ids` end the output, and are barred before `min_tokens`; end tokens among them or
        not."""
        vocabulary = grammar.vocabulary
        self._matcher = grammar.matcher()
        self._min_tokens = min_tokens
        self._ignore_eos = ignore_eos
        self._eos = _words(vocabulary.eos_ids, vocabulary.vocab_size)
        self._ends = _words(vocabulary.eos_ids | end_ids, vocabulary.vocab_size)
        self._count = 0
        self._spent_s = 0.0
        self.error: str | None = None
        """What is wrong if the grammar cannot be followed any more."""
        self.words = self._eos
        """(W,) uint32: the tokens that may come next."""
        self._work(None)

    def advance(self, token: int) -> str | None:
        """Go on behind `token`, which was allowed; gives `error`."""
        self._count += 1
        self._work(token)
        return self.error

    def _work(self, token: int | None) -> None:
        # This thread's own time: a busy machine makes no grammar worse.
        start = time.thread_time()
        if token is not None:
            self._matcher.consume_token(token)
        if not self._matcher.is_error():
            self.words = self._mask()
        self._spent_s += time.thread_time() - start
        allowed_s = START_S + STEP_S * self._count
        if self._matcher.is_error():
            self.error = _shown(self._matcher.get_error())
        elif self._spent_s > allowed_s:
            self.error = (
                f"{self._count} tokens took {self._spent_s:.3f} s, at most {allowed_s} s may"
            )

    def allowed(self) -> set[int]:
        """The tokens that may come next."""
        return set(_tokens(self.words).tolist())

    def _mask(self) -> npt.NDArray[np.uint32]:
        # The library's masks may have a word more than the vocabulary needs.
        mask = self._matcher.compute_bitmask()
        words = np.frombuffer(mask, dtype="<u4", count=len(self._eos))
        barred = self._ends if self._count < self._min_tokens else None
        if barred is None and self._ignore_eos:
            barred = self._eos
        if barred is not None:
            left = words & ~barred
            if left.any():
                return left
        return words


def _words(tokens: frozenset[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    bits = np.zeros(-(-vocab_size // TOKENS_PER_WORD) * TOKENS_PER_WORD, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def _tokens(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def _json(text: str) -> str:
    try:
        check_bounds(json.loads(text))
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the json cannot be compiled: {_shown(str(error))}") from None


def _choice(text: str) -> str:
    # One terminal: thousands of alternatives of a rule would each be an item of the parser.
    words: list[str] = json.loads(text)
    options = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")


def _grammar(text: str) -> str:
    """Lark, or EBNF with `root ::=`."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)
    except (GbnfToLarkError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise _bad(f"the grammar cannot be read: {_shown(str(error))}") from None


def _structural_tag(text: str) -> str:
    return LLMatcher.grammar_from_lark(lark_of_tags(json.loads(text), JSON_FORM))


_SOURCES: dict[str, Callable[[str], Any]] = {
    "json": _json,
    "json_object": lambda text: _json(_JSON_OBJECT),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _shown(message: str) -> str:
    """The first of it: what follows is the state of the parser."""
    return message.partition("\n<state>")[0].strip()[:MAX_MESSAGE_CHARACTERS]


def _bad(message: str) -> UserError:
    return UserError(message, param="structured_outputs")
