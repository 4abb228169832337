"""Checks a request against the model (vocabulary, context length, logprobs mode) and against size
limits, and truncates prompts to the context."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from config.errors import PromptTooLong, UserError
from config.model.model_config import DEFAULT_MAX_TOKENS, MAX_NEW_TOKENS
from config.params.sampling import (
    ID_LISTS,
    MAX_LISTED_BIASES,
    MAX_LISTED_TOKENS,
    MAX_LISTED_WORDS,
    SamplingParams,
    invalid_token,
)
from config.params.structured_output import MAX_REQUEST_CHARACTERS
from config.params.token_ids import (
    MAX_UNPACKED,
    TokenArray,
    TokenIds,
    num_ids,
    packed,
    token_array,
    unknown_token,
)
from server.generation.outputs import Prompt

MAX_IMAGE_BYTES = 256 * 2**20
"""Maximum bytes of images and videos over all choices of a request with n above 1: each choice
sends its own copy."""

ABOVE_EVERY_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Token limits on the output of a choice, from the generation config."""

    max_new_tokens: int = ABOVE_EVERY_CONTEXT
    default_max_tokens: int = ABOVE_EVERY_CONTEXT
    """Limit for requests without max_tokens."""

    @classmethod
    def of(cls, defaults: Mapping[str, float]) -> "OutputLimits":
        """The limits in the sampling `defaults`."""
        most, default = (
            int(defaults.get(name, ABOVE_EVERY_CONTEXT))
            for name in (MAX_NEW_TOKENS, DEFAULT_MAX_TOKENS)
        )
        return cls(most, default)


UNLIMITED = OutputLimits()


def with_checked_ids(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """`params` with long lists of token ids packed as bytes. Raises UserError for token ids outside
    the vocabulary."""
    lists: dict[str, TokenIds | TokenArray] = {
        name: _array_if_long(ids) for name in ID_LISTS if (ids := getattr(params, name)) is not None
    }
    words = [i for word in params.bad_words_token_ids for i in word]
    fields: list[tuple[str, Collection[int] | TokenIds | TokenArray]] = [
        ("logit_bias", params.logit_bias),
        *lists.items(),
        ("bad_words_token_ids", words),
    ]
    for name, ids in fields:
        token_id = invalid_token(ids, vocab_size)
        if token_id is not None:
            raise unknown_token(name, token_id, vocab_size, name)
    long = {name: packed(ids) for name, ids in lists.items() if isinstance(ids, np.ndarray)}
    return params.replace_unchecked(**long) if long else params


def _array_if_long(ids: TokenIds) -> TokenIds | TokenArray:
    if isinstance(ids, bytes) or len(ids) <= MAX_UNPACKED:
        return ids
    try:
        return token_array(ids)
    except OverflowError:
        # `invalid_token` rejects integers beyond 64 bits.
        return ids


def check_sizes(params: SamplingParams, num_sequences: int, num_image_bytes: int) -> None:
    """Raise UserError for lists, grammars, images and videos that are too large for `num_sequences`
    sequences, because each sequence sends its own copy to the engine. `num_image_bytes`: total size
    of the images and videos of all prompts."""
    tokens, words = params.num_listed_tokens, len(params.bad_words_token_ids)
    grammar = params.structured_outputs
    text = 0 if grammar is None else len(grammar.text)
    bounds = (
        ("logit_bias", "entries of logit_bias", len(params.logit_bias), MAX_LISTED_BIASES),
        ("bad_words", "bad words (two for each text)", words, MAX_LISTED_WORDS),
        (_longest_list(params), "token ids in its lists", tokens, MAX_LISTED_TOKENS),
        ("structured_outputs", "characters in its grammar", text, MAX_REQUEST_CHARACTERS),
    )
    for param, content, count, most in bounds:
        total = count * num_sequences
        if total > most:
            raise UserError(
                f"the request has {count} {content}, {total} over its {num_sequences} sequences, "
                f"at most {most} are allowed: send at most {most // num_sequences} for each "
                "sequence",
                param=param,
            )
    total = num_image_bytes * params.n
    if params.n > 1 and total > MAX_IMAGE_BYTES:
        raise UserError(
            f"the request has {num_image_bytes} bytes of images, {total} over its {params.n} "
            f"choices, at most {MAX_IMAGE_BYTES} are allowed: set n to at most "
            f"{max(1, MAX_IMAGE_BYTES // num_image_bytes)}",
            param="n",
        )


def _longest_list(params: SamplingParams) -> str:
    lengths = {
        "logit_bias": len(params.logit_bias),
        "stop_token_ids": num_ids(params.stop_token_ids),
        "allowed_token_ids": num_ids(params.allowed_token_ids or ()),
        "bad_words": sum(map(len, params.bad_words_token_ids)),
    }
    return max(lengths, key=lengths.__getitem__)


def check_allowed_tokens(params: SamplingParams, eos_ids: Iterable[int], vocab_size: int) -> None:
    """Raise UserError if every token of allowed_token_ids (without this list, of the vocabulary) is
    banned as the first token."""
    banned = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
    if params.min_tokens:
        banned.extend(() if params.ignore_eos else eos_ids)
    stops = token_array(params.stop_token_ids if params.min_tokens else ())
    all_banned = np.concatenate([np.array(banned, dtype=np.int64), stops])
    if params.allowed_token_ids is None:
        if len(all_banned) >= vocab_size and len(np.unique(all_banned)) >= vocab_size:
            raise UserError(
                f"the vocabulary has {vocab_size} tokens, and bad_words, or min_tokens with "
                "stop_token_ids, ban all of them",
                param="min_tokens" if params.min_tokens else "bad_words",
            )
    elif np.isin(token_array(params.allowed_token_ids), all_banned).all():
        raise UserError(
            f"allowed_token_ids has {num_ids(params.allowed_token_ids)} tokens, and bad_words or "
            "min_tokens ban all of them",
            param="allowed_token_ids",
        )


def output_limit(
    prompt: Prompt,
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    limits: OutputLimits,
    param: str,
) -> int:
    """Maximum number of output tokens of `prompt` within `limits`; without max_tokens, at most the
    remaining context. Raises UserError, and PromptTooLong if prompt and output exceed the
    context."""
    max_new_tokens = limits.max_new_tokens
    count = len(prompt.token_ids)
    if not count:
        raise UserError("the prompt is empty, it must have at least 1 token", param=param)
    for token_id in (min(prompt.token_ids), max(prompt.token_ids)):
        if not 0 <= token_id < vocab_size:
            raise unknown_token("the prompt", token_id, vocab_size, param)
    if params.min_tokens > max_new_tokens:
        raise UserError(
            f"min_tokens is {params.min_tokens}, this server generates at most {max_new_tokens} "
            "tokens (max_new_tokens of its generation config)",
            param="min_tokens",
        )
    max_output = max_model_len - count
    if params.max_tokens is None:
        if max_output < 1:
            raise PromptTooLong(count, None, max_model_len, param=param)
        if params.min_tokens > max_output:
            raise PromptTooLong(
                count, params.min_tokens, max_model_len, param=param, limit="min_tokens"
            )
        default = max(limits.default_max_tokens, params.min_tokens)
        return min(max_output, max_new_tokens, default)
    if params.max_tokens > max_output:
        raise PromptTooLong(count, params.max_tokens, max_model_len, param=param)
    return min(params.max_tokens, max_new_tokens)


def check_comparable(logprobs_mode: str, param: str) -> None:
    """Raise UserError if the server reports logits as logprobs: logits cannot be compared between
    positions."""
    if logprobs_mode.endswith("logits"):
        raise UserError(
            f"{param} compares log-probabilities, and this server reports {logprobs_mode}",
            param=param,
        )


def truncate_prompt(
    ids: list[int],
    keep: int | None,
    max_model_len: int,
    limit: int | None,
    *,
    keep_end: bool = True,
) -> list[int]:
    """The last `keep` tokens of `ids`, or the first without `keep_end`. `keep` -1: as many tokens
    as fit into the context with `limit` output tokens; None: all."""
    num_kept = num_kept_tokens(keep, max_model_len, limit)
    if num_kept is None or len(ids) <= num_kept:
        return ids
    return ids[-num_kept:] if keep_end else ids[:num_kept]


def num_kept_tokens(keep: int | None, max_model_len: int, limit: int | None) -> int | None:
    """Number of prompt tokens that truncation keeps; None: all. For the arguments see
    `truncate_prompt`."""
    if keep == -1:
        return max(1, max_model_len - (1 if limit is None else limit))
    return keep
