"""Verification keeps the distribution of the target for any drafts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from config.speculation.ngram import NgramLimits
from config.speculation.suffix import SuffixLimits
from hpu.backends.cpu import CpuBackend
from hpu.protocol import DECODE, Launch, NewRequest, RequestSampling
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.base import AcceptanceCounts, Proposal, Proposer, Tokens
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.drafters.ngram import NgramProposer
from hpu.spec_decode.drafters.suffix import SuffixProposer
from hpu.spec_decode.host import HostSpeculation

CPU = CpuBackend(torch.get_num_threads())
VOCAB = 6
PROMPT = [2, 3, 2, 1, 2, 4, 0, 5, 1, 1, 2]
START, END = PROMPT[-1], len(PROMPT) + 2
NUM_REQUESTS, NUM_ROUNDS = 400, 50
MAX_CHI_SQUARE = 75.0
"""Limit for 35 degrees of freedom: one run in ten thousand exceeds it by chance."""
LOGITS = 0.6 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
"""Logits of the next token, by previous token."""


class Chains:
    """Fake requests whose histories are their tokens; all start with PROMPT."""

    def __init__(self, num_requests: int) -> None:
        self.chains = [[*PROMPT] for _ in range(num_requests)]

    def tokens(self, req_index: int) -> Tokens:
        return np.array(self.chains[req_index], np.uint32)

    def draft_capacity(self, req_index: int) -> int:
        return 9


class FixedProposer:
    """Proposes the same drafts for each history, some likely and some unlikely."""

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        return

    def remove_request(self, req_index: int) -> None:
        return

    def propose(
        self, req_indices: list[int], histories: list[Tokens], limits: list[int]
    ) -> list[Proposal]:
        return [
            Proposal([(int(history[-1]) + 1 + i) % VOCAB for i in range(limit)][: index % 4])
            for index, history, limit in zip(req_indices, histories, limits, strict=True)
        ]

    def measure(self, max_num_seqs: int) -> None:
        return None


def suffixes() -> SuffixProposer:
    return SuffixProposer(
        SuffixLimits(max_depth=9, max_cached_requests=50, max_spec_factor=4.0, min_token_prob=0.1)
    )


@pytest.mark.parametrize(
    ("settings", "scale", "make_proposer"),
    [
        ({}, 1.0, FixedProposer),
        ({"temperature": 0.7}, 1 / 0.7, FixedProposer),
        ({"temperature": 2.0}, 0.5, FixedProposer),
        ({}, 1.0, lambda: NgramProposer(NgramLimits(3, 1))),
        ({}, 1.0, suffixes),
    ],
    ids=["fixed", "fixed, 0.7", "fixed, 2.0", "ngram", "suffix"],
)
def test_token_pairs_follow_the_target_distribution(
    settings: dict[str, float], scale: float, make_proposer: Callable[[], Proposer]
) -> None:
    proposer = make_proposer()
    probabilities = torch.softmax(LOGITS * scale, dim=-1).numpy()
    expected = probabilities[START][:, None] * probabilities * NUM_REQUESTS * NUM_ROUNDS
    found = np.zeros((VOCAB, VOCAB))
    counts: dict[str, float] = {}

    def count(name: str, amount: float) -> None:
        counts[name] = counts.get(name, 0) + amount

    for round_number in range(NUM_ROUNDS):
        chains = Chains(NUM_REQUESTS)
        sampler = Sampler(NUM_REQUESTS, VOCAB, CPU, static_shapes=False)
        speculation = HostSpeculation(
            proposer, chains, sampler, DraftLengths(3), AcceptanceCounts(count)
        )
        for index in range(NUM_REQUESTS):
            sampling = RequestSampling(seed=round_number * NUM_REQUESTS + index, **settings)
            sampler.add_request(index, sampling, np.array(PROMPT, np.uint32), len(PROMPT))
            tokens = memoryview(np.array(PROMPT, "<u4").tobytes())
            speculation.add_request(NewRequest(index, tokens, len(PROMPT), 0, [], sampling))
        while unfinished := [i for i, chain in enumerate(chains.chains) if len(chain) < END]:
            drafts = speculation.draft(Launch(DECODE, (len(unfinished), 1, 1), unfinished))
            rows = drafts.rows([chains.chains[i][-1] for i in unfinished])
            verified = speculation.verify(drafts, None, LOGITS[torch.from_numpy(rows)])
            for index, tokens_of_one in zip(unfinished, verified.tokens, strict=True):
                chains.chains[index] += tokens_of_one
        for index, chain in enumerate(chains.chains):
            found[chain[END - 2], chain[END - 1]] += 1
            speculation.remove_request(index)

    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert found.sum() == NUM_REQUESTS * NUM_ROUNDS == 20_000
    assert expected.min() > 5
    assert chi_square < MAX_CHI_SQUARE
    assert 0 < counts["spec_decode.num_accepted_tokens"] < counts["spec_decode.num_draft_tokens"]
