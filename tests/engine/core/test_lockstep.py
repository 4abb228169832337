"""LockstepInbox: equal messages on all ranks."""

from queue import SimpleQueue
from typing import Any, cast

import msgspec
import pytest
from engine_rig import asking, prompt_of, request_of

from config.errors import EngineDied
from engine.core.lockstep import Entry, LockstepInbox
from engine.executors.base import Executor
from hpu.protocol import ImagePlacement


class SharingExecutor:
    """What LockstepInbox uses of an executor. `shared`: the bytes of rank 0."""

    def __init__(self, rank: int, shared: list[bytes]) -> None:
        self.rank = rank
        self._shared = shared

    def share(self, data: bytes) -> bytes:
        if self.rank == 0:
            self._shared.append(data)
        return self._shared[-1]


def taken(*changes: dict[str, Any]) -> list[Entry]:
    """The last entry of each rank; rank i gets the same request with `changes[i]`."""
    shared: list[bytes] = []
    entries: list[Entry] = []
    for rank, changed in enumerate(changes):
        request = msgspec.structs.replace(request_of(prompt_of(1, 2), asking(3)), **changed)
        inbox: SimpleQueue[Entry] = SimpleQueue()
        inbox.put((0, request, [], None))
        executor = cast(Executor, SharingExecutor(rank, shared))
        entries += LockstepInbox(executor, inbox).take(has_work=False)
    return entries


def test_equal_requests_are_taken_by_all_ranks() -> None:
    image = ImagePlacement(b"cat", 0, 1)

    assert len(taken({"images": [image]}, {"images": [image]})) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": prompt_of(1, 3)},
        {"sampling": asking(4)},
        {"cache_salt": "other"},
        {"priority": 1},
        {"adapter": "0123"},
        {"images": [ImagePlacement(b"cat", 0, 1)]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_request_that_differs_between_ranks_ends_the_engine(change: dict[str, Any]) -> None:
    with pytest.raises(EngineDied, match="of rank 1 differs from that of rank 0"):
        taken({}, change)
