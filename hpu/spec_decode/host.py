"""HostSpeculation: drafts for a decode, and verification of drafts with the target's logits, on a
device that shares memory with the host, so that the host knows all tokens of earlier launches.

A draft is accepted if the sampler draws the same token at its position. This keeps the target's
distribution: each token is drawn with the random number of its position, so a seed gives the same
tokens with and without drafts. For a single draft per position, the acceptance probability equals
that of rejection sampling.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from hpu.protocol import Launch, NewRequest
from hpu.runner.async_output import Drafts
from hpu.runner.batch_state import BatchState
from hpu.sampling.logprobs import TopLogprobs
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.base import NOTHING, AcceptanceCounts, Proposal, Proposer
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.launch_costs import LaunchCosts

Bitmasks = npt.NDArray[np.int32]


class Verified(NamedTuple):
    """Tokens that a launch accepted."""

    tokens: list[list[int]]
    """For each request, the accepted drafts and the token after them; -1: see SamplerOutput."""
    logprobs: TopLogprobs | None
    """Log-probabilities of all tokens, sorted by request; None if no request needs them."""


class HostSpeculation:
    """Proposes drafts, and verifies them with the sampler that all decodes use."""

    def __init__(
        self,
        proposer: Proposer,
        histories: BatchState,
        sampler: Sampler,
        lengths: DraftLengths,
        counts: AcceptanceCounts,
        *,
        drafts_all_ahead: bool = False,
    ) -> None:
        """`drafts_all_ahead`: choose the drafts of all requests ahead of their decode, not only of
        requests with a grammar. The plan of the decode then contains the drafts."""
        self._drafts_all_ahead = drafts_all_ahead
        self._proposer = proposer
        self._histories = histories
        self._sampler = sampler
        self._counts = counts
        self.lengths = lengths
        self._masked: set[int] = set()
        """Indices of requests with a grammar."""
        self._next_drafts: dict[int, Proposal] = {}
        """Drafts that the engine expects in the next decode, by request with a grammar."""
        self._bitmasks: dict[int, Bitmasks] = {}
        """Grammar bitmasks of the current launch, (1 + drafts that the grammar allows, W), by
        request."""

    def measure(self, costs: LaunchCosts, max_num_seqs: int) -> None:
        """Set the `costs` of decodes, and measure the cost of drafting for up to `max_num_seqs`
        requests. Afterwards, the number of drafts adapts to both. Must be called on all ranks of
        the last stage at once."""
        self.lengths.costs = costs
        self.lengths.drafting = self._proposer.measure(max_num_seqs)

    def add_request(self, new: NewRequest) -> None:
        """Register a request that starts, new or after a preemption."""
        self.lengths.add_request(new.req_index)
        tokens = self._histories.tokens(new.req_index)
        self._proposer.add_request(new.req_index, tokens, is_private=new.is_private)
        if new.sampling.masked:
            self._masked.add(new.req_index)

    def remove_request(self, req_index: int) -> None:
        """Handle a request that has ended or is preempted."""
        self._proposer.remove_request(req_index)
        self.lengths.remove_request(req_index)
        self._masked.discard(req_index)
        self._next_drafts.pop(req_index, None)
        self._bitmasks.pop(req_index, None)

    def set_bitmasks(self, req_index: int, bitmasks: Bitmasks) -> None:
        """Set the grammar bitmasks of a request for one launch: (positions, W), for the next token
        and for the token after each of its first drafts. See Sampler.set_bitmasks."""
        self._bitmasks[req_index] = bitmasks

    def draft_next(self, req_indices: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Choose the drafts of the next decode now, for requests with a grammar (with
        `drafts_all_ahead`, for all requests). Call it once the tokens of the launch are appended to
        the histories. Returns (index in `req_indices`, drafts) pairs. The next decode of these
        requests verifies no other drafts, so that the engine can already compute bitmasks and
        inform other pipeline stages; without `drafts_all_ahead`, `draft` may drop the last of
        them."""
        if self._drafts_all_ahead:
            self.lengths.begin_launch(len(req_indices))
            candidates = list(req_indices)
        elif self._masked.isdisjoint(req_indices):
            return []
        else:
            candidates = [req_index for req_index in req_indices if req_index in self._masked]
        found = self._propose(candidates, len(req_indices))
        proposals = [found.get(req_index, NOTHING) for req_index in req_indices]
        counts = self.lengths.choose(req_indices, proposals)
        next_drafts = []
        for i, (req_index, count) in enumerate(zip(req_indices, counts, strict=True)):
            if count:
                proposal = proposals[i]._replace(tokens=proposals[i].tokens[:count])
                if not self._drafts_all_ahead:
                    self._next_drafts[req_index] = proposal
                next_drafts.append((i, proposal.tokens))
        return next_drafts

    def draft(self, launch: Launch) -> Drafts:
        """Choose the drafts that the decode `launch` verifies."""
        req_indices = launch.req_indices
        self.lengths.begin_launch(len(req_indices))
        free = [index for index in req_indices if index not in self._masked]
        found = self._propose(free, len(req_indices))
        for index in self._masked.intersection(req_indices):
            found[index] = self._next_drafts.pop(index, NOTHING)
        proposals = [found.get(req_index, NOTHING) for req_index in req_indices]
        chosen = self.lengths.choose(req_indices, proposals)
        pairs = zip(proposals, chosen, strict=True)
        return Drafts(req_indices, [proposal.tokens[:count] for proposal, count in pairs])

    def _propose(self, req_indices: Sequence[int], num_requests: int) -> dict[int, Proposal]:
        state, lengths = self._histories, self.lengths
        drafting, limits = [], []
        for req_index in req_indices:
            wanted = lengths.wanted(req_index)
            limit = min(wanted, state.draft_capacity(req_index)) if wanted else 0
            if limit > 0:
                drafting.append(req_index)
                limits.append(limit)
        if not drafting:
            return {}
        histories = [state.tokens(req_index) for req_index in drafting]
        limits = lengths.plan(num_requests, drafting, limits, list(map(len, histories)))
        return dict(zip(drafting, self._proposer.propose(drafting, histories, limits), strict=True))

    def verify(self, drafts: Drafts, chosen: Tensor | None, logits: Tensor | None) -> Verified:
        """Accepted tokens of a launch with `drafts`. `chosen` (rows,): most likely tokens, if the
        model computed them for greedy requests; None: sample from `logits` (rows, V)."""
        logprobs = None
        if chosen is None:
            assert logits is not None
            if self._sampler.all_greedy(drafts.req_indices):
                chosen = self._sampler.greedy(logits)
        if chosen is not None:
            accepted = _accept(drafts, chosen.tolist())
        else:
            assert logits is not None
            accepted, logprobs = self._sample(drafts, logits)
        self._count(drafts, accepted)
        return Verified(accepted, logprobs)

    def _sample(self, drafts: Drafts, logits: Tensor) -> tuple[list[list[int]], TopLogprobs | None]:
        """Sample position by position, and only requests whose drafts so far were accepted, so that
        penalties and random numbers depend only on accepted tokens."""
        counts = drafts.counts
        starts = np.cumsum([0, *counts[:-1]])
        accepted: list[list[int]] = [[] for _ in counts]
        parts: list[tuple[list[int], TopLogprobs]] = []
        alive = list(range(len(counts)))
        for position in range(max(counts)):
            rows = starts[alive] + position
            part = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows)]
            req_indices = [drafts.req_indices[i] for i in alive]
            self._set_bitmasks_at(position, req_indices)
            sampled = self._sampler.sample(part, req_indices)
            if sampled.logprobs is not None:
                parts.append((alive, sampled.logprobs))
            following = []
            for i, token in zip(alive, sampled.tokens.tolist(), strict=True):
                accepted[i].append(token)
                if drafts.tokens[i][position : position + 1] == [token] and self._may_follow(
                    drafts.req_indices[i], position + 1
                ):
                    following.append(i)
            alive = following
            if not alive:
                break
        return accepted, _in_order(parts)

    def _set_bitmasks_at(self, position: int, req_indices: Sequence[int]) -> None:
        """Set the bitmasks of requests with a grammar for `position` of the launch."""
        masked = self._masked.intersection(req_indices) if position else ()
        if masked:
            rows = [self._bitmasks[req_index][position] for req_index in masked]
            self._sampler.set_bitmasks(list(masked), np.stack(rows))

    def _may_follow(self, req_index: int, position: int) -> bool:
        """Whether the bitmask for `position` of the launch is known, or the request has no
        grammar."""
        return req_index not in self._masked or position < len(self._bitmasks.get(req_index, ()))

    def _count(self, drafts: Drafts, accepted: Sequence[Sequence[int]]) -> None:
        for req_index, tokens, found in zip(*drafts, accepted, strict=True):
            if tokens:
                self.lengths.verified(req_index, len(tokens), len(found) - 1)
                self._counts.add(len(tokens), len(found) - 1)


def _accept(drafts: Drafts, chosen: list[int]) -> list[list[int]]:
    """Drafts that match `chosen`, the sampled token of each row, followed by the next token."""
    accepted = []
    start = 0
    for tokens in drafts.tokens:
        count = 0
        while count < len(tokens) and tokens[count] == chosen[start + count]:
            count += 1
        accepted.append(chosen[start : start + count + 1])
        start += 1 + len(tokens)
    return accepted


def _in_order(parts: list[tuple[list[int], TopLogprobs]]) -> TopLogprobs | None:
    """Merge the log-probabilities of each position into one table, sorted by request."""
    if not parts:
        return None
    width = max(top.k for _, top in parts) + 1
    columns = [
        [functional.pad(x, (0, width - x.shape[1])) for x in (top.ids, top.values)]
        for _, top in parts
    ]
    ids, values = (torch.cat(column) for column in zip(*columns, strict=True))
    ranks = torch.cat([top.ranks for _, top in parts])
    requests = np.concatenate([np.array(alive) for alive, _ in parts])
    order = torch.from_numpy(np.argsort(requests, kind="stable"))
    return TopLogprobs(ids[order], values[order], ranks[order])
