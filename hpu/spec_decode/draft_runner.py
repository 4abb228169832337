"""DraftRunner and its subclasses: launches of a drafter over the blocks of the target's requests,
on a device that shares the host's memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.distributed.agreement import Agreement
from hpu.launch_inputs import DecodeArrays, LaunchArrays, PrefillArrays
from hpu.models.base import CausalLM
from hpu.protocol import DECODE, PREFILL, Launch
from hpu.runner.input_buffers import DecodeLayout, InputBufferPool, LaunchInputs, PrefillLayout
from hpu.runner.kv_cache import KVCache
from hpu.runner.model_runner import RunnerParts
from hpu.spec_decode.draft_head import DraftHead
from hpu.spec_decode.hidden_cache import HiddenCache
from hpu.spec_decode.hidden_heads import HiddenHead
from hpu.spec_decode.launch_costs import LaunchCosts, measure

MEASURED_CONTEXT = 256
"""Number of context tokens per row in the measurements of decodes."""


class DraftRunner:
    """Runs a draft model, whose KV cache is indexed by the target's blocks."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        target: RunnerParts,
        cache: KVCache,
        agreement: Agreement,
        *,
        max_model_len: int,
        max_prefill_tokens: int,
        hidden_cache: HiddenCache | None = None,
    ) -> None:
        """Build the runner from its components.

        Args:
            target: runner parts of the target: its requests, and the sampler that chooses drafts.
            hidden_cache: hidden states of the target.
            agreement: agreement of the ranks, so that all ranks use the same measurements.
            max_prefill_tokens: maximum number of tokens of a prefill.
        """
        self.block_size = target.batch_state.block_size
        self.max_model_len = max_model_len
        self._model = model
        self._state = target.batch_state.follower()
        self._cache = cache
        self._greedy = target.sampler.greedy
        self._agreement = agreement
        self._max_prefill_tokens = max_prefill_tokens
        self._hidden_cache = hidden_cache
        self._buffers: InputBufferPool[LaunchArrays] = InputBufferPool(
            backend, {PREFILL: PrefillLayout(), DECODE: DecodeLayout()}
        )

    def block_table(self, req_index: int) -> npt.NDArray[np.int32]:
        """Block table of a request."""
        return self._state.block_table(req_index)

    def set_num_computed_tokens(self, req_index: int, count: int) -> None:
        """Set the position at which a request's next launch starts."""
        self._state.set_num_computed_tokens(req_index, count)

    def prefill(self, req_index: int, count: int) -> None:
        """Compute the next `count` tokens of a request, in chunks."""
        state = self._state
        while count:
            query = min(count, self._max_prefill_tokens)
            blocks = -(-state.num_computed_tokens(req_index) // self.block_size)
            inputs = self._buffers.get((PREFILL, 1, query, blocks))
            arrays = inputs.host_arrays()
            assert isinstance(arrays, PrefillArrays)
            launch = Launch(PREFILL, (1, query, blocks), [req_index], [query], [False])
            state.fill_prefill(launch, arrays)
            inputs.upload()
            self._compute_prompt(inputs, req_index)
            count -= query

    def decode(
        self,
        req_indices: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        *,
        is_first: bool,
    ) -> list[int]:
        """See DraftLauncher.decode."""
        state, indices = self._state, list(req_indices)
        blocks = state.num_row_blocks(indices, list(counts))
        inputs = self._buffers.get((DECODE, len(tokens), 1, blocks))
        arrays = inputs.host_arrays()
        assert isinstance(arrays, DecodeArrays)
        launch = Launch(DECODE, (len(tokens), 1, blocks), indices)
        state.fill_rows(launch, list(counts), arrays)
        inputs.upload()
        inputs.tokens.view(-1).copy_(torch.tensor(tokens))
        last = torch.from_numpy(np.cumsum(counts) - 1)
        found = self._draft(inputs, indices, last, is_first=is_first).tolist()
        for req_index, count, token in zip(indices, counts, found, strict=True):
            computed = state.num_computed_tokens(req_index) + count
            state.set_num_computed_tokens(req_index, computed)
            if token < 0:
                # Non-finite KV: 0 * NaN would leak into drafts of the next request that uses the
                # blocks.
                self._cache.scrub(state.exclusive_blocks(req_index))
                self._cache.scrub_rings(req_index)
        return [int(token) for token in found]

    def measure(self, max_rows: int) -> LaunchCosts:
        """Measure decodes of up to `max_rows` rows with a context of MEASURED_CONTEXT tokens."""
        blocks = -(-MEASURED_CONTEXT // self.block_size)

        def launch(rows: int) -> None:
            inputs = self._buffers.get((DECODE, rows, 1, rows * blocks))
            self._state.fill_dummy(inputs.host_arrays())
            inputs.upload()
            inputs.tokens.zero_()
            self._draft(inputs, list(range(rows)), torch.arange(rows), is_first=True)

        return measure(launch, max_rows, self._agreement)

    def _compute_prompt(self, inputs: LaunchInputs, req_index: int) -> None:
        self._model(inputs.tokens, inputs.context)

    def _draft(
        self, inputs: LaunchInputs, req_indices: list[int], last: Tensor, *, is_first: bool
    ) -> Tensor:
        """Run a decode; returns the most likely next token of each request. `last`: index of each
        request's last row."""
        hidden = self._model(inputs.tokens, inputs.context).flatten(0, 1)
        return self._choose(hidden[last] if len(last) < len(hidden) else hidden)

    def _choose(self, hidden: Tensor) -> Tensor:
        """(M, hidden) to the (M,) most likely tokens."""
        found = self._model.argmax(hidden)
        return self._greedy(self._model.logits(hidden)) if found is None else found


class HeadRunner(DraftRunner):
    """Runs a head that reads the target's hidden states: position i combines the hidden states of
    token i with token i + 1."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments of DraftRunner; the model is a DraftHead, and `hidden_cache` is required."""
        super().__init__(*args, **options)
        assert isinstance(self._model, DraftHead)
        self._head = self._model
        self._last_hidden: dict[int, Tensor] = {}
        """(hidden,) of the last launch by request, used instead of the target's hidden states."""

    def _compute_prompt(self, inputs: LaunchInputs, req_index: int) -> None:
        # `fill_prefill` has already counted these tokens as computed.
        end, query = self._state.num_computed_tokens(req_index), inputs.tokens.shape[1]
        known = self._state.tokens(req_index)[end - query + 1 : end + 1]
        tokens = torch.from_numpy(known.astype(np.int64)).view(1, -1)
        self._head.draft(tokens, inputs.context, self._known_hidden(inputs))

    def _draft(
        self, inputs: LaunchInputs, req_indices: list[int], last: Tensor, *, is_first: bool
    ) -> Tensor:
        if is_first:
            hidden = self._known_hidden(inputs)
        else:
            rows = [self._last_hidden[req_index] for req_index in req_indices]
            hidden = torch.stack(rows).view(len(rows), 1, -1)
        for_logits, following = self._head.draft(inputs.tokens, inputs.context, hidden)
        self._last_hidden = dict(
            zip(req_indices, following.flatten(0, 1)[last].unbind(), strict=True)
        )
        return self._head.tokens_of(self._choose(for_logits.flatten(0, 1)[last]))

    def _known_hidden(self, inputs: LaunchInputs) -> Tensor:
        """(B, Q, hidden): the target's hidden states at the slots of a launch."""
        assert self._hidden_cache is not None
        hidden = self._hidden_cache.read(inputs.context)
        return self._head.combine(hidden).view(*inputs.tokens.shape, -1)


class HiddenHeadRunner(DraftRunner):
    """Runs a head that reads the hidden states of a single token and has no KV cache."""

    def drafts(
        self,
        req_indices: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        count: int,
    ) -> list[list[int]]:
        """See HeadLauncher.drafts."""
        size = self.block_size
        slots = [
            int(self.block_table(req_index)[position // size]) * size + position % size
            for req_index, position in zip(req_indices, positions, strict=True)
        ]
        return self._run(torch.tensor(slots), torch.tensor(tokens), count)

    def measure(self, max_rows: int) -> LaunchCosts:
        def launch(rows: int) -> None:
            zeros = torch.zeros(rows, dtype=torch.int64)
            self._run(zeros, zeros, 1)

        return measure(launch, max_rows, self._agreement)

    def _run(self, slots: Tensor, tokens: Tensor, count: int) -> list[list[int]]:
        head = self._model
        assert isinstance(head, HiddenHead) and self._hidden_cache is not None
        hidden = self._hidden_cache.at(slots)
        drafts: list[list[int]] = head.drafts(hidden, tokens, count, self._greedy).tolist()
        return drafts
