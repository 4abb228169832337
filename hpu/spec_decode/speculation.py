"""Speculation: drafts for a decode, and the tokens that its logits accept, on a device that shares
the host's memory: there the host knows all tokens of the launches before.

A draft is accepted if it is the token that the sampler draws at its position. That loses nothing:
each token is drawn by the target's distribution with the random number of its position, so a seed
gives the tokens that it gives without drafts. For drafts that are one token each, the probability
that a draft is accepted is the one of rejection sampling.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from hpu.protocol import Launch, NewRequest
from hpu.sampling.logprobs import TopLogprobs
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.acceptance_counts import AcceptanceCounts
from hpu.spec_decode.base import NOTHING, Proposal, Proposer, Tokens
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.drafts import Drafts
from hpu.spec_decode.launch_costs import LaunchCosts

Bitmasks = npt.NDArray[np.int32]


class Histories(Protocol):
    """The tokens of the live requests (hpu/runner/batch_state.py)."""

    def tokens(self, req_index: int) -> Tokens:
        """All known tokens of a request."""
        ...

    def draft_capacity(self, req_index: int) -> int:
        """Draft tokens that there is room for."""
        ...


class Verified(NamedTuple):
    """Tokens that a launch accepted."""

    tokens: list[list[int]]
    """Of each request: its accepted drafts, then one token more; -1 where logits were not
    finite."""
    logprobs: TopLogprobs | None
    """Of all tokens, request by request; None when no request asked."""


class Speculation:
    """Drafts tokens, and verifies them with the sampler that all decodes use."""

    def __init__(
        self,
        proposer: Proposer,
        histories: Histories,
        sampler: Sampler,
        lengths: DraftLengths,
        counts: AcceptanceCounts,
        *,
        promises_all: bool = False,
    ) -> None:
        """`promises_all`: whether the drafts of all requests come with the plan (`promise`)."""
        self._promises_all = promises_all
        self._proposer = proposer
        self._histories = histories
        self._sampler = sampler
        self._counts = counts
        self.lengths = lengths
        self._masked: set[int] = set()
        """Requests with a grammar."""
        self._promised: dict[int, Proposal] = {}
        """Of those: what the engine was told that their next decode may verify."""
        self._bitmasks: dict[int, Bitmasks] = {}
        """Of those: (1 + drafts that the grammar allows, W) for the running launch."""

    def measure(self, costs: LaunchCosts, max_num_seqs: int) -> None:
        """Adapt the number of drafts from now on: to `costs` of decodes, and to what drafting
        costs, which is measured for up to `max_num_seqs` requests. On all ranks at once."""
        self.lengths.costs = costs
        self.lengths.drafting = self._proposer.measure(max_num_seqs)

    def add_request(self, new: NewRequest) -> None:
        """A request starts, new or after a preemption."""
        self.lengths.add_request(new.req_index)
        self._proposer.add_request(new.req_index, self._histories.tokens(new.req_index))
        if new.sampling.masked:
            self._masked.add(new.req_index)

    def remove_request(self, req_index: int) -> None:
        """A request has ended, or is preempted."""
        self._proposer.remove_request(req_index)
        self.lengths.remove_request(req_index)
        self._masked.discard(req_index)
        self._promised.pop(req_index, None)
        self._bitmasks.pop(req_index, None)

    def set_bitmasks(self, req_index: int, bitmasks: Bitmasks) -> None:
        """Set what may come next in a request with a grammar, and behind each of its first promised
        drafts, as Sampler.set_bitmasks: (positions, W). For one launch."""
        self._bitmasks[req_index] = bitmasks

    def promise(self, req_indices: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Drafts of those requests of a launch that have a grammar, or of all, once their histories
        have its tokens: (index in `req_indices`, drafts). Their next decode verifies no others, so
        that the engine can compute bitmasks meanwhile, and tell other pipeline stages."""
        if self._promises_all:
            self.lengths.begin_launch(len(req_indices))
            asked = list(req_indices)
        elif self._masked.isdisjoint(req_indices):
            return []
        else:
            asked = [req_index for req_index in req_indices if req_index in self._masked]
        found = self._propose(asked, len(req_indices))
        proposals = [found.get(req_index, NOTHING) for req_index in req_indices]
        counts = self.lengths.choose(req_indices, proposals)
        promised = []
        for i, (req_index, count) in enumerate(zip(req_indices, counts, strict=True)):
            if count:
                proposal = proposals[i]._replace(tokens=proposals[i].tokens[:count])
                if not self._promises_all:
                    self._promised[req_index] = proposal
                promised.append((i, proposal.tokens))
        return promised

    def draft(self, launch: Launch) -> Drafts:
        """The drafts that a decode verifies."""
        req_indices = launch.req_indices
        self.lengths.begin_launch(len(req_indices))
        free = [index for index in req_indices if index not in self._masked]
        found = self._propose(free, len(req_indices))
        for index in self._masked.intersection(req_indices):
            found[index] = self._promised.pop(index, NOTHING)
        proposals = [found.get(req_index, NOTHING) for req_index in req_indices]
        chosen = self.lengths.choose(req_indices, proposals)
        pairs = zip(proposals, chosen, strict=True)
        return Drafts(req_indices, [proposal.tokens[:count] for proposal, count in pairs])

    def _propose(self, req_indices: Sequence[int], num_requests: int) -> dict[int, Proposal]:
        """Proposals for those of the requests that want any, in a launch of `num_requests`."""
        state, lengths = self._histories, self.lengths
        asked, limits = [], []
        for req_index in req_indices:
            wanted = lengths.wanted(req_index)
            limit = min(wanted, state.draft_capacity(req_index)) if wanted else 0
            if limit > 0:
                asked.append(req_index)
                limits.append(limit)
        if not asked:
            return {}
        histories = [state.tokens(req_index) for req_index in asked]
        limits = lengths.plan(num_requests, asked, limits, list(map(len, histories)))
        return dict(zip(asked, self._proposer.propose(asked, histories, limits), strict=True))

    def verify(self, drafts: Drafts, chosen: Tensor | None, logits: Tensor | None) -> Verified:
        """The tokens of a launch with `drafts`: by `chosen` (rows,), the most likely tokens, if
        all requests take these, else by `logits` (rows, V)."""
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
        """Sample position by position, those requests whose drafts so far were accepted: so the
        sampler's penalties and random numbers follow accepted tokens alone."""
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
        return accepted, _in_order(parts, len(counts))

    def _set_bitmasks_at(self, position: int, req_indices: Sequence[int]) -> None:
        """Set what may come at `position` of the launch in requests with a grammar."""
        masked = self._masked.intersection(req_indices) if position else ()
        if masked:
            rows = [self._bitmasks[req_index][position] for req_index in masked]
            self._sampler.set_bitmasks(list(masked), np.stack(rows))

    def _may_follow(self, req_index: int, position: int) -> bool:
        """Whether what may come at `position` of the launch is known."""
        return req_index not in self._masked or position < len(self._bitmasks.get(req_index, ()))

    def _count(self, drafts: Drafts, accepted: Sequence[Sequence[int]]) -> None:
        for req_index, tokens, found in zip(*drafts, accepted, strict=True):
            if tokens:
                self.lengths.verified(req_index, len(tokens), len(found) - 1)
                self._counts.add(len(tokens), len(found) - 1)


def _accept(drafts: Drafts, chosen: list[int]) -> list[list[int]]:
    """The drafts that agree with `chosen`, the token of each row, and the token that follows."""
    accepted = []
    start = 0
    for tokens in drafts.tokens:
        count = 0
        while count < len(tokens) and tokens[count] == chosen[start + count]:
            count += 1
        accepted.append(chosen[start : start + count + 1])
        start += 1 + len(tokens)
    return accepted


def _in_order(parts: list[tuple[list[int], TopLogprobs]], num_requests: int) -> TopLogprobs | None:
    """Log-probabilities of each position's requests as those of all tokens, request by request."""
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
