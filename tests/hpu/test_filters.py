"""The best score of a row, found by parts: the same place that `max` finds."""

import pytest
import torch

from hpu import filters

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [49152, 1280, 1000, 7])
def test_parts_find_the_place_that_max_finds_ties_included(
    dtype: torch.dtype, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # So few values that every row has its largest many times.
    scores = torch.randint(-9, 9, (33, vocab_size), generator=generator).to(dtype)

    best = filters.best_by_parts(scores)

    expected = scores.max(dim=-1, keepdim=True)
    assert torch.equal(best.values, expected.values)
    assert torch.equal(best.indices, expected.indices)


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_parts_keep_what_is_no_finite_number(odd: float) -> None:
    scores = torch.zeros(2, 1024)
    scores[0, 700] = odd
    scores[1] = odd

    best = filters.best_by_parts(scores)

    expected = scores.max(dim=-1, keepdim=True)
    assert torch.equal(best.values, expected.values) or odd != odd
    assert torch.equal(best.values.isfinite(), expected.values.isfinite())
    assert torch.equal(best.indices, expected.indices)
