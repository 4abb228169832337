"""Grammars: a spec compiled for a vocabulary, and a Guide that follows one output by it."""

import json
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from config.errors import UserError
from config.params.structured_output import FREE, GrammarSpec, ThinkingSpec
from engine.structured_output.bounds import check_cycles, check_grammar_size, check_pattern_size
from engine.structured_output.json_schema import prepare_schema
from engine.structured_output.structural_tag import lark_of_tags
from engine.structured_output.thinking import (
    BEHIND,
    INSIDE,
    OPENING,
    OVER,
    Lexicon,
    Marks,
    Thinking,
)
from engine.structured_output.token_bitmask import Words, has, tokens_of, without, words_of

MAX_GRAMMAR_SIZE = 20_000
MAX_ROW_ITEMS = 8_000
"""Both as the library counts: an object of some 2,000 optional properties."""
PROBE_STEPS = 256
"""A new grammar is followed so far at random: what blows up mostly does so soon."""
OTHER_PROBES, OTHER_PROBE_STEPS = 12, 24
START_S, STEP_S = 0.1, 0.002
"""What it may cost to follow an output: at first, and for each token. Ordinary grammars take a
twentieth; a very ambiguous one would hold up everybody's step."""
SLOW_STEP_S = 0.0003
GROWTH_BYTES_PER_S = 64 * 2**20
"""A step that takes longer extends the grammar's automaton, which all that follow it share. The
rate is the highest that was measured, of the time beyond."""
MAX_MESSAGE_CHARACTERS = 300
MAX_MARKS = 16

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
        self.all = words_of(range(vocab_size), vocab_size)
        """(W,) uint32: every token."""
        self._marks: dict[ThinkingSpec, Marks] = {}

    def marks(self, spec: ThinkingSpec) -> Marks:
        """The marks of `spec` in these tokens; looked for once, as a server has only a few."""
        found = self._marks.get(spec)
        if found is None:
            if len(self._marks) >= MAX_MARKS:
                self._marks = {}
            found = self._marks[spec] = Marks(spec, self.lexicon)
        return found

    @cached_property
    def lexicon(self) -> Lexicon:
        """The bytes of the tokens; read when first asked for."""
        return Lexicon(self.tokens, self.vocab_size)


class Grammar:
    """A compiled spec. Copies of its matcher follow outputs."""

    def __init__(
        self,
        spec: GrammarSpec,
        vocabulary: Vocabulary,
        source: str | None = None,
        compiled_bytes: int = 0,
    ) -> None:
        """Raises UserError with what is wrong with the spec, or that it is too large; other threads
        run meanwhile. `source` is that of an equal grammar that was compiled in another process,
        where it took `compiled_bytes`: what was checked there is not checked again."""
        self._compiled_bytes = compiled_bytes
        self.slow_s = 0.0
        """Time that slow steps of all that followed it took beyond SLOW_STEP_S."""
        self.vocabulary = vocabulary
        self.binds = spec.kind != FREE
        """Whether there is a form: else any text may follow the thinking, and end anywhere."""
        self.marks = None if spec.thinking is None else vocabulary.marks(spec.thinking)
        """Of the thinking before the form; None where there is none."""
        self.source: str | None = None
        """Of the form, as the library reads it; None where there is no form."""
        if not self.binds:
            return
        limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, max_items_in_row=MAX_ROW_ITEMS)
        is_checked = source is not None
        self.source = source or _SOURCES[spec.kind](spec.text, vocabulary)
        self._matcher = LLMatcher(vocabulary.tokens, self.source, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise _bad(f"the {spec.kind} cannot be compiled: {_shown(self._matcher.get_error())}")
        error = None if is_checked else self._probe(spec.kind)
        if error is not None:
            raise _bad(f"the {spec.kind} cannot be compiled: {error}")

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, as estimated: it grows while outputs are followed."""
        return self._compiled_bytes + int(self.slow_s * GROWTH_BYTES_PER_S)

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning; only of one that binds."""
        return self._matcher.deep_copy()

    def _probe(self, kind: str) -> str | None:
        """Follow it a little, so that what nobody can follow is refused before it runs."""
        random = np.random.default_rng(0)
        error = self._follow_at_random(random, PROBE_STEPS)
        # Of a grammar that a caller wrote, one way says little of the others.
        for _ in range(OTHER_PROBES if kind == "grammar" else 0):
            error = error or self._follow_at_random(random, OTHER_PROBE_STEPS)
        return error

    def _follow_at_random(self, random: np.random.Generator, num_steps: int) -> str | None:
        form = Form(self)
        start, count = time.thread_time(), 0
        while form.error is None and count < num_steps:
            words = without(form.words, form.ends)
            token = int(random.choice(tokens_of(words)))
            if token in self.vocabulary.eos_ids:
                return None
            form.advance(token)
            count += 1
            if (error := _overdue(time.thread_time() - start, count)) is not None:
                return error
        return form.error


class Form:
    """Where an output is in the form of a grammar. One that does not bind lets all through."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher() if grammar.binds else None
        self._vocabulary = grammar.vocabulary
        self.ends = words_of(grammar.vocabulary.eos_ids, grammar.vocabulary.vocab_size)
        """(W,) uint32: the tokens that may follow it."""
        self.error: str | None = None
        """What is wrong if it cannot be followed any more."""
        self.words = self.ends
        """(W,) uint32: the tokens that may come next."""
        self._look()

    def advance(self, token: int) -> None:
        """Go on behind `token`, which was allowed."""
        if self._matcher is not None:
            self._matcher.consume_token(token)
            self._look()

    def _look(self) -> None:
        if self._matcher is None:
            self.words = self._vocabulary.all
        elif not self._matcher.is_error():
            # The library's masks may have a word more than the vocabulary needs.
            mask = self._matcher.compute_bitmask()
            self.words = np.frombuffer(mask, dtype="<u4", count=len(self.ends))
        if self._matcher is not None and self._matcher.is_error():
            self.error = _shown(self._matcher.get_error())


class Guide:
    """Follows one output, token by token: through its thinking, if the spec has some, where all
    may come but the end, then through its form.

    `min_tokens` and `ignore_eos` hold as long as the form leaves another choice: once it is
    complete, only an end token can follow. Where nothing binds the text, they are not looked at.
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        min_tokens: int,
        end_ids: frozenset[int],
        ignore_eos: bool,
        thinking_budget: int | None = None,
    ) -> None:
        """`end_ids` end the output, and are barred before `min_tokens`; end tokens among them or
        not. Thinking is closed at `thinking_budget` tokens."""
        vocabulary = grammar.vocabulary
        self._grammar = grammar
        self._min_tokens = min_tokens
        self._ignore_eos = ignore_eos
        self._eos = words_of(vocabulary.eos_ids, vocabulary.vocab_size)
        self._ends = words_of(vocabulary.eos_ids | end_ids, vocabulary.vocab_size)
        self._count = 0
        self._spent_s = 0.0
        self._thinking = None
        if grammar.marks is not None:
            self._thinking = Thinking(grammar.marks, thinking_budget)
        self._form: Form | None = None
        """None while the thinking is open, and where it was begun in a way that no form has."""
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

    def allowed(self) -> set[int]:
        """The tokens that may come next."""
        return set(tokens_of(self.words).tolist())

    def _work(self, token: int | None) -> None:
        # This thread's own time: a busy machine makes no grammar worse.
        start = time.thread_time()
        if token is None:
            if self._state != INSIDE:
                self._form = Form(self._grammar)
        else:
            self._follow(token)
        if self._form is not None and self._form.error is not None:
            self.error = self._form.error
        else:
            self.words = self._within_bounds(self._next())
        step_s = time.thread_time() - start
        self._spent_s += step_s
        if step_s > SLOW_STEP_S:
            self._grammar.slow_s += step_s - SLOW_STEP_S
        if self.error is None:
            self.error = _overdue(self._spent_s, self._count)

    @property
    def _state(self) -> int:
        return OVER if self._thinking is None else self._thinking.state

    def _follow(self, token: int) -> None:
        before, form = self._state, self._form
        fits = form is not None and has(form.words, token)
        if self._thinking is not None and before != OVER:
            self._thinking.take(token)
        if self._state == INSIDE:
            self._form = None
        elif before == INSIDE:
            self._form = Form(self._grammar)
        elif form is not None and (fits or before == OVER):
            form.advance(token)
        elif before == OPENING:
            self._form = None

    def _next(self) -> Words:
        thinking, vocabulary = self._thinking, self._grammar.vocabulary
        words = self._eos if self._form is None else self._form.words
        if thinking is None or thinking.state == OVER:
            return words
        if thinking.forced is not None:
            return self._words([thinking.forced])
        if not self._grammar.binds:
            return words if thinking.state != INSIDE else vocabulary.all
        if thinking.state == INSIDE:
            return vocabulary.all & ~thinking.crossing & ~self._eos
        if thinking.state == BEHIND:
            return words | self._words(thinking.marks.line_breaks)
        leading = self._words(thinking.leading)
        return leading if self._form is None else words | leading

    def _words(self, tokens: Iterable[int]) -> Words:
        return words_of(tokens, self._grammar.vocabulary.vocab_size)

    def _within_bounds(self, words: Words) -> Words:
        if not self._grammar.binds:
            return words
        if self._count < self._min_tokens:
            return without(words, self._ends)
        return without(words, self._eos) if self._ignore_eos else words


def _overdue(spent_s: float, count: int) -> str | None:
    allowed_s = START_S + STEP_S * count
    if spent_s <= allowed_s:
        return None
    return f"{count} tokens took {spent_s:.3f} s, at most {allowed_s} s may"


def _json(text: str) -> str:
    try:
        schema = json.dumps(prepare_schema(json.loads(text)), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the json cannot be compiled: {_shown(str(error))}") from None


def _regex(text: str) -> str:
    check_pattern_size(text, "regex")
    return LLMatcher.grammar_from_regex(text)


def _choice(text: str) -> str:
    # One terminal: thousands of alternatives of a rule would each be an item of the parser.
    words: list[str] = json.loads(text)
    options = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")


def _grammar(text: str) -> str:
    """Lark, or EBNF with `root ::=`."""
    check_grammar_size(text)
    try:
        lark = any_to_lark(text) if "::=" in text else text
    except Exception as error:  # the library's reader of EBNF raises this very class
        raise _bad(f"the grammar cannot be read: {_shown(str(error))}") from None
    check_cycles(lark)
    return LLMatcher.grammar_from_lark(lark)


def _structural_tag(text: str, vocabulary: Vocabulary) -> str:
    special_ids = vocabulary.lexicon.special_ids
    return LLMatcher.grammar_from_lark(lark_of_tags(json.loads(text), JSON_FORM, special_ids))


_SOURCES: dict[str, Callable[[str, Vocabulary], str]] = {
    "json": lambda text, _: _json(text),
    "json_object": lambda text, _: _json(_JSON_OBJECT),
    "regex": lambda text, _: _regex(text),
    "choice": lambda text, _: _choice(text),
    "grammar": lambda text, _: _grammar(text),
    "structural_tag": _structural_tag,
}


def _shown(message: str) -> str:
    """The first of it: what follows is the state of the parser."""
    return message.partition("\n<state>")[0].strip()[:MAX_MESSAGE_CHARACTERS]


def _bad(message: str) -> UserError:
    return UserError(message, param="structured_outputs")
