"""SamplingParams: what a caller may ask of sampling. Knows nothing of models or tokenizers."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from config.errors import UserError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
MAX_N = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
"""Every row of a batch takes the room of the most and the longest bad words in it."""

_INTEGERS = (
    "n",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise UserError(f"{name} is {value!r}, it must be {allowed}", param=name)


def _finite(value: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to sample one request. Neutral values change nothing, bit for bit.

    Names, ranges and defaults are those of the OpenAI API, and of vLLM for its extensions.
    The order in which they apply: allowed and banned tokens, `min_tokens`, `logit_bias`; penalties;
    temperature; `min_p`; `top_k`; `top_p`. Raises `UserError` when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 is off."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    """None: as many as the context holds."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. k: the chosen token and the k most likely ones."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Filled in by the text pipeline from `bad_words`; may also be given directly."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """-1: the context; k: keep the last k tokens of the prompt."""

    def __post_init__(self) -> None:
        _as_tuple(self, "stop")
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids"):
            _as_tuple(self, name)
        _check_kinds(self)
        _check_bad_words(self)
        _check(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        _check(
            _finite(self.temperature) and 0 <= self.temperature <= 2,
            "temperature",
            self.temperature,
            "between 0 and 2",
        )
        _check(
            _finite(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "greater than 0, and at most 1",
        )
        _check(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off), or at least 1")
        _check(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_finite(value) and -2 <= value <= 2, name, value, "between -2 and 2")
        _check(
            _finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "greater than 0",
        )
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            _check(self.max_tokens >= 0, "max_tokens", self.max_tokens, "at least 1")
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens, which is {self.max_tokens}",
            )
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _check(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"{len(self.stop)} strings",
            f"at most {MAX_STOP_STRINGS}",
        )
        _check(
            all(isinstance(s, str) and s for s in self.stop),
            "stop",
            "an empty string",
            "non-empty strings",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check(0 <= value <= MAX_LOGPROBS, name, value, f"between 0 and {MAX_LOGPROBS}")
        for token, bias in self.logit_bias.items():
            _check(token >= 0, "logit_bias", token, "a token id of at least 0")
            _check(
                _finite(bias) and -100 <= bias <= 100,
                "logit_bias",
                bias,
                "a bias between -100 and 100",
            )
        if self.allowed_token_ids is not None:
            _check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "not empty")
        if self.truncate_prompt_tokens is not None:
            _check(
                self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens >= 1,
                "truncate_prompt_tokens",
                self.truncate_prompt_tokens,
                "-1, or at least 1",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or self.min_p == 1

    def replace(self, **changes: Any) -> "SamplingParams":
        """A checked copy with `changes`."""
        return msgspec.structs.replace(self, **changes)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_kinds(params: SamplingParams) -> None:
    """Offline nothing else stands between a caller's value and the device."""
    for name in _INTEGERS:
        value = getattr(params, name)
        _check(value is None or _is_integer(value), name, value, "an integer")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            _check(_is_integer(token), name, token, "made of integer token ids")
    for word in params.bad_words:
        _check(isinstance(word, str), "bad_words", word, "made of strings")


def _check_bad_words(params: SamplingParams) -> None:
    words = params.bad_words_token_ids
    name = "bad_words_token_ids"
    _check(len(words) <= MAX_BAD_WORDS, name, f"{len(words)} words", f"at most {MAX_BAD_WORDS}")
    for word in words:
        _check(
            len(word) <= MAX_BAD_WORD_TOKENS,
            name,
            f"a word of {len(word)} tokens",
            f"words of at most {MAX_BAD_WORD_TOKENS}",
        )
        _check(len(word) > 0, name, word, "words of at least 1 token")
        for token in word:
            _check(_is_integer(token), name, token, "made of integer token ids")
    if not all(isinstance(word, tuple) for word in words):
        msgspec.structs.force_setattr(params, name, tuple(map(tuple, words)))


def _as_tuple(params: SamplingParams, name: str) -> None:
    """Let callers write a string or a list where we keep a tuple (None means none)."""
    value = getattr(params, name)
    if isinstance(value, tuple) or (value is None and name == "allowed_token_ids"):
        return
    if value is None:
        value = ()
    elif isinstance(value, str):
        value = (value,)
    elif isinstance(value, Iterable):
        value = tuple(value)
    msgspec.structs.force_setattr(params, name, value)
