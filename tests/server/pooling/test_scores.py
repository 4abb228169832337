"""Similarity of vectors."""

import numpy as np
import pytest

from config.errors import UserError
from server.pooling.scores import check_repeats, similarities


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", [1.0, 0.0, -0.6]),
        ("dot", [4.0, 0.0, -6.0]),
        ("euclidean", [0.0, -(5.0**0.5), -(41.0**0.5)]),
        ("manhattan", [0.0, -3.0, -9.0]),
    ],
)
def test_a_single_vector_is_compared_with_many(kind: str, expected: list[float]) -> None:
    first = np.array([[2.0, 0.0]], dtype="<f4")
    seconds = np.array([[2.0, 0.0], [0.0, 1.0], [-3.0, 4.0]], dtype="<f4")

    assert similarities(kind, first, seconds) == pytest.approx(expected)


def test_a_vector_of_zeros_has_similarity_0() -> None:
    zeros, ones = np.zeros((1, 2), dtype="<f4"), np.ones((1, 2), dtype="<f4")

    assert similarities("cosine", zeros, ones) == [0.0]


def test_a_first_text_that_is_encoded_for_many_pairs_has_a_limit() -> None:
    check_repeats("q" * 4_096, 4_096, ("query", "documents"))

    with pytest.raises(UserError, match=r"query has 4097 characters.*4096 texts: 16781312 in all"):
        check_repeats("q" * 4_097, 4_096, ("query", "documents"))
