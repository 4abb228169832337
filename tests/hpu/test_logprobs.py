"""Log-probabilities are those of the raw logits, in the order that clients rely on."""

import numpy as np
import torch

from hpu.logprobs import prompt_logprobs, top_logprobs
from hpu.sampler import Sampler
from hpu.step import RowSampling


def _logits(rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3


def test_values_ids_and_ranks_are_those_of_a_sorted_log_softmax() -> None:
    logits, chosen = _logits(5, 60), torch.tensor([3, 59, 0, 17, 8])

    found = top_logprobs(logits, chosen, 7)

    wanted = torch.log_softmax(logits.double(), dim=-1)
    order = wanted.argsort(dim=-1, descending=True)
    assert found.k == 7
    assert found.ids.dtype == torch.int32 and found.ranks.dtype == torch.int32
    assert torch.equal(found.ids[:, 0].long(), chosen)
    assert torch.equal(found.ids[:, 1:].long(), order[:, :7])
    assert torch.allclose(found.values.double(), wanted.gather(1, found.ids.long()), atol=1e-5)
    ranks = (order == chosen.unsqueeze(1)).nonzero()[:, 1] + 1
    assert torch.equal(found.ranks.long(), ranks)


def test_with_k_0_only_the_chosen_token_is_told() -> None:
    found = prompt_logprobs(_logits(3, 20), torch.tensor([1, 2, 3]), 0)

    assert found.ids.tolist() == [[1], [2], [3]] and found.values.shape == (3, 1)


def test_more_than_the_vocabulary_gives_the_whole_vocabulary() -> None:
    found = top_logprobs(_logits(2, 4), torch.tensor([0, 1]), 20)

    assert found.k == 4
    assert [sorted(ids) for ids in found.ids[:, 1:].tolist()] == [[0, 1, 2, 3]] * 2


def test_of_equals_the_greedy_one_comes_first() -> None:
    # More equals than are asked for, in many places: any could be left out.
    for vocab_size in (30, 1000, 49_152):
        logits = torch.zeros(3, vocab_size)
        logits[1, 5] = -1
        logits[2, [7, 9, 20]] = 2.0

        for k in (1, 3, 20):
            found = top_logprobs(logits, logits.max(-1).indices, k)

            assert found.ids[:, 1].tolist() == [0, 0, 7]
            assert all(len(set(ids)) == k for ids in found.ids[:, 1:].tolist())
            assert (found.values[:, 1:].diff(dim=-1) <= 0).all()
            assert found.ranks.tolist() == [1, 1, 1]


def test_a_smaller_k_gives_the_beginning_of_a_larger_one() -> None:
    logits = (_logits(4, 500) * 2).round().bfloat16()

    large = top_logprobs(logits, torch.arange(4), 12)

    for k in range(12):
        small = top_logprobs(logits, torch.arange(4), k)
        assert torch.equal(small.ids, large.ids[:, : k + 1])
        assert torch.equal(small.values, large.values[:, : k + 1])


def test_the_samplers_logprobs_come_from_before_masks_penalties_and_temperature() -> None:
    logits = _logits(2, 40)
    asked = RowSampling(
        temperature=0.1, logit_bias=((3, 100.0),), presence_penalty=1.0, top_k=2, num_logprobs=4
    )
    sampler = Sampler(2, 40, torch.device("cpu"), torch.int64)
    for row, sampling in enumerate((asked, RowSampling(temperature=0.0))):
        sampler.admit(row, sampling, np.array([1], dtype=np.uint32), 1)

    sampled = sampler.sample(logits, [0, 1])

    assert sampled.tokens[0] == 3 and sampled.logprobs is not None
    wanted = top_logprobs(logits, sampled.tokens, 4)
    assert all(torch.equal(a, b) for a, b in zip(sampled.logprobs, wanted, strict=True))


def test_no_row_asking_gives_none() -> None:
    sampler = Sampler(1, 40, torch.device("cpu"), torch.int64)
    sampler.admit(0, RowSampling(), np.array([1], dtype=np.uint32), 1)

    assert sampler.sample(_logits(1, 40), [0]).logprobs is None
