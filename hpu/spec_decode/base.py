"""Proposer: protocol of the drafters for speculation on the host."""

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
    """Time of a drafter launch by its number of rows. A launch yields a draft token per request."""
    num_pending: Callable[[int, int], int]
    """Maps (req_index, number of known tokens) to the request's rows in the drafter's first
    launch."""


class Proposer(Protocol):
    """Proposes draft tokens after the known tokens of a request. All ranks propose the same
    drafts."""

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
        compared with a launch. Called after the warm-up, on all ranks at once."""
        ...
