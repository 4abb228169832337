"""Proposer: protocol of the drafters that run beside host-side speculation."""

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
    """Match length: known tokens before the drafts that agree with the text that the drafts were
    taken from. Longer matches are accepted more often. 0: unknown."""


NOTHING = Proposal([])


class DraftingCosts(NamedTuple):
    """Cost of running a drafter model."""

    launches: LaunchCosts
    """Time of a drafter launch by its number of rows. A launch gives one draft token per request.
    """
    num_pending: Callable[[int, int], int]
    """(req_index, number of known tokens) -> rows of the request in the drafter's first launch."""


class Proposer(Protocol):
    """Proposes draft tokens after the known tokens of a request. All ranks propose the same
    drafts."""

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        """A request starts at `req_index` with `tokens`. `is_private`: its output must not become
        a source of drafts for other requests."""
        ...

    def remove_request(self, req_index: int) -> None:
        """The request ends or is preempted."""
        ...

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        """Propose at most `limits[i]` tokens to follow `histories[i]`, which holds all known tokens
        of request `req_indices[i]`; the last known token is not computed yet. Returns fewer or no
        tokens where no continuation is likely."""
        ...

    def measure(self, max_num_seqs: int) -> DraftingCosts | None:
        """Measure the cost of drafting for up to `max_num_seqs` requests. None: drafting costs
        nothing compared with a launch. Called after the warm-up, on all ranks at once."""
        ...
