"""Vocabulary sharded over several ranks: the exchange of greedy tokens."""

import pytest
import torch
from torch import Tensor

from hpu.distributed.process_groups import ProcessGroup
from hpu.layers.embedding import ParallelLMHead, first_of_largest

CPU = torch.device("cpu")
HIDDEN = 8


def head_of(rank: int, size: int, weight: Tensor) -> ParallelLMHead:
    """LM head of a rank, with 100 in the padding rows."""
    group = ProcessGroup(range(size), rank)
    head = ParallelLMHead(HIDDEN, len(weight), dtype=weight.dtype, device=CPU, group=group)
    assert head.weight is not None
    head.weight.fill_(100)
    own = weight[rank * len(head.weight) :][: len(head.weight)]
    head.weight[: len(own)] = own
    return head


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [5, 321])
def test_a_value_and_a_token_per_rank_determine_the_first_largest_logit(
    size: int, vocab_size: int
) -> None:
    random = torch.Generator().manual_seed(0)
    # Small integers give many equal logits.
    weight = torch.randint(-2, 3, (vocab_size, HIDDEN), generator=random).bfloat16()
    hidden = torch.randint(-2, 3, (64, HIDDEN), generator=random).bfloat16()
    logits = hidden @ weight.T

    pairs = [
        head_of(rank, size, weight).local_max(hidden, lambda logits: logits / 2)
        for rank in range(size)
    ]
    values, tokens = (torch.stack(part, dim=1) for part in zip(*pairs, strict=True))

    is_largest = logits == logits.amax(1, keepdim=True)
    assert (is_largest.sum(1) > 1).any()
    assert torch.equal(first_of_largest(values, tokens), is_largest.int().argmax(1))
    assert torch.equal(values.amax(1), logits.amax(1).float() / 2)


def test_a_row_whose_largest_logit_is_not_finite_has_no_token() -> None:
    weight = torch.eye(4, HIDDEN)
    hidden = torch.zeros(4, HIDDEN)
    hidden[0, 3], hidden[1, 0], hidden[2, 2] = torch.nan, torch.inf, 1.0

    pairs = [head_of(rank, 2, weight).local_max(hidden, lambda logits: logits) for rank in (0, 1)]
    values, tokens = (torch.stack(part, dim=1) for part in zip(*pairs, strict=True))

    # 0 * NaN and 0 * infinity make the logits of all tokens NaN.
    assert first_of_largest(values, tokens).tolist() == [-1, -1, 2, 0]


class _Recording(ProcessGroup):
    """Returns the same tensor for both ranks."""

    __slots__ = ("num_elements",)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.num_elements = tensor.numel()
        return torch.cat((tensor, tensor), dim=dim)


def test_two_numbers_per_row_are_exchanged() -> None:
    group = _Recording(range(2))
    head = ParallelLMHead(HIDDEN, 320, dtype=torch.float32, device=CPU, group=group)
    assert head.weight is not None
    head.weight.copy_(torch.eye(160, HIDDEN))

    tokens = head.argmax(torch.eye(5, HIDDEN), lambda logits: logits)

    assert tokens.tolist() == [0, 1, 2, 3, 4]
    assert group.num_elements == 2 * 5
