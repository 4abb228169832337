"""Proposer: protocol of the drafters on the host, with the types of its results. AcceptanceCounts:
counters of proposed and accepted drafts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hpu.spec_decode.launch_costs import LaunchCosts

Tokens = npt.NDArray[np.uint32]


class Proposal(NamedTuple):
    """Draft tokens proposed for a request."""

    tokens: list[int]
    confidence: int = 0
    """Match length: number of known tokens before the drafts that match the text from which the
    drafts come. Longer matches are accepted more often. 0: unknown."""


NOTHING = Proposal([])


class DraftingCosts(NamedTuple):
    """Cost of running a draft model."""

    launches: LaunchCosts
    """Time by the number of rows of a drafter launch that yields a draft token per request."""
    num_pending: Callable[[int, int], int]
    """Maps (req_index, number of known tokens) to the request's rows in the drafter's first
    launch."""


class Proposer(Protocol):
    """Proposes draft tokens after the known tokens of a request. The tensor-parallel ranks of a
    stage propose the same drafts."""

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        """Register a request that starts at `req_index` with `tokens`. `is_private`: its output
        must not be a source of drafts for other requests."""
        ...

    def remove_request(self, req_index: int) -> None:
        """Handle a request that has ended or is preempted."""
        ...

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        """Propose at most `limits[i]` tokens to follow `histories[i]`, which contains all known
        tokens of request `req_indices[i]`; its last token is not computed yet. Returns fewer or no
        tokens if no continuation is likely."""
        ...

    def measure(self, max_num_seqs: int) -> DraftingCosts | None:
        """Measure the cost of drafting for up to `max_num_seqs` requests; None if drafting is cheap
        compared with a launch. Must be called after the warm-up, on all ranks of the last pipeline
        stage at once."""
        ...


class AcceptanceCounts:
    """Updates the counters `spec_decode.num_<drafts|draft_tokens|accepted_tokens>` and
    `spec_decode.accepted.<position>`."""

    def __init__(self, count: Callable[[str, float], None]) -> None:
        """`count(name, amount)` adds to a counter of the worker."""
        self._count = count

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the verification of `num_drafts` drafts of a request, which accepted `num_accepted`
        drafts."""
        self._count("spec_decode.num_drafts", 1)
        self._count("spec_decode.num_draft_tokens", num_drafts)
        self._count("spec_decode.num_accepted_tokens", num_accepted)
        for position in range(num_accepted):
            self._count(f"spec_decode.accepted.{position}", 1)
