"""Attention ops compared with plain softmax attention, and the effect of padding."""

import pytest
import torch
from torch import Tensor

from hpu.ops.attention import (
    MASKED,
    as_mask,
    attend,
    attend_unfused,
    causal_mask,
    merge_attention,
    paged_decode,
)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_and_the_plain_kernel_agree(kv_heads: int, causal: bool) -> None:
    query = _random(2, 6, 7, 16)
    key, value = _random(2, kv_heads, 7, 16, seed=1), _random(2, kv_heads, 7, 16, seed=2)
    mask = None if causal else as_mask(_random(2, 1, 7, 7, seed=3) > -0.5)

    fused = attend(query, key, value, scale=0.3, mask=mask, causal=causal)
    plain = attend_unfused(query, key, value, scale=0.3, mask=mask, causal=causal)

    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_without_visible_keys_is_finite_and_has_no_weight(dtype: torch.dtype) -> None:
    query, key, value = (_random(1, 2, 3, 16, seed=seed).to(dtype) for seed in range(3))
    nothing = torch.full((1, 1, 1, 3), MASKED)

    out, log_sum = attend(query, key, value, scale=0.25)
    empty_out, empty_log_sum = attend(query, key, value, scale=0.25, mask=nothing)

    assert empty_out.isfinite().all()
    assert torch.equal(merge_attention(out, log_sum, empty_out, empty_log_sum), out)
    torch.testing.assert_close(
        merge_attention(empty_out, empty_log_sum, out, log_sum), out, rtol=0, atol=2e-2
    )


def test_attention_over_two_halves_merges_to_attention_over_both() -> None:
    query, key, value = _random(2, 4, 5, 16), _random(2, 2, 8, 16), _random(2, 2, 8, 16, seed=2)

    whole, _ = attend(query, key, value, scale=0.25)
    first = attend(query, key[:, :, :3], value[:, :, :3], scale=0.25)
    second = attend(query, key[:, :, 3:], value[:, :, 3:], scale=0.25)

    torch.testing.assert_close(merge_attention(*first, *second), whole, rtol=1e-5, atol=1e-5)


def test_a_sliding_window_includes_the_token_itself() -> None:
    seen = causal_mask(4, 2, torch.device("cpu"))[0, 0] == 0

    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def _decode(query: Tensor, blocks: Tensor, groups: list[int], usage: list[int]) -> Tensor:
    """Output of paged_decode over `blocks` (N, 2, size, kv_heads, D) that belong to `groups`."""
    owner = torch.tensor(groups)
    seen = (torch.arange(blocks.shape[2]) < torch.tensor(usage)[:, None]) & (owner >= 0)[:, None]
    return paged_decode(
        query,
        blocks[:, 0],
        blocks[:, 1],
        rows=owner.clamp_min(0),
        mapping=(owner == torch.arange(query.shape[0])[:, None]).float(),
        mask=as_mask(seen)[:, None, None],
        scale=0.25,
    )


def test_each_sequence_attends_to_the_used_slots_of_its_blocks() -> None:
    query, blocks = _random(2, 4, 16), _random(3, 2, 4, 2, 16, seed=1)

    found = _decode(query, blocks, [0, 0, 1], [4, 2, 3])

    first = attend_unfused(
        query[:1, :, None],
        blocks[:2, 0].flatten(0, 1)[None, :6].transpose(1, 2),
        blocks[:2, 1].flatten(0, 1)[None, :6].transpose(1, 2),
        scale=0.25,
    )[0]
    second = attend_unfused(
        query[1:, :, None],
        blocks[2:, 0, :3].transpose(1, 2),
        blocks[2:, 1, :3].transpose(1, 2),
        scale=0.25,
    )[0]
    torch.testing.assert_close(found, torch.cat((first, second))[:, :, 0], rtol=1e-5, atol=1e-5)


def test_a_sequence_with_large_scores_does_not_change_another_sequence() -> None:
    query, blocks = _random(2, 4, 16), _random(4, 2, 4, 2, 16, seed=1)
    query[0] *= 1000

    found = _decode(query, blocks, [0, 0, 1, 1], [4, 4, 4, 4])

    alone = _decode(query[1:], blocks[2:], [0, 0], [4, 4])
    torch.testing.assert_close(found[1:], alone, rtol=1e-5, atol=1e-5)


def test_padded_blocks_and_rows_change_nothing_and_padded_rows_are_zero() -> None:
    query, blocks = _random(2, 4, 16), _random(3, 2, 4, 2, 16, seed=1)
    more_rows = torch.cat((query, torch.full((2, 4, 16), 1e4)))
    more_blocks = torch.cat((blocks, torch.full((5, 2, 4, 2, 16), 1e4)))

    expected = _decode(query, blocks, [0, 0, 1], [4, 2, 3])
    found = _decode(more_rows, more_blocks, [0, 0, 1, *[-1] * 5], [4, 2, 3, *[1] * 5])

    torch.testing.assert_close(found[:2], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[2:], torch.zeros(2, 4, 16))
