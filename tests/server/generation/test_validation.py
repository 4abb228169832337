"""Limits on the lists of a request, multiplied by the number of its sequences."""

from typing import Any

import numpy as np
import pytest

from config.errors import UserError
from config.params.sampling import (
    MAX_LISTED_BIASES,
    MAX_LISTED_TOKENS,
    MAX_LISTED_WORDS,
    SamplingParams,
)
from config.params.structured_output import MAX_CHARACTERS, MAX_REQUEST_CHARACTERS, GrammarSpec
from server.generation.validation import (
    MAX_IMAGE_BYTES,
    check_allowed_tokens,
    check_sizes,
    with_checked_ids,
)

QUARTER = MAX_LISTED_TOKENS // 4
BOUNDS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("logit_bias", 512, MAX_LISTED_BIASES, {"logit_bias": dict.fromkeys(range(512), 1.0)}),
    ("stop_token_ids", QUARTER, MAX_LISTED_TOKENS, {"stop_token_ids": (3,) * QUARTER}),
    ("allowed_token_ids", QUARTER, MAX_LISTED_TOKENS, {"allowed_token_ids": (3,) * QUARTER}),
    ("bad_words", 64, MAX_LISTED_WORDS, {"bad_words_token_ids": ((3,),) * 64}),
    (
        "structured_outputs",
        MAX_CHARACTERS,
        MAX_REQUEST_CHARACTERS,
        {"structured_outputs": GrammarSpec("regex", "a" * MAX_CHARACTERS)},
    ),
]


@pytest.mark.parametrize(
    ("param", "count", "most", "fields"), BOUNDS, ids=lambda value: str(value)[:20]
)
def test_lists_are_bounded_over_all_sequences_of_a_request(
    param: str, count: int, most: int, fields: dict[str, Any]
) -> None:
    params, num_sequences = SamplingParams(**fields), most // count

    check_sizes(params, num_sequences, 0)
    with pytest.raises(UserError) as caught:
        check_sizes(params, num_sequences + 1, 0)

    assert caught.value.param == param
    for number in (count, count * (num_sequences + 1), num_sequences + 1, most):
        assert str(number) in caught.value.message


def test_all_lists_of_token_ids_share_a_limit() -> None:
    params = SamplingParams(
        logit_bias={5: 1.0}, stop_token_ids=(3,) * QUARTER, allowed_token_ids=(3,) * (3 * QUARTER)
    )

    with pytest.raises(UserError, match=f"{MAX_LISTED_TOKENS + 1} token ids") as caught:
        check_sizes(params, 1, 0)

    assert caught.value.param == "allowed_token_ids"


def test_images_are_bounded_over_all_choices() -> None:
    third = MAX_IMAGE_BYTES // 3

    check_sizes(SamplingParams(n=3), 3, third)
    check_sizes(SamplingParams(), 1, 2 * MAX_IMAGE_BYTES)
    with pytest.raises(
        UserError, match=f"{4 * third} over its 4 choices.* n to at most 3"
    ) as caught:
        check_sizes(SamplingParams(n=4), 4, third)

    assert caught.value.param == "n"


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_long_lists_become_bytes_once_they_are_checked(name: str) -> None:
    params = SamplingParams(**{name: tuple(range(2000))})

    checked = with_checked_ids(params, 2000)

    assert getattr(checked, name) == np.arange(2000, dtype="<u4").tobytes()
    assert with_checked_ids(SamplingParams(**{name: (1, 2)}), 2000) == SamplingParams(
        **{name: (1, 2)}
    )
    for wrong in (-1, 2000, 2**32 + 5, -(2**70), 2**70):
        params = SamplingParams(**{name: (*range(2000), wrong)})
        with pytest.raises(UserError, match=f"has token id {wrong}, it must be between 0 and"):
            with_checked_ids(params, 2000)


def test_long_lists_of_allowed_tokens_are_compared_with_banned_tokens() -> None:
    even = tuple(range(0, 4000, 2))
    params = SamplingParams(allowed_token_ids=even, stop_token_ids=even, min_tokens=1)
    banned = with_checked_ids(params, 4000)

    with pytest.raises(UserError, match="allowed_token_ids has 2000 tokens, and bad_words or min"):
        check_allowed_tokens(banned, (), 4000)
    check_allowed_tokens(with_checked_ids(params.replace(stop_token_ids=even[1:]), 4000), (), 4000)
    check_allowed_tokens(with_checked_ids(params.replace(min_tokens=0), 4000), (), 4000)


@pytest.mark.parametrize("vocab_size", [6, 4000])
def test_a_request_that_bans_the_whole_vocabulary_is_refused(vocab_size: int) -> None:
    most = tuple(range(vocab_size - 1))
    params = SamplingParams(min_tokens=1, stop_token_ids=most)

    check_allowed_tokens(with_checked_ids(params, vocab_size), (), vocab_size)
    check_allowed_tokens(params.replace(min_tokens=0), (vocab_size - 1,), vocab_size)
    for banned, eos_ids in (
        (params, (vocab_size - 1,)),
        (params.replace(bad_words_token_ids=((vocab_size - 1,),)), ()),
    ):
        with pytest.raises(UserError, match=f"has {vocab_size} tokens, and bad_words, or min_tok"):
            check_allowed_tokens(with_checked_ids(banned, vocab_size), eos_ids, vocab_size)


def test_bad_words_that_are_the_whole_vocabulary_are_refused() -> None:
    words = SamplingParams(bad_words_token_ids=tuple((token,) for token in range(5)))

    with pytest.raises(UserError) as caught:
        check_allowed_tokens(words, (), 5)

    assert caught.value.param == "bad_words"
    check_allowed_tokens(words, (), 6)
