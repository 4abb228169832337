"""Verification gives the distribution of the target, whatever is drafted."""

import numpy as np
import pytest
import torch

from hpu.backends.cpu import CpuBackend
from hpu.protocol import DECODE, Launch, NewRequest, RequestSampling
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.acceptance_counts import AcceptanceCounts
from hpu.spec_decode.base import Proposal, Tokens
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.speculation import Speculation

CPU = CpuBackend(torch.get_num_threads())
VOCAB = 6
START = 2
NUM_REQUESTS, NUM_ROUNDS = 400, 50
MAX_CHI_SQUARE = 75.0
"""Of 35 degrees of freedom: exceeded by chance once in ten thousand times."""
LOGITS = 0.6 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
"""Of the next token, by the token before."""


class Chains:
    """Requests whose histories are their tokens; all start with START."""

    def __init__(self, num_requests: int) -> None:
        self.chains = [[START] for _ in range(num_requests)]

    def tokens(self, req_index: int) -> Tokens:
        return np.array(self.chains[req_index], np.uint32)

    def draft_capacity(self, req_index: int) -> int:
        return 9


class FixedProposer:
    """The same drafts behind each history, some likely and some not."""

    def add_request(self, req_index: int, tokens: Tokens) -> None:
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


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 1.0), ({"temperature": 0.7}, 1 / 0.7), ({"temperature": 2.0}, 0.5)],
)
def test_pairs_of_tokens_are_drawn_by_the_target(settings: dict[str, float], scale: float) -> None:
    probabilities = torch.softmax(LOGITS * scale, dim=-1).numpy()
    expected = probabilities[START][:, None] * probabilities * NUM_REQUESTS * NUM_ROUNDS
    found = np.zeros((VOCAB, VOCAB))
    counts: dict[str, float] = {}

    def count(name: str, amount: float) -> None:
        counts[name] = counts.get(name, 0) + amount

    for round_number in range(NUM_ROUNDS):
        chains = Chains(NUM_REQUESTS)
        sampler = Sampler(NUM_REQUESTS, VOCAB, CPU, static_shapes=False)
        speculation = Speculation(
            FixedProposer(), chains, sampler, DraftLengths(3, None), AcceptanceCounts(count)
        )
        for index in range(NUM_REQUESTS):
            sampling = RequestSampling(seed=round_number * NUM_REQUESTS + index, **settings)
            sampler.add_request(index, sampling, np.array([START], np.uint32), 1)
            tokens = memoryview(np.array([START], "<u4").tobytes())
            speculation.add_request(NewRequest(index, tokens, 1, 0, [], sampling))
        while unfinished := [i for i, chain in enumerate(chains.chains) if len(chain) < 3]:
            drafts = speculation.draft(Launch(DECODE, (len(unfinished), 1, 1), unfinished))
            rows = drafts.rows([chains.chains[i][-1] for i in unfinished])
            verified = speculation.verify(drafts, None, LOGITS[torch.from_numpy(rows)])
            for index, tokens_of_one in zip(unfinished, verified.tokens, strict=True):
                chains.chains[index] += tokens_of_one
        for chain in chains.chains:
            found[chain[1], chain[2]] += 1

    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert found.sum() == NUM_REQUESTS * NUM_ROUNDS == 20_000
    assert expected.min() > 5
    assert chi_square < MAX_CHI_SQUARE
    assert 0 < counts["spec_decode.num_accepted_tokens"] < counts["spec_decode.num_draft_tokens"]
