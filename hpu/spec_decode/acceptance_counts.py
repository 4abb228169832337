"""AcceptanceCounts: counters of drafted and accepted tokens of a worker."""

from collections.abc import Callable


class AcceptanceCounts:
    """Updates the counters `spec_decode.num_<drafts|draft_tokens|accepted_tokens>` and
    `spec_decode.accepted.<position>`."""

    def __init__(self, count: Callable[[str, float], None]) -> None:
        """`count(name, amount)` adds to a counter of the worker."""
        self._count = count

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the verification of `num_drafts` drafts of a request; `num_accepted` drafts were
        accepted."""
        self._count("spec_decode.num_drafts", 1)
        self._count("spec_decode.num_draft_tokens", num_drafts)
        self._count("spec_decode.num_accepted_tokens", num_accepted)
        for position in range(num_accepted):
            self._count(f"spec_decode.accepted.{position}", 1)
