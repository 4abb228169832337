"""DraftModelProposer: the most likely tokens of a second, smaller model.

It caches keys and values in the same blocks as the target, with memory of its own behind them, and
runs only when drafts are asked for. So it may be behind the target by a prompt, by a prefix that
the target found in its cache, or by the tokens of launches without drafts: it computes those first.
Rejected drafts are removed by length alone.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hpu.spec_decode.base import NOTHING, DraftingCosts, Proposal, Tokens
from hpu.spec_decode.launch_costs import LaunchCosts

MAX_ROWS = 8
"""Tokens of a request that the first launch may have; more of them are computed as a prompt
before."""


@runtime_checkable
class DraftLauncher(Protocol):
    """Launches of a drafter over the blocks of the live requests
    (hpu/runner/drafting/draft_runner.py)."""

    block_size: int
    max_model_len: int
    """Tokens of a request that the drafter takes."""

    def block_table(self, req_index: int) -> npt.NDArray[np.int32]:
        """The blocks of a request."""
        ...

    def set_num_computed_tokens(self, req_index: int, count: int) -> None:
        """Where the next launch of a request begins."""
        ...

    def prefill(self, req_index: int, count: int) -> None:
        """Compute the next `count` known tokens of a request."""
        ...

    def decode(
        self,
        req_indices: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        *,
        is_first: bool,
    ) -> list[int]:
        """Compute the next `counts[i]` tokens of each request, which are `tokens`, one request
        behind the other; the most likely token behind each request's last one, -1 where its logits
        are not finite. `is_first`: they are known tokens; if not, each is what the last launch has
        found for the request."""
        ...

    def measure(self, max_rows: int) -> LaunchCosts:
        """How long `decode` takes."""
        ...


class _State:
    """What the drafter has computed of a request."""

    __slots__ = ("length", "processed", "seed", "tags")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        """Of the tags."""
        self.length = 0
        """Known tokens whose keys and values are in the blocks."""
        self.processed: list[int] = []
        """Drafts behind them whose keys and values are there, too."""
        self.tags: list[int] = []
        """Of the full blocks, up to `length`."""


class DraftModelProposer:
    """Drafts with a model. Keeps which tokens' keys and values each block holds, so that what was
    computed for another request, or before a preemption, is used again."""

    def __init__(self, launcher: DraftLauncher, *, reads_hidden: bool = False) -> None:
        """`reads_hidden`: position i of the drafter has token i + 1, beside hidden states of the
        target, which drafts do not have: they are computed again once they are accepted. The last
        position in a block has the first token of the next one, so two sequences that share all
        tokens of a block, and not the next, write over each other there: their drafts are a little
        worse for it."""
        self._launcher = launcher
        self._reads_hidden = reads_hidden
        self._states: dict[int, _State] = {}
        self._tags: dict[int, int] = {}
        """Of each block that the drafter has filled: the hash of the tokens up to its end."""

    def add_request(self, req_index: int, tokens: Tokens) -> None:
        state = self._states[req_index] = _State(int(tokens[0]) if self._reads_hidden else 0)
        # The last token is computed for its logits, whatever the blocks hold.
        self._find_cached(req_index, state, self._text(tokens)[:-1])

    def remove_request(self, req_index: int) -> None:
        del self._states[req_index]

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        launcher = self._launcher
        histories = list(map(self._text, histories))
        drafts: list[list[int]] = [[] for _ in req_indices]
        room = [launcher.max_model_len - len(history) + 1 for history in histories]
        limits = [min(pair) for pair in zip(limits, room, strict=True)]
        alive = [i for i, limit in enumerate(limits) if limit > 0]
        counts: list[int] = []
        tokens: list[int] = []
        for i in alive:
            start = self._catch_up(req_indices[i], histories[i])
            counts.append(len(histories[i]) - start)
            tokens += histories[i][start:].tolist()
        is_first = True
        while alive:
            found = launcher.decode(
                [req_indices[i] for i in alive], counts, tokens, is_first=is_first
            )
            is_first = False
            for i, token in zip(alive, found, strict=True):
                if token >= 0:
                    drafts[i].append(token)
            alive = [
                i
                for i, token in zip(alive, found, strict=True)
                if token >= 0 and len(drafts[i]) < limits[i]
            ]
            counts, tokens = [1] * len(alive), [drafts[i][-1] for i in alive]
        for i, limit in enumerate(limits):
            if limit > 0:
                self._keep(req_indices[i], histories[i], drafts[i])
        return [Proposal(tokens) if tokens else NOTHING for tokens in drafts]

    def measure(self, max_num_seqs: int) -> DraftingCosts:
        return DraftingCosts(self._launcher.measure(max_num_seqs), self._num_pending)

    def _num_pending(self, req_index: int, num_tokens: int) -> int:
        state = self._states[req_index]
        num_tokens -= int(self._reads_hidden)
        return max(1, num_tokens - state.length - len(state.processed))

    def _text(self, history: Tokens) -> Tokens:
        """The tokens that the drafter's positions have."""
        return history[1:] if self._reads_hidden else history

    def _catch_up(self, req_index: int, history: Tokens) -> int:
        """Compute all but the last tokens of `history`; returns how many are computed then."""
        state, launcher = self._states[req_index], self._launcher
        last = len(history) - 1
        start = min(state.length, last)
        for token in state.processed:
            if start >= last or history[start] != token:
                break
            start += 1
        if len(history) - start > MAX_ROWS:
            # Another request may have computed them since.
            state.length = start
            self._find_cached(req_index, state, history[:-1])
            start = state.length
        launcher.set_num_computed_tokens(req_index, start)
        if len(history) - start > MAX_ROWS:
            launcher.prefill(req_index, last - start)
            start = last
        return start

    def _keep(self, req_index: int, history: Tokens, drafts: list[int]) -> None:
        """All of `history` is computed, and all drafts but the last."""
        state = self._states[req_index]
        state.length = len(history)
        state.processed = [] if self._reads_hidden else drafts[:-1]
        size = self._launcher.block_size
        blocks = self._launcher.block_table(req_index)
        num_blocks = len(history) // size
        for number in range(len(state.tags), num_blocks):
            state.tags.append(self._tag(state, history, number))
            self._tags[int(blocks[number])] = state.tags[number]
        # What other requests had filled is overwritten in part.
        end = len(history) + len(drafts)
        for block in blocks[num_blocks : -(-end // size)].tolist():
            self._tags.pop(block, None)

    def _find_cached(self, req_index: int, state: _State, tokens: Tokens) -> None:
        """Lengthen what is computed by the blocks that hold the following of `tokens` already."""
        size = self._launcher.block_size
        blocks = self._launcher.block_table(req_index)
        number = len(state.tags)
        while (number + 1) * size <= len(tokens) and number < len(blocks):
            tag = self._tag(state, tokens, number)
            if self._tags.get(int(blocks[number])) != tag:
                break
            state.tags.append(tag)
            number += 1
            state.length = max(state.length, number * size)

    def _tag(self, state: _State, tokens: Tokens, number: int) -> int:
        """Of block `number`, behind blocks with the tags of `state`."""
        size = self._launcher.block_size
        own = tokens[number * size : (number + 1) * size].tobytes()
        return hash((state.tags[number - 1] if number else state.seed, own))
