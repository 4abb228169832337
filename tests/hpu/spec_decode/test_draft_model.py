"""Tokens that a draft model computes: no token twice, and no reuse of blocks with other
contents."""

from collections.abc import Sequence

import numpy as np

from hpu.spec_decode.draft_model import DraftModelProposer
from hpu.spec_decode.launch_costs import LaunchCosts

SIZE = 4


class Launcher:
    """Drafts 100 + the number of the decode, and records the computed tokens."""

    block_size = SIZE
    max_model_len = 64

    def __init__(self, blocks: dict[int, list[int]]) -> None:
        self.blocks = blocks
        self.computed: dict[int, int] = {}
        self.prefills: list[tuple[int, int, int]] = []
        """(request, first token, number of tokens) of each prefill."""
        self.decodes: list[list[tuple[int, int, int]]] = []

    def block_table(self, req_index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.array(self.blocks[req_index], np.int32)

    def set_num_computed_tokens(self, req_index: int, count: int) -> None:
        self.computed[req_index] = count

    def prefill(self, req_index: int, count: int) -> None:
        self.prefills.append((req_index, self.computed[req_index], count))
        self.computed[req_index] += count

    def decode(
        self,
        req_indices: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        *,
        is_first: bool,
    ) -> list[int]:
        launch = []
        for req_index, count in zip(req_indices, counts, strict=True):
            launch.append((req_index, self.computed[req_index], count))
            self.computed[req_index] += count
        assert len(tokens) == sum(counts)
        self.decodes.append(launch)
        return [100 + len(self.decodes)] * len(req_indices)

    def measure(self, max_rows: int) -> LaunchCosts:
        return LaunchCosts([1], [1.0])


def tokens(*numbers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.array(numbers, np.uint32)


def test_accepted_drafts_are_not_computed_again() -> None:
    launcher = Launcher({0: [3, 5]})
    proposer = DraftModelProposer(launcher)
    proposer.add_request(0, tokens(1, 2))

    first = proposer.propose([0], [tokens(1, 2)], [3])
    second = proposer.propose([0], [tokens(1, 2, 101, 102, 9)], [1])

    assert first[0].tokens == [101, 102, 103]
    assert second[0].tokens == [104]
    assert launcher.decodes == [[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 1)], [(0, 4, 1)]]


def test_rejected_drafts_are_computed_again() -> None:
    launcher = Launcher({0: [3, 5]})
    proposer = DraftModelProposer(launcher)
    proposer.add_request(0, tokens(1, 2))

    proposer.propose([0], [tokens(1, 2)], [3])
    proposer.propose([0], [tokens(1, 2, 101, 8)], [1])
    proposer.propose([0], [tokens(1, 2, 101, 8, 9)], [1])

    assert launcher.decodes[3:] == [[(0, 3, 1)], [(0, 4, 1)]]


def test_blocks_that_another_request_filled_with_the_same_text_are_used() -> None:
    text = tokens(*range(1, 19))
    launcher = Launcher({0: [7, 8, 2, 4, 6], 1: [7, 8, 2, 9, 1], 2: [7, 3, 2, 5, 0]})
    proposer = DraftModelProposer(launcher)
    for index in range(3):
        proposer.add_request(index, text)

    for index in range(3):
        proposer.propose([index], [text], [1])

    # The second request shares 3 of 4 full blocks, the third only block 1: its block 2 follows
    # another block.
    assert launcher.prefills == [(0, 0, 17), (2, 4, 13)]
    assert launcher.decodes == [[(0, 17, 1)], [(1, 12, 6)], [(2, 17, 1)]]


def test_a_block_that_was_overwritten_in_part_is_not_used() -> None:
    text = tokens(*range(1, 15))
    launcher = Launcher({0: [7, 8, 2, 4], 1: [8, 1]})
    proposer = DraftModelProposer(launcher)
    proposer.add_request(0, text)
    proposer.propose([0], [text], [1])
    proposer.remove_request(0)
    proposer.add_request(1, tokens(60))
    proposer.propose([1], [tokens(60)], [1])
    proposer.remove_request(1)

    proposer.add_request(0, text)
    proposer.propose([0], [text], [1])

    assert launcher.prefills == [(0, 0, 13), (0, 4, 9)]


def test_nothing_is_drafted_beyond_the_drafters_context() -> None:
    launcher = Launcher({0: list(range(20)), 1: [30]})
    proposer = DraftModelProposer(launcher)
    long = tokens(*range(63))
    proposer.add_request(0, long)
    proposer.add_request(1, tokens(1))

    found = proposer.propose([0, 1], [long, tokens(1)], [4, 1])

    assert [len(entry.tokens) for entry in found] == [2, 1]
