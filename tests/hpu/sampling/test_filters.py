"""argmax by comparing bits: the same position as `max`."""

import pytest
import torch

from hpu.sampling import filters

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [49152, 1280, 1000, 7])
def test_argmax_by_bits_equals_max_with_ties(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # With 18 values, every row has its maximum many times.
    scores = torch.randint(-9, 9, (33, vocab_size), generator=generator).to(dtype)

    best = filters.argmax(scores)

    expected = scores.max(dim=-1, keepdim=True)
    assert torch.equal(best.values, expected.values)
    assert torch.equal(best.tokens, expected.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [NAN, -NAN, INF, -INF, 0.0, -0.0, -1.0])
def test_argmax_by_bits_equals_max_with_special_values(odd: float, dtype: torch.dtype) -> None:
    scores = torch.full((6, 1024), -3.0, dtype=dtype)
    scores[0, 700] = odd
    scores[1] = odd
    scores[2] = torch.tensor([-0.0, 0.0]).repeat(512)
    scores[2, 700] = odd
    scores[3] = 5.0
    scores[3, 700:702] = odd
    scores[4, 3] = INF
    scores[4, 700] = odd
    scores[5, 700:] = -INF

    best = filters.argmax(scores)

    expected = scores.max(dim=-1, keepdim=True)
    assert torch.equal(best.values.isnan(), expected.values.isnan())
    assert torch.equal(best.values.nan_to_num(), expected.values.nan_to_num())
    assert torch.equal(best.tokens, expected.indices)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_largest_values_equal_topk(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.randint(0, 99, (5, 1000), generator=generator) / 98
    weights[3, 5:] = 0.0

    found = filters.top_values(weights, size)

    assert torch.equal(found, weights.topk(size, dim=-1).values)
