"""AcceptanceCounts: a worker's counters of drafts."""

from collections.abc import Callable


class AcceptanceCounts:
    """Adds to `spec_decode.num_<drafts|draft_tokens|accepted_tokens>` and
    `spec_decode.accepted.<position>`."""

    def __init__(self, count: Callable[[str, float], None]) -> None:
        """`count` adds to a counter of the worker."""
        self._count = count

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """A request's `num_drafts` drafts were verified, and the first `num_accepted` accepted."""
        self._count("spec_decode.num_drafts", 1)
        self._count("spec_decode.num_draft_tokens", num_drafts)
        self._count("spec_decode.num_accepted_tokens", num_accepted)
        for position in range(num_accepted):
            self._count(f"spec_decode.accepted.{position}", 1)
