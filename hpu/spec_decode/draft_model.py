"""DraftModelProposer: the most likely tokens of a draft model, or of a head with a KV cache.

The drafter has its own KV cache, with the same block ids as the target, and runs only when drafts
are requested. It may lag behind the target by a prompt, by a prefix that the target found in its
cache, or by the tokens of launches without drafts; it computes the missing tokens first. Rejected
drafts are removed by reducing the length.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hpu.spec_decode.base import NOTHING, DraftingCosts, Proposal, Tokens
from hpu.spec_decode.launch_costs import LaunchCosts

MAX_ROWS = 8
"""Maximum number of missing tokens that the first launch computes for a request. If more tokens are
missing, a prefill computes all of them but the last."""


@runtime_checkable
class DraftLauncher(Protocol):
    """Runs a draft model or a head over the blocks of the running requests."""

    block_size: int
    max_model_len: int
    """Maximum number of tokens of a request that the drafter supports."""

    def block_table(self, req_index: int) -> npt.NDArray[np.int32]:
        """Block ids of a request."""
        ...

    def set_num_computed_tokens(self, req_index: int, count: int) -> None:
        """Set the position at which a request's next launch starts."""
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
        """Compute the next `counts[i]` tokens of each request. `tokens`: the tokens of all
        requests, concatenated. Returns the most likely next token of each request, -1 if its logits
        are not finite. `is_first`: the tokens are known tokens; otherwise each token is the result
        of the last launch for its request."""
        ...

    def measure(self, max_rows: int) -> LaunchCosts:
        """Measure the time of `decode`."""
        ...


class _State:
    """Progress of the drafter in a request."""

    __slots__ = ("length", "processed", "seed", "tags")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        """Parent hash of the first tag."""
        self.length = 0
        """Number of known tokens whose keys and values are in the blocks."""
        self.processed: list[int] = []
        """Drafts after `length` whose keys and values are also in the blocks."""
        self.tags: list[int] = []
        """Tags of the full blocks before `length`."""


class DraftModelProposer:
    """Drafts with a model or a head. Records which tokens each block contains, so that keys and
    values that were computed for another request, or before a preemption, are reused."""

    def __init__(self, launcher: DraftLauncher, *, reads_hidden: bool = False) -> None:
        """`reads_hidden`: position i of the drafter reads token i + 1 and the target's hidden
        state. Drafts have no hidden state of the target, so their positions are recomputed once the
        drafts are accepted. The last position of a block depends on the first token of the next
        block: two sequences that share all tokens of a block but not the next token overwrite each
        other's last position, which makes their drafts slightly worse."""
        self._launcher = launcher
        self._reads_hidden = reads_hidden
        self._states: dict[int, _State] = {}
        self._tags: dict[int, int] = {}
        """Tag of each block that the drafter has filled: hash of all tokens up to the end of the
        block."""

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        state = self._states[req_index] = _State(int(tokens[0]) if self._reads_hidden else 0)
        # The last token is always recomputed, because its logits are needed.
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
        return history[1:] if self._reads_hidden else history

    def _catch_up(self, req_index: int, history: Tokens) -> int:
        """Compute all but the last token of `history`, if more than MAX_ROWS are missing. Returns
        the number of computed tokens."""
        state, launcher = self._states[req_index], self._launcher
        last = len(history) - 1
        start = min(state.length, last)
        for token in state.processed:
            if start >= last or history[start] != token:
                break
            start += 1
        if len(history) - start > MAX_ROWS:
            # Another request may have computed the same blocks in the meantime.
            state.length = start
            self._find_cached(req_index, state, history[:-1])
            start = state.length
        launcher.set_num_computed_tokens(req_index, start)
        if len(history) - start > MAX_ROWS:
            launcher.prefill(req_index, last - start)
            start = last
        return start

    def _keep(self, req_index: int, history: Tokens, drafts: list[int]) -> None:
        """Record that `history` and, without `reads_hidden`, all drafts but the last are
        computed."""
        state = self._states[req_index]
        state.length = len(history)
        state.processed = [] if self._reads_hidden else drafts[:-1]
        size = self._launcher.block_size
        blocks = self._launcher.block_table(req_index)
        num_blocks = len(history) // size
        for number in range(len(state.tags), num_blocks):
            state.tags.append(self._tag(state, history, number))
            self._tags[int(blocks[number])] = state.tags[number]
        # These blocks are partly overwritten, so their old tags are invalid.
        end = len(history) + len(drafts)
        for block in blocks[num_blocks : -(-end // size)].tolist():
            self._tags.pop(block, None)

    def _find_cached(self, req_index: int, state: _State, tokens: Tokens) -> None:
        """Extend `state` by blocks that already contain the next tokens of `tokens`."""
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
        """Tag of block `number`, chained to the tag of the previous block."""
        size = self._launcher.block_size
        own = tokens[number * size : (number + 1) * size].tobytes()
        return hash((state.tags[number - 1] if number else state.seed, own))
