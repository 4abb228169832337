"""Grammar: a spec compiled for a vocabulary. Guide: matches an output against a grammar."""

import copy
import json
import re
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from config.checkpoint.tokenizer_bounds import check_tokenizer_file
from config.errors import ConfigError, UserError
from config.native import NativePanic, panics_as_errors
from config.params.structured_output import FREE, GrammarSpec, ThinkingSpec
from config.whole_files import is_present
from engine.structured_output.bounds import (
    check_cycles,
    check_grammar_size,
    check_pattern_size,
    is_recursive,
    with_ascii_classes,
    with_ascii_patterns,
)
from engine.structured_output.json_schema import plain_reason, prepare_schema
from engine.structured_output.structural_tag import tags_to_lark
from engine.structured_output.thinking import (
    AFTER_THINKING,
    BEFORE_THINKING,
    CONSTRAINED,
    THINKING,
    ThinkingMarkers,
    ThinkingState,
    TokenTexts,
)
from engine.structured_output.token_bitmask import Bitmask, bitmask_of, has, tokens_in, without

MAX_GRAMMAR_SIZE = 20_000
MAX_ROW_ITEMS = 8_000
"""Maximum grammar size and items per parser row, in the library's units. Both limits allow an
object of about 2,000 optional properties."""
MAX_STEP_ITEMS, MAX_RECURSIVE_STEP_ITEMS = 10_000, 2_000
"""Maximum parser items per token for Lark and EBNF, without and with recursive rules; other kinds:
50,000. Ordinary rules take fewer than 1,000. An item of ambiguous recursive rules takes up to 40
us, of a JSON object 0.2 us."""
MAX_STEP_FUEL = 100_000
"""Maximum lexer work per token, in the library's units: about 20 ms. Ordinary patterns take fewer
than 20,000."""
PROBE_STEPS = 256
"""Number of random tokens with which a new grammar is probed: most grammars that explode do so
early."""
EXTRA_PROBES, EXTRA_PROBE_STEPS = 12, 24
START_S, STEP_S = 0.1, 0.002
"""Matching time allowed per trial: a constant plus an amount per token, in seconds. Ordinary
grammars take a twentieth of it; a very ambiguous grammar would delay the steps of all requests."""
MAX_DEBT_S = 0.2
"""Maximum matching-time debt of a grammar over all its outputs, in seconds. Each token adds its
time minus STEP_S. The debt is never negative, so that fast tokens earn no credit for a later slow
token."""
MEAN_STEPS = 16
"""Window of the moving mean `Grammar.mean_step_s`, in tokens."""
SLOW_STEP_S = 0.0003
GROWTH_BYTES_PER_S = 64 * 2**20
"""Estimated growth of the grammar's automaton, which its outputs share: a token that takes longer
than SLOW_STEP_S adds at most GROWTH_BYTES_PER_S times the excess time (measured)."""
MAX_MESSAGE_CHARACTERS = 300
MAX_MARKERS = 16
_PATTERN_PROBLEM = re.compile(r"(?:^    ( *)\^+\n)?^error: (.+)$", re.MULTILINE)
"""Error line of an invalid pattern; group 1: the spaces before the `^` that marks the position."""
_LOOK_AROUND = re.compile(
    r"^error: look-around|(?:^|\(in regex\): )lookarounds not supported", re.MULTILINE
)
"""Parts of the library's error texts for look-around in a pattern."""
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""Position (line, column) in the grammar, at the start of a library error."""
UNSPELLABLE = ("NoExtensionBias", "; forced bytes: got ")
"""Parts of the library's error texts if no token can produce the bytes that the grammar requires
next."""

JSON_FORM: Any = {
    # At most one space where JSON allows any whitespace: small models otherwise generate whitespace
    # until max_tokens.
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    "coerce_one_of": True,
    "lenient": False,
}
_JSON_OBJECT = '{"type":"object"}'


class Vocabulary:
    """Vocabulary for which grammars are compiled."""

    def __init__(self, folder: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Reads tokenizer.json, which takes about a second for a large file. `vocab_size`: the
        model's size. Raises UserError if the model cannot use grammars."""
        path = Path(folder) / "tokenizer.json"
        if not is_present(path):
            raise _error("this model has no tokenizer.json, which structured output requires")
        try:
            check_tokenizer_file(path)
            with panics_as_errors():
                self.tokens = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=sorted(eos_ids))
        except (ValueError, ConfigError, NativePanic) as error:
            raise _error(
                f"this model's tokenizer does not support structured output: {error}"
            ) from None
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.all = bitmask_of(range(vocab_size), vocab_size)
        """(W,) uint32 bitmask of all tokens."""
        self.eos = bitmask_of(eos_ids, vocab_size)
        """(W,) uint32 bitmask of the EOS tokens."""
        self._markers: dict[ThinkingSpec, ThinkingMarkers] = {}

    def markers(self, spec: ThinkingSpec) -> ThinkingMarkers:
        """Markers of `spec` as tokens; cached, since a server has only a few specs."""
        found = self._markers.get(spec)
        if found is None:
            if len(self._markers) >= MAX_MARKERS:
                self._markers = {}
            found = self._markers[spec] = ThinkingMarkers(spec, self.token_texts)
        return found

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Bytes of the tokens; computed on first use."""
        return TokenTexts(self.tokens, self.vocab_size)


class Grammar:
    """A compiled spec. All its outputs share its start state (with the first bitmask) and a budget
    of matching time (MAX_DEBT_S)."""

    def __init__(
        self,
        spec: GrammarSpec,
        vocabulary: Vocabulary,
        source: str | None = None,
        compiled_bytes: int = 0,
        *,
        limits_time: bool = True,
    ) -> None:
        """Raises UserError if the spec is invalid, too large or too slow to match. Other threads
        can run during the compilation. `source`: source of an equal grammar that was checked and
        compiled in another process, with `compiled_bytes` of memory; skips the checks.
        `limits_time`: refuse the grammar if its outputs take too long to match."""
        self.limits_time = limits_time
        self.refusal = ""
        """Why outputs are no longer matched against this grammar; empty while they are."""
        self.mean_step_s = 0.0
        """Moving mean of the CPU time per token in seconds; 0 without a time limit."""
        self._debt_s = 0.0
        self._start: GrammarState | None = None
        self._compiled_bytes = compiled_bytes
        self.slow_s = 0.0
        """Sum of the time beyond SLOW_STEP_S of all slow tokens, over all outputs; seconds."""
        self.vocabulary = vocabulary
        self.is_constrained = spec.kind != FREE
        """Whether the text after the thinking is constrained."""
        self.markers = None if spec.thinking is None else vocabulary.markers(spec.thinking)
        """Thinking markers; None without thinking."""
        self.source: str | None = None
        """Library source of the constrained part; None without a constrained part."""
        if not self.is_constrained:
            return
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE,
            max_items_in_row=MAX_ROW_ITEMS,
            step_max_items=_max_step_items(spec),
            step_lexer_fuel=MAX_STEP_FUEL,
        )
        is_checked = source is not None
        self.source = source or _SOURCES[spec.kind](spec.text, vocabulary)
        matcher = LLMatcher(vocabulary.tokens, self.source, log_level=0, limits=limits)
        if matcher.is_error():
            reason = _reason(
                matcher.get_error(),
                has_lines=spec.kind == "grammar",
                # Rewriting character classes would shift the position.
                has_place=spec.kind == "regex" and with_ascii_classes(spec.text) == spec.text,
            )
            raise _error(f"the {spec.noun} cannot be compiled: {reason}")
        self._start = GrammarState(matcher, vocabulary)
        error = None if is_checked else self._probe(spec.kind)
        if error is not None:
            raise _error(f"the {spec.noun} cannot be compiled: {error}")

    @property
    def num_bytes(self) -> int:
        """Estimated memory in bytes; grows while outputs are matched."""
        return self._compiled_bytes + int(self.slow_s * GROWTH_BYTES_PER_S)

    def start(self) -> "GrammarState":
        """New state at the start of an output. Calls no library function."""
        return self._start.shared() if self._start else GrammarState(None, self.vocabulary)

    def spend(self, step_s: float) -> None:
        """Account for the CPU time of a token of an output; may set `refusal`."""
        if step_s > SLOW_STEP_S:
            self.slow_s += step_s - SLOW_STEP_S
        if not self.limits_time:
            return
        self.mean_step_s += (step_s - self.mean_step_s) / MEAN_STEPS
        self._debt_s = max(0.0, self._debt_s + step_s - STEP_S)
        if self._debt_s > MAX_DEBT_S and not self.refusal:
            self.refusal = (
                f"its outputs took {self._debt_s:.3f} s more than {STEP_S} s per token, at most "
                f"{MAX_DEBT_S} s are allowed"
            )

    def _probe(self, kind: str) -> str | None:
        """Match random tokens against the grammar; returns an error if this takes too long."""
        random = np.random.default_rng(0)
        error = self._follow_at_random(random, PROBE_STEPS)
        # Lark and EBNF grammars may be slow only on some paths: probe more of them.
        for _ in range(EXTRA_PROBES if kind == "grammar" else 0):
            error = error or self._follow_at_random(random, EXTRA_PROBE_STEPS)
        return error

    def _follow_at_random(self, random: np.random.Generator, num_steps: int) -> str | None:
        state = self.start()
        start, count = time.thread_time(), 0
        while state.error is None and count < num_steps:
            bitmask = without(state.bitmask, state.eos)
            token = int(random.choice(tokens_in(bitmask)))
            if token in self.vocabulary.eos_ids:
                return None
            state.advance(token)
            count += 1
            if (error := _overdue(time.thread_time() - start, count)) is not None:
                return error
        return state.error


class GrammarState:
    """Position of an output in a grammar. Allows all tokens if there is no constrained part."""

    def __init__(self, matcher: LLMatcher | None, vocabulary: Vocabulary) -> None:
        """`matcher`: a matcher that has consumed no token; None without a constrained part."""
        self._matcher = matcher
        self._is_shared = False
        """Whether other states may use the matcher, which must then be copied before it
        advances."""
        self._vocabulary = vocabulary
        self.error: str | None = None
        """Why the output cannot be matched further; None while it can."""
        self.bitmask = vocabulary.eos
        """(W,) uint32 bitmask of the allowed next tokens."""
        self._update()

    @property
    def eos(self) -> Bitmask:
        """(W,) uint32 bitmask of the EOS tokens."""
        return self._vocabulary.eos

    def shared(self) -> "GrammarState":
        """A copy that advances independently. The matcher is copied before either state
        advances."""
        self._is_shared = True
        return copy.copy(self)

    def fork(self) -> "GrammarState":
        """A copy that advances independently."""
        forked = copy.copy(self)
        forked._unshare()
        return forked

    def advance(self, token: int) -> None:
        """Advance by a token, which must be allowed."""
        if self._matcher is not None:
            if self._is_shared:
                self._unshare()
            self._matcher.consume_token(token)
            self._update()

    def _unshare(self) -> None:
        self._matcher = None if self._matcher is None else self._matcher.deep_copy()
        self._is_shared = False

    def _update(self) -> None:
        if self._matcher is None:
            self.bitmask = self._vocabulary.all
        elif not self._matcher.is_error():
            # The library's mask may be one word longer than the vocabulary.
            mask = self._matcher.compute_bitmask()
            self.bitmask = np.frombuffer(mask, dtype="<u4", count=len(self.eos))
        if self._matcher is not None and self._matcher.is_error():
            self.error = _reason(self._matcher.get_error())


class Guide:
    """Matches an output token by token: first its thinking, if the spec has any, then its
    constrained part. Until its budget is spent, thinking allows all tokens except EOS tokens and
    tokens that span into the constrained part; without a constrained part it allows all tokens.

    `min_tokens` and `ignore_eos` apply while the grammar allows other tokens: a complete grammar
    allows only end tokens. Without a constrained part both are ignored here.
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        min_tokens: int,
        end_ids: Iterable[int],
        ignore_eos: bool,
        thinking_budget: int | None = None,
    ) -> None:
        """`end_ids`: end tokens; these and the EOS tokens are banned before `min_tokens`.
        `thinking_budget`: number of thinking tokens after which the closing marker is forced."""
        vocabulary = grammar.vocabulary
        self._grammar = grammar
        self._min_tokens = min_tokens
        self._ignore_eos = ignore_eos
        self._eos = vocabulary.eos
        self._end_tokens = self._eos
        if min_tokens:
            self._end_tokens = self._eos | bitmask_of(end_ids, vocabulary.vocab_size)
        self.num_tokens = 0
        """Number of matched tokens."""
        self._thinking = None
        if grammar.markers is not None:
            self._thinking = ThinkingState(grammar.markers, thinking_budget)
        self._grammar_state: GrammarState | None = None
        """Position in the constrained part. None inside the thinking, and if the output started
        with text that the grammar does not allow."""
        self.error: str | None = None
        """Why the output cannot be matched further; None while it can."""
        self.bitmask = self._eos
        """(W,) uint32 bitmask of the allowed next tokens."""
        if self._phase != THINKING:
            self._grammar_state = grammar.start()
        self._update()

    @property
    def mean_step_s(self) -> float:
        return self._grammar.mean_step_s

    @property
    def limits_time(self) -> bool:
        return self._grammar.limits_time

    def fork(self) -> "Guide":
        """A copy that advances independently."""
        forked = copy.copy(self)
        forked._thinking = copy.copy(self._thinking)
        forked._grammar_state = None if self._grammar_state is None else self._grammar_state.fork()
        return forked

    def advance(self, token: int) -> str | None:
        """Advance by a token, which must be allowed; returns `error`. If the grammar was refused,
        only counts the token."""
        self.num_tokens += 1
        if not self._grammar.refusal:
            # Thread CPU time: the load of the machine must not count against the grammar.
            start = time.thread_time()
            self._follow(token)
            self._update()
            self._grammar.spend(time.thread_time() - start)
        self.error = self.error or self._grammar.refusal or None
        return self.error

    def _update(self) -> None:
        if self._grammar_state is not None and self._grammar_state.error is not None:
            self.error = self._grammar_state.error
        else:
            self.bitmask = self._within_bounds(self._next())

    @property
    def _phase(self) -> int:
        return CONSTRAINED if self._thinking is None else self._thinking.phase

    def _follow(self, token: int) -> None:
        before, state = self._phase, self._grammar_state
        is_allowed = state is not None and has(state.bitmask, token)
        if self._thinking is not None and before != CONSTRAINED:
            self._thinking.advance(token)
        if self._phase == THINKING:
            self._grammar_state = None
        elif before == THINKING:
            self._grammar_state = self._grammar.start()
        elif state is not None and (is_allowed or before == CONSTRAINED):
            state.advance(token)
        elif before == BEFORE_THINKING:
            self._grammar_state = None

    def _next(self) -> Bitmask:
        thinking, vocabulary = self._thinking, self._grammar.vocabulary
        bitmask = self._eos if self._grammar_state is None else self._grammar_state.bitmask
        if thinking is None or thinking.phase == CONSTRAINED:
            return bitmask
        if thinking.forced_token is not None:
            return self._bitmask([thinking.forced_token])
        if not self._grammar.is_constrained:
            return bitmask if thinking.phase != THINKING else vocabulary.all
        if thinking.phase == THINKING:
            return vocabulary.all & ~thinking.crossing_tokens & ~self._eos
        if thinking.phase == AFTER_THINKING:
            return bitmask | self._bitmask(thinking.markers.line_breaks)
        opening = self._bitmask(thinking.opening_tokens)
        return opening if self._grammar_state is None else bitmask | opening

    def _bitmask(self, tokens: Iterable[int]) -> Bitmask:
        return bitmask_of(tokens, self._grammar.vocabulary.vocab_size)

    def _within_bounds(self, bitmask: Bitmask) -> Bitmask:
        if not self._grammar.is_constrained:
            return bitmask
        if self.num_tokens < self._min_tokens:
            return without(bitmask, self._end_tokens)
        return without(bitmask, self._eos) if self._ignore_eos else bitmask


def _max_step_items(spec: GrammarSpec) -> int | None:
    """Limit of parser items per token; None: the limit of the library."""
    if spec.kind != "grammar":
        return None
    return MAX_RECURSIVE_STEP_ITEMS if is_recursive(spec.text) else MAX_STEP_ITEMS


def _overdue(spent_s: float, count: int) -> str | None:
    allowed_s = START_S + STEP_S * count
    if spent_s <= allowed_s:
        return None
    return f"{count} tokens took {spent_s:.3f} s, at most {allowed_s} s are allowed"


def _json(text: str) -> str:
    try:
        schema = json.dumps(prepare_schema(json.loads(text)), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
    except (ValueError, RecursionError) as error:
        reason = plain_reason(_first_part(str(error)))
        raise _error(f"the JSON schema cannot be compiled: {reason}") from None


def _regex(text: str) -> str:
    check_pattern_size(text, "regex")
    return LLMatcher.grammar_from_regex(with_ascii_classes(text))


def _choice(text: str) -> str:
    # Use a single terminal: each alternative of a rule would be a parser item.
    words: list[str] = json.loads(text)
    options = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")


def _grammar(text: str) -> str:
    """Lark source of a Lark grammar, or of an EBNF grammar with `root ::=`."""
    check_grammar_size(text)
    try:
        lark = any_to_lark(text) if "::=" in text else text
    except Exception as error:  # The library's EBNF reader raises Exception itself.
        raise _error(f"the grammar cannot be read: {_first_part(str(error))}") from None
    check_cycles(lark)
    return LLMatcher.grammar_from_lark(with_ascii_patterns(lark))


def _structural_tag(text: str, vocabulary: Vocabulary) -> str:
    special_ids = vocabulary.token_texts.special_ids
    return LLMatcher.grammar_from_lark(tags_to_lark(json.loads(text), JSON_FORM, special_ids))


_SOURCES: dict[str, Callable[[str, Vocabulary], str]] = {
    "json": lambda text, _: _json(text),
    "json_object": lambda text, _: _json(_JSON_OBJECT),
    "regex": lambda text, _: _regex(text),
    "choice": lambda text, _: _choice(text),
    "grammar": lambda text, _: _grammar(text),
    "structural_tag": _structural_tag,
}


def _reason(error: str, *, has_lines: bool = False, has_place: bool = False) -> str:
    """Reason from a matcher's error message. `has_lines`: the source is the client's text, so the
    reason includes line and column of an invalid pattern. `has_place`: the source is the client's
    pattern, so the reason includes the invalid character's position."""
    message = _first_part(error)
    if any(words in message for words in UNSPELLABLE):
        return "this model's vocabulary has no token for what the grammar requires next"
    # The library quotes the pattern, which may be long, before the problem.
    place = error.partition("invalid regex")[0] if has_lines else ""
    place = _PLACE.sub(r"line \1, column \2: ", place)
    if has_lines:
        # The library appends the source line to the message.
        message = _PLACE.sub(r"line \1, column \2: ", message).partition("\n")[0]
    if _LOOK_AROUND.search(error):
        return f"{place}look-around is not supported, nor are \\b and \\B"
    problems = [*_PATTERN_PROBLEM.finditer(error)]
    if not problems:
        return plain_reason(message)
    blanks, problem = problems[-1].groups()
    if has_place and blanks is not None:
        problem += f" (character {len(blanks) + 1} of the pattern)"
    return f"{place}{problem}"


def _first_part(message: str) -> str:
    """Library message without the parser state that follows it."""
    return message.partition("\n<state>")[0].strip()[:MAX_MESSAGE_CHARACTERS]


def _error(message: str) -> UserError:
    return UserError(message, param="structured_outputs")
