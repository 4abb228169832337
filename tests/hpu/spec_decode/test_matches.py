"""Longest matches of the last tokens, on the host."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.speculation.ngram import NgramLimits
from config.speculation.suffix import USUAL_LIMITS
from hpu.spec_decode.base import Proposer, Tokens
from hpu.spec_decode.drafters import ngram
from hpu.spec_decode.drafters.ngram import (
    MAX_COMPARED,
    NgramProposer,
    longest_matches,
)
from hpu.spec_decode.drafters.suffix import MAX_OUTPUT_TOKENS, SuffixProposer

REPEATED = np.full(MAX_OUTPUT_TOKENS, 7, np.uint32)


def tokens(numbers: list[int]) -> Tokens:
    return np.array(numbers, np.uint32)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=10),
    st.integers(1, 8),
)
def test_matches_equal_a_slow_search(text: list[int], history: list[int], longest: int) -> None:
    found, length = list[int](), 0
    for size in range(1, min(longest, len(history)) + 1):
        ends = range(size - 1, len(text) - 1)
        if same := [end for end in ends if text[end + 1 - size : end + 1] == history[-size:]]:
            found, length = same, size

    ends, size = longest_matches(tokens(text), tokens(history), longest)

    assert (ends.tolist(), size) == (found, length)


def test_the_newest_matches_are_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_COMPARED", 6)
    text = tokens([1, 2, 9, *[3, 2, 9] * 10])

    assert longest_matches(text, tokens([3, 2]), 2)[0].tolist() == [25, 28, 31]
    # The match of two tokens is older than the last 6 matches of one token.
    assert longest_matches(text, tokens([1, 2]), 2)[1] == 1


def test_few_matches_of_a_repeated_token_are_compared() -> None:
    ends, size = longest_matches(REPEATED, REPEATED, 23)

    assert size == 23
    assert len(ends) == MAX_COMPARED // 23
    assert ends[-1] == len(REPEATED) - 2


@pytest.mark.parametrize(
    "proposer",
    [NgramProposer(NgramLimits()), SuffixProposer(USUAL_LIMITS)],
    ids=["ngram", "suffix"],
)
def test_drafting_after_a_repeated_token_is_cheap(proposer: Proposer) -> None:
    proposer.add_request(0, REPEATED[:2])
    proposer.propose([0], [REPEATED[:-8]], [9])
    proposer.remove_request(0)
    history = REPEATED[: 1 << 17]
    proposer.add_request(0, history)
    before_s = time.thread_time()

    for _ in range(10):
        proposer.propose([0], [history], [9])

    # 15 to 25 ms; 230 to 540 ms if all matches are extended.
    assert time.thread_time() - before_s < 0.15
