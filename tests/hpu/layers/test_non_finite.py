"""NonFiniteGuard: a non-finite token is detected wherever its slot of the KV cache is read."""

import pytest
import torch
from emulated import emulated
from torch import Tensor

from hpu.layers.metadata import (
    AttentionInputs,
    DecodeAttentionInputs,
    PrefillAttentionInputs,
    TextAttentionInputs,
)
from hpu.layers.non_finite import NonFiniteGuard, zeroed

BLOCK_SIZE = 4
PAD_BLOCK = 8
NAN, INF = float("nan"), float("inf")


def guard() -> NonFiniteGuard:
    made = NonFiniteGuard(torch.tensor(torch.nan))
    made.bind(torch.zeros((PAD_BLOCK + 1) * BLOCK_SIZE), BLOCK_SIZE)
    return made


def slots(blocks: list[int], first: int, count: int, length: int) -> list[int]:
    """Slots of `count` tokens from position `first` on, followed by padding."""
    found = [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(first, first + count)
    ]
    return found + [PAD_BLOCK * BLOCK_SIZE] * (length - count)


def prefill(rows: list[tuple[list[int], int, int]], length: int) -> PrefillAttentionInputs:
    """Prefill inputs for rows of (blocks, cached tokens, new tokens)."""
    most = max(-(-cached // BLOCK_SIZE) for _, cached, _ in rows)
    lists = [
        (blocks[: -(-cached // BLOCK_SIZE)] + [PAD_BLOCK] * most)[:most]
        for blocks, cached, _ in rows
    ]
    return PrefillAttentionInputs(
        positions=torch.zeros(len(rows), length, dtype=torch.int64),
        slot_mapping=torch.tensor([slots(*row, length) for row in rows]).view(-1),
        query_lens=torch.tensor([count for *_, count in rows]),
        context_lens=torch.tensor([cached for _, cached, _ in rows]),
        block_list=torch.tensor(lists, dtype=torch.int64).view(-1),
    )


def hidden(batch: int, length: int, *bad: tuple[int, int], value: float = NAN) -> Tensor:
    found = torch.ones(batch, length, 3)
    for row, token in bad:
        found[row, token, 1] = value
    return found


def ended(made: NonFiniteGuard, states: Tensor, inputs: AttentionInputs) -> list[list[bool]]:
    """Tokens whose values are all NaN."""
    found: list[list[bool]] = made(states, inputs).isnan().all(-1).tolist()
    return found


def test_a_non_finite_token_poisons_only_its_own_prompt() -> None:
    inputs = prefill([([0, 1], 0, 5), ([2], 0, 2)], 5)

    assert ended(guard(), hidden(2, 5, (0, 1)), inputs) == [[True] * 5, [False] * 5]


def test_an_infinite_value_poisons_its_prompt() -> None:
    inputs = prefill([([0], 0, 3)], 3)

    assert ended(guard(), hidden(1, 3, (0, 1), value=-INF), inputs) == [[True] * 3]


def test_non_finite_padding_poisons_no_prompt() -> None:
    inputs = prefill([([0], 0, 2), ([1], 0, 3)], 3)

    assert ended(guard(), hidden(2, 3, (0, 2)), inputs) == [[False] * 3, [False] * 3]


def test_later_chunks_and_prompts_that_share_the_block_are_poisoned() -> None:
    made = guard()
    made(hidden(1, 4, (0, 2)), prefill([([3], 0, 4)], 4))

    inputs = prefill([([3, 0], 4, 2), ([3, 1], 4, 1), ([5, 2], 4, 2)], 2)

    expected = [[True, True], [True, False], [False, False]]
    assert ended(made, hidden(3, 2), inputs) == expected


def test_a_prompt_is_poisoned_by_a_decode_of_its_prefix() -> None:
    made = guard()
    none = torch.zeros(1, dtype=torch.int64)
    inputs = DecodeAttentionInputs(none.view(1, 1), torch.tensor([14]), *[none] * 4)
    made(hidden(1, 1, (0, 0)), inputs)

    assert ended(made, hidden(1, 1), prefill([([3, 0], 4, 1)], 1)) == [[True]]


def test_unused_and_overwritten_slots_poison_no_prompt() -> None:
    made = guard()
    made(hidden(1, 4, (0, 1), (0, 3)), prefill([([3], 0, 4)], 4))

    made(hidden(1, 2), prefill([([3], 0, 2)], 2))

    assert ended(made, hidden(1, 1), prefill([([3], 2, 1)], 1)) == [[False]]


def test_sequences_in_one_row_are_poisoned_separately() -> None:
    made = guard()
    made(hidden(1, 4, (0, 0)), prefill([([3], 0, 4)], 4))
    # Three sequences in a row: with a non-finite token in the context, without context, and with
    # a finite context.
    inputs = PrefillAttentionInputs(
        positions=torch.tensor([[4, 0, 1, 4, 5, 0]]),
        slot_mapping=torch.tensor(
            [*slots([3, 0], 4, 1, 1), *slots([1], 0, 2, 2), *slots([4, 2], 4, 2, 3)]
        ),
        query_lens=torch.tensor([1, 2, 2, 0]),
        context_lens=torch.tensor([4, 0, 4, 0]),
        block_list=torch.tensor([3, 4, PAD_BLOCK]),
    )

    assert ended(made, hidden(1, 6), inputs) == [[True, False, False, False, False, False]]
    found = ended(made, hidden(1, 6, (0, 1)), inputs)
    assert found == [[True, True, True, False, False, False]]


def test_a_non_finite_token_poisons_its_whole_text() -> None:
    inputs = TextAttentionInputs(
        positions=torch.zeros(2, 3, dtype=torch.int64),
        types=torch.zeros(2, 3, dtype=torch.int64),
        lengths=torch.tensor([3, 2]),
    )

    assert ended(guard(), hidden(2, 3, (0, 1), (1, 2)), inputs) == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_numbers_are_zeroed_on_a_card_and_their_tokens_reported(
    dtype: torch.dtype,
) -> None:
    heads = torch.ones(1, 3, 2, 2, dtype=dtype)
    heads[0, 0, 1, 0], heads[0, 2, 0, 1] = NAN, INF

    with emulated(strict=True):
        found, tokens = (tensor.cpu() for tensor in zeroed(heads.to("hpu")))

    assert found.dtype == dtype
    assert tokens.tolist() == [[True, False, True]]
    assert found[0, 0].tolist() == [[1, 1], [0, 1]]
    assert found[0, 2].tolist() == [[1, 0], [1, 1]]
