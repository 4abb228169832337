"""Drafts by n-grams: the continuation of earlier tokens that equal the last tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpu.spec_decode.base import NOTHING, Proposal
from hpu.spec_decode.drafters.ngram import lookup


def draft(history: list[int], limit: int = 4, longest: int = 32, shortest: int = 2) -> Proposal:
    return lookup(np.array(history, np.uint32), longest, shortest, limit)


def test_drafts_follow_the_last_occurrence() -> None:
    assert draft([1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2], limit=3) == Proposal([5, 6, 7], 2)


def test_the_longest_match_takes_precedence_over_the_most_recent() -> None:
    assert draft([7, 8, 1, 2, 3, 4, 0, 1, 2, 5, 5, 7, 8, 1, 2], limit=2) == Proposal([3, 4], 4)


def test_nothing_is_drafted_after_a_short_or_new_ngram() -> None:
    assert draft([1, 2, 3, 9, 2]) == NOTHING
    assert draft([1, 2, 3, 9, 2], shortest=1, limit=2) == Proposal([3, 9], 1)
    assert draft([1, 2, 3, 4]) == NOTHING
    assert draft([5]) == NOTHING
    assert draft([1, 2, 1, 2], limit=0) == NOTHING


def test_a_repeating_match_is_drafted_beyond_the_end_of_the_text() -> None:
    assert draft([9, 1, 2, 3, 1, 2, 3], limit=7).tokens == [1, 2, 3, 1, 2, 3, 1]
    assert draft([4, 4, 4], limit=3).tokens == [4, 4, 4]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_drafts_equal_a_slow_search(
    history: list[int], shortest: int, longest: int, limit: int
) -> None:
    longest = max(shortest, longest)
    found = Proposal([], 0)
    for size in range(shortest, min(longest, len(history) - 1) + 1):
        for start in range(len(history) - size):
            if history[start : start + size] == history[-size:]:
                tokens = list(history)
                for _ in range(limit):
                    tokens.append(tokens[start + size + len(tokens) - len(history)])
                found = Proposal(tokens[len(history) :], size)

    assert draft(history, limit, longest, shortest) == found
