"""SamplingParams: the sampling parameters of a request."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from itertools import chain
from typing import Any, NoReturn

import msgspec
import numpy as np

from config.errors import UserError, value_text
from config.params.structured_output import GrammarSpec, grammar_spec
from config.params.token_ids import TokenArray, TokenIds, num_ids, token_array

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
"""Maximum tokens of a bad word. The sampler pads the bad words of a batch to the same number and
length."""
MAX_LISTED_TOKENS = 300_000
"""Maximum number of token ids in the list fields of a request, times its sequences: each sequence
has its own copy in the message, the engine and the worker. The largest known vocabulary has 262,144
tokens."""
MAX_LISTED_BIASES = 65_536
"""Maximum number of `logit_bias` entries, times sequences. An entry costs several times as much as
a token id in a list."""
MAX_LISTED_WORDS = 16_384
"""Maximum number of bad words, times sequences. Each bad word takes a row of the sampler's
table."""

ID_LISTS = ("stop_token_ids", "allowed_token_ids")
_TUPLES = {
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "allowed_token_ids": "a list of token ids",
    "bad_words": "a list of strings",
    "bad_words_token_ids": "a list of lists of token ids",
}
"""List field -> description of the allowed values."""
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def invalid_token(
    token_ids: Collection[int] | TokenIds | TokenArray, vocab_size: int
) -> int | None:
    """A token id outside the vocabulary, if any. A list of 300,000 ids takes milliseconds, an array
    less."""
    if not len(token_ids):
        return None
    if isinstance(token_ids, bytes):
        token_ids = token_array(token_ids)
    if isinstance(token_ids, np.ndarray):
        least, most = int(token_ids.min()), int(token_ids.max())
    else:
        least, most = min(token_ids), max(token_ids)
    return least if least < 0 else most if most >= vocab_size else None


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise UserError(f"{name} is {value_text(value)}, it must be {allowed}", param=name)


def _refuse(name: str, problem: str) -> NoReturn:
    raise UserError(f"{name}{'' if problem[0] == '[' else ' '}{problem}", param=name)


def _finite(value: float) -> bool:
    return isinstance(value, (int, float)) and -math.inf < value < math.inf


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Sampling parameters of a request. Neutral values leave the logits bit-identical.

    Names, ranges and defaults follow the OpenAI API; extensions follow vLLM. The logits are changed
    in this order: `structured_outputs`; bad words; `logit_bias`, `allowed_token_ids`, `min_tokens`;
    penalties; temperature; `min_p`; `top_k`; `top_p`. Raises `UserError` for an invalid value.
    """

    n: int = 1
    temperature: float = 1.0
    """Temperature; 0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1: off."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    """Maximum number of output tokens; None: up to max_model_len."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: TokenIds = ()
    """Stop token ids. The text pipeline packs a long list as bytes, like `allowed_token_ids`."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned, besides the chosen token;
    None: no log-probabilities."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: TokenIds | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Set by the text pipeline from `bad_words`; may also be given directly."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the last prompt tokens; -1: as many as fit into the context
    with the output tokens."""
    structured_outputs: GrammarSpec | None = None
    """The grammar of the output; may be given as `{kind: value}`."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens before the output of `structured_outputs`."""

    def __post_init__(self) -> None:
        for name, allowed in _TUPLES.items():
            _as_tuple(self, name, allowed)
        if self.logit_bias is None:
            msgspec.structs.force_setattr(self, "logit_bias", {})
        _check_grammar(self)
        _check_kinds(self)
        _check_bad_words(self)
        _check_numbers(self)
        _check_stops(self)
        _check_tokens(self)

    @property
    def num_listed_tokens(self) -> int:
        """Token ids in `logit_bias`, `stop_token_ids`, `allowed_token_ids` and bad words."""
        return (
            len(self.logit_bias)
            + num_ids(self.stop_token_ids)
            + num_ids(self.allowed_token_ids or ())
            + sum(map(len, self.bad_words_token_ids))
        )

    def replace(self, **changes: Any) -> "SamplingParams":
        """A validated copy with `changes`."""
        return msgspec.structs.replace(self, **changes)

    def replace_unchecked(self, **changes: Any) -> "SamplingParams":
        """A copy with `changes` that are already valid, to avoid validating long lists again."""
        other = copy(self)
        for name, value in changes.items():
            msgspec.structs.force_setattr(other, name, value)
        return other


def _check_grammar(params: SamplingParams) -> None:
    value: object = params.structured_outputs
    if isinstance(value, Mapping):
        msgspec.structs.force_setattr(params, "structured_outputs", grammar_spec(value))
    else:
        ok = isinstance(value, GrammarSpec | None)
        _check(ok, "structured_outputs", value, "a mapping of a kind to its value")
    grammar, budget = params.structured_outputs, params.thinking_token_budget
    if budget is not None and (grammar is None or grammar.thinking is None):
        raise UserError(
            "thinking_token_budget is supported for chats of a server only, since it needs a "
            "reasoning parser",
            param="thinking_token_budget",
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_kinds(params: SamplingParams) -> None:
    """Raise UserError for an integer, a boolean, a token id or a bad word of the wrong type.
    Without a server, no schema has checked these types."""
    for name in ("n", "top_k", "min_tokens", *_OPTIONAL):
        value = getattr(params, name)
        _check(value is None or _is_integer(value), name, value, "an integer")
    for name in _FLAGS:
        value = getattr(params, name)
        _check(isinstance(value, bool), name, value, "true or false")
    biases = params.logit_bias
    _check(isinstance(biases, Mapping), "logit_bias", biases, "an object of token ids and biases")
    for name in (*ID_LISTS, "logit_bias"):
        tokens = getattr(params, name) or ()
        if isinstance(tokens, bytes) or set(map(type, tokens)) <= {int}:
            continue
        for token in tokens:
            _check(_is_integer(token), name, token, "made of integer token ids")
    for word in params.bad_words:
        _check(isinstance(word, str), "bad_words", word, "made of strings")


_PENALTY = "a number between -2 and 2"
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda n: 1 <= n <= MAX_N, f"between 1 and {MAX_N}"),
    ("max_tokens", lambda count: count >= 0, "at least 0"),
    ("min_tokens", lambda count: count >= 0, "at least 0"),
    ("logprobs", lambda count: 0 <= count <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    ("prompt_logprobs", lambda count: 0 <= count <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    ("thinking_token_budget", lambda count: count >= 0, "at least 0"),
    ("truncate_prompt_tokens", lambda count: count == -1 or count >= 1, "-1, or at least 1"),
    ("temperature", lambda value: _finite(value) and 0 <= value <= 2, "a number between 0 and 2"),
    ("min_p", lambda value: _finite(value) and 0 <= value <= 1, "a number between 0 and 1"),
    ("presence_penalty", lambda value: _finite(value) and abs(value) <= 2, _PENALTY),
    ("frequency_penalty", lambda value: _finite(value) and abs(value) <= 2, _PENALTY),
    (
        "top_p",
        lambda value: _finite(value) and 0 < value <= 1,
        "a number greater than 0, and at most 1",
    ),
    ("top_k", lambda count: count >= -1, "-1 or 0 (off), or at least 1"),
    ("repetition_penalty", lambda value: _finite(value) and value > 0, "a number greater than 0"),
    ("seed", lambda seed: -(2**63) <= seed < 2**63, f"between {-(2**63)} and {2**63 - 1}"),
)
"""(name, predicate for allowed values, description of the allowed values)."""
_OPTIONAL = (
    "seed",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)
"""Integers that may be None."""


def _check_numbers(params: SamplingParams) -> None:
    for name, is_allowed, allowed in _RULES:
        value = getattr(params, name)
        ok = name in _OPTIONAL if value is None else is_allowed(value)
        _check(ok, name, value, allowed)
    min_tokens, max_tokens = params.min_tokens, params.max_tokens
    fits = max_tokens is None or min_tokens <= max_tokens
    _check(fits, "min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")


def _check_stops(params: SamplingParams) -> None:
    for text in params.stop:
        _check(isinstance(text, str), "stop", text, "a string or a list of strings")
        if not text:
            _refuse("stop", "has an empty string, its strings must have at least 1 character")


def _check_tokens(params: SamplingParams) -> None:
    biases = params.logit_bias
    if biases and not (min(biases) >= 0 and _are_biases(biases.values())):
        _check_each_bias(biases)
    if params.allowed_token_ids is not None and not len(params.allowed_token_ids):
        _refuse("allowed_token_ids", "is an empty list, it must have at least 1 token id")


def _are_biases(values: Collection[float]) -> bool:
    """Whether all values are finite and between -100 and 100. The sum detects NaN."""
    return (
        set(map(type, values)) <= {int, float}
        and max(values) <= 100
        and min(values) >= -100
        and math.isfinite(sum(values))
    )


def _check_each_bias(biases: Mapping[int, float]) -> None:
    for token, bias in biases.items():
        if token < 0:
            _refuse("logit_bias", f"has token id {token}, it must be at least 0")
        if not (_finite(bias) and -100 <= bias <= 100):
            shown = value_text(bias)
            _refuse(
                "logit_bias", f"['{token}'] is {shown}, it must be a number between -100 and 100"
            )


def _check_bad_words(params: SamplingParams) -> None:
    words = params.bad_words_token_ids
    name = "bad_words_token_ids"
    for word in words:
        _check(isinstance(word, (list, tuple)), name, word, "made of lists of token ids")
    if len(words) > MAX_BAD_WORDS:
        _refuse(name, f"has {len(words)} words, at most {MAX_BAD_WORDS} are allowed")
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            _refuse(
                name,
                f"has a word of {len(word)} tokens, a word must have between 1 and "
                f"{MAX_BAD_WORD_TOKENS}",
            )
    if not set(map(type, chain.from_iterable(words))) <= {int}:
        for token in chain.from_iterable(words):
            _check(_is_integer(token), name, token, "made of integer token ids")
    if not all(isinstance(word, tuple) for word in words):
        msgspec.structs.force_setattr(params, name, tuple(map(tuple, words)))


def _as_tuple(params: SamplingParams, name: str, allowed: str) -> None:
    """Convert a string or a list to a tuple. None becomes an empty tuple; for allowed_token_ids it
    stays None. Raises UserError for a value that is no list; it must be `allowed`."""
    value = getattr(params, name)
    if isinstance(value, tuple) or (value is None and name == "allowed_token_ids"):
        return
    if isinstance(value, bytes) and name in ID_LISTS:
        # Bytes come from another process, which has validated them.
        return
    if value is None:
        value = ()
    elif isinstance(value, str):
        value = (value,)
    else:
        is_list = isinstance(value, Iterable) and not isinstance(value, Mapping)
        _check(is_list, name, value, allowed)
        value = tuple(value)
    msgspec.structs.force_setattr(params, name, value)
