"""Proposer: what drafts the tokens that a decode verifies."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hpu.spec_decode.launch_costs import LaunchCosts

Tokens = npt.NDArray[np.uint32]


class Proposal(NamedTuple):
    """Drafts of one request."""

    tokens: list[int]
    confidence: int = 0
    """How many known tokens before the drafts agree with the text that the drafts were taken from:
    the more, the likelier are the drafts. 0: unknown."""


NOTHING = Proposal([])


class DraftingCosts(NamedTuple):
    """What the launches of a drafter cost."""

    launches: LaunchCosts
    """Of one launch, by its rows; a launch gives one draft of each request."""
    num_pending: Callable[[int, int], int]
    """Rows of a request with so many known tokens that the first launch has: of the request index
    and that number."""


class Proposer(Protocol):
    """Drafts tokens behind the known ones of a request. Every rank drafts the same."""

    def add_request(self, req_index: int, tokens: Tokens) -> None:
        """A request starts at `req_index` with `tokens`."""
        ...

    def remove_request(self, req_index: int) -> None:
        """The request ends, or is preempted."""
        ...

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        """At most `limits[i]` tokens that may follow `histories[i]`, all known tokens of request
        `req_indices[i]`, the last one not computed yet; fewer or none where nothing is likely."""
        ...

    def measure(self, max_num_seqs: int) -> DraftingCosts | None:
        """What drafting costs for up to so many requests; None: nothing beside a launch. After the
        warm-up, on all ranks at once."""
        ...
