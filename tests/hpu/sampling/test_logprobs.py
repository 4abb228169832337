"""Log-probabilities: of the raw logits or in the requested mode, in the order that clients rely
on."""

import random

import msgspec
import numpy as np
import pytest
import slow_sampler
import torch
from random_sampling import random_history, random_sampling

from hpu.backends.cpu import CpuBackend
from hpu.protocol import RequestSampling
from hpu.sampling.logprobs import MAX_PACKED, LogprobsMode, TopLogprobs, pack, top_logprobs, unpack
from hpu.sampling.params import is_greedy
from hpu.sampling.sampler import Sampler

CPU = CpuBackend(torch.get_num_threads())


def _logits(rows: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_values_ids_and_ranks_equal_a_sorted_log_softmax() -> None:
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


def test_with_k_0_only_the_chosen_token_is_reported() -> None:
    found = top_logprobs(_logits(3, 20), torch.tensor([1, 2, 3]), 0)

    assert found.ids.tolist() == [[1], [2], [3]] and found.values.shape == (3, 1)


def test_more_logprobs_than_the_vocabulary_return_the_whole_vocabulary() -> None:
    found = top_logprobs(_logits(2, 4), torch.tensor([0, 1]), 20)

    assert found.k == 4
    assert [sorted(ids) for ids in found.ids[:, 1:].tolist()] == [[0, 1, 2, 3]] * 2


def test_the_greedy_token_comes_first_among_ties() -> None:
    # More ties than requested entries, in many positions: any of them could be left out.
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


def test_a_smaller_k_gives_a_prefix_of_a_larger_k() -> None:
    logits = (_logits(4, 500) * 2).round().bfloat16()

    large = top_logprobs(logits, torch.arange(4), 12)

    for k in range(12):
        small = top_logprobs(logits, torch.arange(4), k)
        assert torch.equal(small.ids, large.ids[:, : k + 1])
        assert torch.equal(small.values, large.values[:, : k + 1])


def test_the_samplers_logprobs_come_from_before_masks_penalties_and_temperature() -> None:
    logits = _logits(2, 40)
    asked = RequestSampling(
        temperature=0.1, logit_bias=((3, 100.0),), presence_penalty=1.0, top_k=2, num_logprobs=4
    )
    sampler = Sampler(2, 40, CPU, static_shapes=False)
    for row, sampling in enumerate((asked, RequestSampling(temperature=0.0))):
        sampler.add_request(row, sampling, np.array([1], dtype=np.uint32), 1)

    sampled = sampler.sample(logits, [0, 1])

    assert sampled.tokens[0] == 3 and sampled.logprobs is not None
    wanted = top_logprobs(logits, sampled.tokens, 4)
    assert all(torch.equal(a, b) for a, b in zip(sampled.logprobs, wanted, strict=True))


@pytest.mark.parametrize("name", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_processed_modes_report_the_sampled_distribution(name: str) -> None:
    rng, mode = random.Random(5), LogprobsMode.named(name)
    num_cut = 0
    for seed in range(60):
        logits, (history, num_prompt) = _logits(1, 40, seed), random_history(rng, 40)
        asked = msgspec.structs.replace(
            random_sampling(rng, 40), num_logprobs=20, masked=False, allowed_token_ids=None
        )
        sampler = Sampler(1, 40, CPU, mode, static_shapes=False)
        sampler.add_request(0, asked, history, num_prompt)

        found = sampler.sample(logits, [0]).logprobs

        row = wanted = logits[0].double().numpy()
        if mode.is_processed:
            told = history.tolist()
            row = wanted = slow_sampler.scores(row, asked, told[:num_prompt], told[num_prompt:])
            if not is_greedy(asked, 40):
                kept = slow_sampler.probabilities(row, asked) > 0
                wanted = np.where(kept, row / asked.temperature, -np.inf)
                if asked.temperature < 1e-3:
                    continue  # Rounding decides which tokens are kept.
        if not mode.is_logits:
            wanted = wanted - wanted.max() - np.log(np.exp(wanted - wanted.max()).sum())
        assert found is not None
        values, ids = found.values[0].numpy(), found.ids[0].numpy()
        num_cut += int(np.isinf(values).sum())
        assert np.allclose(values, wanted[ids], rtol=1e-4, atol=1e-4)
        assert np.allclose(values[1:], np.sort(wanted)[::-1][:20], rtol=1e-4, atol=1e-4)
        assert found.ranks[0] == (wanted > wanted[ids[0]]).sum() + 1
    assert (num_cut > 100) == mode.is_processed


def test_without_requested_logprobs_none_are_returned() -> None:
    sampler = Sampler(1, 40, CPU, static_shapes=False)
    sampler.add_request(0, RequestSampling(), np.array([1], dtype=np.uint32), 1)

    assert sampler.sample(_logits(1, 40), [0]).logprobs is None


@pytest.mark.parametrize("k", [0, 3, 7])
def test_packed_logprobs_are_unpacked_completely(k: int) -> None:
    logits = _logits(4, MAX_PACKED // 64)
    logits[2] = float("nan")
    tokens = torch.tensor([0, MAX_PACKED // 64 - 1, -1, 7], dtype=torch.int32)
    top = top_logprobs(logits, tokens, k)

    packed = pack(tokens, top, 7)
    found_tokens, found = unpack(packed)
    alone, _ = unpack(pack(tokens, None, 7))

    assert packed.shape == (4, 18) and packed.dtype == torch.float32
    assert found_tokens.tolist() == alone.tolist() == tokens.tolist()
    assert torch.equal(found.ids[:, : k + 1], top.ids)
    assert torch.equal(found.ranks, top.ranks)
    assert torch.allclose(found.values[:, : k + 1], top.values, rtol=0, atol=0, equal_nan=True)
    assert found.k == 7


def test_the_largest_numbers_are_packed_exactly() -> None:
    largest = torch.tensor([[MAX_PACKED - 1, MAX_PACKED - 2]], dtype=torch.int32)
    top = TopLogprobs(largest, torch.zeros(1, 2), torch.tensor([MAX_PACKED], dtype=torch.int32))

    tokens, found = unpack(pack(largest[:, 0], top, 1))

    assert (tokens.tolist(), found.ids.tolist()) == ([MAX_PACKED - 1], largest.tolist())
    assert found.ranks.tolist() == [MAX_PACKED]
