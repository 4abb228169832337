"""Speculative decoding on a device with its own memory, where tokens, drafts and accepted lengths
stay.

The host plans a launch before it knows how many drafts of the previous launch were accepted. It
uploads inputs that are valid for any number of accepted drafts: all blocks of a request, and the
few blocks to which its next tokens may be written. Tensor operations of static shapes then find
drafts, compute positions and slots, and accept drafts. Every request has one row for its last token
and `max_drafts` rows for drafts; row j of request i is row j * B + i of the launch.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from config.speculation.base import SpeculationMethod
from hpu.backends.base import Backend
from hpu.layers.metadata import PrefillAttentionInputs
from hpu.protocol import Bucket
from hpu.runner.batch_state import BatchState
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.spec_decode.base import Tokens
from hpu.spec_decode.device_search import TextSearch


class DraftInputs(NamedTuple):
    """Inputs that the host uploads for a decode of batch B over N blocks."""

    req_indices: Tensor
    """(B,): request indices; the scratch index for padding."""
    limits: Tensor
    """(B,): number of tokens that fit into the allocated blocks and the context."""
    may_draft: Tensor
    """(B,): 1 for requests, -1 for padding."""
    lows: Tensor
    """(B,): lower bound of the position of the last known token."""
    first_blocks: Tensor
    """(B,): index of the first block of `windows` in the request's block table."""
    windows: Tensor
    """(B, W): blocks to which the request's next tokens may be written."""
    block_list: Tensor
    """(N,): all blocks of the first request, followed by all blocks of the second request, etc."""
    block_groups: Tensor
    """(N,): batch index of the request that owns the block; -1 for padding."""
    block_starts: Tensor
    """(N,): position of the first token of the block."""
    pad_slots: Tensor
    """(B * (1 + max_drafts),): slots of the pad block."""


class DraftBatch(NamedTuple):
    """Inputs of a launch with W rows per request, and the blocks that the rows read: M = W * B rows
    and W * N blocks."""

    tokens: Tensor
    """(M, 1)"""
    positions: Tensor
    """(M, 1)"""
    slot_mapping: Tensor
    """(M,)"""
    block_list: Tensor
    """(W * N,), like the next three fields; see DecodeAttentionInputs."""
    block_groups: Tensor
    block_starts: Tensor
    block_usage: Tensor


class VerifyBatch(NamedTuple):
    """Inputs of a verifying launch: R = B * (1 + max_drafts) rows, N' = N * (1 + max_drafts)
    blocks."""

    tokens: Tensor
    """(R, 1)"""
    positions: Tensor
    """(R, 1)"""
    slot_mapping: Tensor
    """(R,)"""
    block_list: Tensor
    """(N',), like the next three fields; see DecodeAttentionInputs."""
    block_groups: Tensor
    block_starts: Tensor
    block_usage: Tensor
    drafts: Tensor
    """(B, max_drafts)"""
    num_drafts: Tensor
    """(B,): number of valid drafts; -1 for padding."""
    last_positions: Tensor
    """(B,): position of the last known token."""
    ahead: Tensor
    """(B,): distance of `last_positions` from the lower bound `DraftInputs.lows`."""


class DeviceDrafter(Protocol):
    """Draft model or head that drafts on the device. Its position i reads token i + `shift`."""

    shift: int
    num_rows: int
    """Rows per request in the drafter's first launch, which recomputes the last positions: these
    may be missing, or computed from other hidden states."""
    max_model_len: int

    def read_text(self, tokens: Callable[[PrefillAttentionInputs, int], Tensor]) -> None:
        """Set the function that reads known tokens, DeviceSpeculation.prompt_tokens."""
        ...

    def draft(
        self, bucket: Bucket, first: DraftBatch, follow: Callable[[Tensor], DraftBatch]
    ) -> Tensor:
        """Return the drafts (B, K) that follow the rows of `first`. `follow` maps drafts (B,) to
        the inputs of the next launch, which has one row per request."""
        ...


class DeviceSpeculation:
    """Speculation state of all requests on the device: known tokens, drafts, and verification of
    drafts."""

    def __init__(
        self,
        method: SpeculationMethod,
        backend: Backend,
        batch_state: BatchState,
        *,
        max_model_len: int,
        search: TextSearch,
        drafter: DeviceDrafter | None = None,
        plans_drafts: bool = False,
    ) -> None:
        """`search`: source of drafts; KeptDrafts if a draft model or head, or another pipeline
        stage, drafts. `plans_drafts`: whether `plan` sets the drafts of each launch."""
        self.width = 1 + method.max_drafts
        """Rows per request."""
        self.lookback = 0 if drafter is None else lookback(drafter.shift, drafter.num_rows)
        """Distance from the last known token back to the first position that a drafter's launch
        computes."""
        self._drafter = drafter
        self.num_next_drafts = method.max_drafts
        """Number of draft columns after the accepted tokens in the result of `draft_next`."""
        self.plans_drafts = plans_drafts
        self._backend = backend
        self._max_len = max_model_len
        max_num_reqs = self._scratch = batch_state.max_num_reqs
        # One dimension: in-place writes through views would copy the whole tensor.
        size = (max_num_reqs + 1) * max_model_len
        # Keeps the zero fills, also of `search`, out of the recipe of a new request.
        with backend.recipe:
            self._history = backend.zeros((size,), backend.index_dtype)
            self._num_tokens = backend.zeros((max_num_reqs + 1,), backend.index_dtype)
            self._uploaded = [
                backend.zeros((count,), backend.index_dtype)
                for count in (max_model_len, max_model_len, 1, 1)
            ]
        self._private: set[int] = set()
        """Requests whose outputs the search must not keep."""
        self._host: list[Tensor] = []
        """Host tensors of pending uploads, kept until `take_host_tensors`."""
        places = _Places(batch_state.block_size, batch_state.pad_block)
        compiled = backend.compiled
        self._search = search
        self._prepare = compiled(_Prepare(search, max_model_len, places))
        if drafter is None:
            self._draft_next = compiled(_DraftNext(search, max_model_len))
        else:
            drafter.read_text(self.prompt_tokens)
            self._verified = compiled(_Verified(places))
            self._next_drafts = compiled(_next_drafts)
            self._follow = compiled(_Follow(places))
            self._begin = compiled(_Begin(method.max_drafts, max_model_len, drafter, places))
        self._accept = backend.compiled(_Accept(self.width, max_model_len, self._scratch))
        self._append = backend.compiled(_Append(max_model_len, self._scratch))
        self._learn = backend.compiled(_Learn(max_model_len, self._scratch))
        self._limit = backend.compiled(_limit)
        self.add_request(self._scratch, np.zeros(1, np.uint32))
        self.remove_request(self._scratch)

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        """Upload the tokens of a new request. `is_private`: the search must not keep its output."""
        if is_private:
            self._private.add(req_index)
        self._upload_request(req_index, tokens)
        values, at, length, request = self._uploaded
        # A separate recipe, so that it does not depend on how many requests a step adds.
        with self._backend.recipe:
            self._history.index_copy_(0, at, values)
            self._num_tokens.index_copy_(0, request, length)
            self._search.add_request(request, length)

    def remove_request(self, req_index: int) -> None:
        """Handle a request that has ended or is preempted."""
        is_private = req_index in self._private
        self._private.discard(req_index)
        if is_private or not self._search.remembers:
            return
        host = self._backend.host_tensor(1, self._backend.index_dtype)
        host.numpy()[:] = req_index
        request = self._uploaded[-1]
        self._backend.upload(request, host)
        self._host.append(host)
        with self._backend.recipe:
            self._search.remove_request(request, self._history, self._num_tokens)

    def prompt_tokens(self, inputs: PrefillAttentionInputs, shift: int) -> Tensor:
        """(B, Q) known tokens at `shift` positions after the tokens of a prefill, whose
        `state_indices` are the request indices; arbitrary where no token is known."""
        positions, requests = inputs.positions, inputs.features.state_indices
        assert requests is not None, "the launch names its requests"
        if len(requests) > len(positions):
            # Several sequences are concatenated in one row.
            tokens = torch.arange(positions.shape[1], device=positions.device)
            ends = inputs.query_lens.cumsum(0)
            owners = (tokens.unsqueeze(1) >= ends).sum(-1).clamp(max=len(requests) - 1)
            requests = requests.index_select(0, owners).unsqueeze(0)
        else:
            requests = requests.unsqueeze(1)
        index = requests * self._max_len + (positions + shift).clamp(max=self._max_len - 1)
        return self._history.index_select(0, index.reshape(-1)).view(positions.shape)

    def take_host_tensors(self) -> list[Tensor]:
        """Take the host tensors of the uploads since the last call. They must stay alive until the
        device is done."""
        taken, self._host = self._host, []
        return taken

    @property
    def drafts_at_either_end(self) -> bool:
        """Whether a launch can draft either at its start, for itself, or at its end, for the next
        launch."""
        return self._drafter is not None and not self.plans_drafts

    def plan(self, req_indices: Tensor, drafts: Tensor) -> None:
        """Set the drafts (B, max_drafts), padded with NO_TOKEN, for the next launch of the requests
        (B,)."""
        with self._backend.recipe:
            self._search.keep(req_indices, drafts, self._num_tokens.index_select(0, req_indices))

    def prepare(
        self, inputs: DraftInputs, bucket: Bucket, *, from_next_drafts: bool
    ) -> VerifyBatch:
        """Inputs of a launch in `bucket`. With `from_next_drafts`, it verifies the drafts made at
        the end of the previous launch; otherwise a drafter drafts now. Without a drafter the flag
        has no effect: the search returns the same drafts again."""
        rows: VerifyBatch
        if self._drafter is None or from_next_drafts:
            searched = self._search.tensors
            rows = self._prepare(self._history, self._num_tokens, *inputs, *searched)
        else:
            rows = self._verified(*self._draft(self._drafter, inputs, bucket), *inputs)
        return rows

    def _draft(
        self, drafter: DeviceDrafter, inputs: DraftInputs, bucket: Bucket
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the drafter. Returns (newest tokens, drafts, num_drafts, last positions), the first
        arguments of `_Verified`."""
        first, last, newest, num_drafts, position = self._begin(
            self._history, self._num_tokens, *inputs
        )
        left = num_drafts

        def follow(drafts: Tensor) -> DraftBatch:
            nonlocal position, left
            read: DraftBatch
            read, position, left = self._follow(position, left, drafts, *inputs)
            return read

        return newest, drafter.draft(bucket, first, follow), num_drafts, last

    def learn(self, req_indices: Tensor, num_tokens: Tensor, last_tokens: Tensor) -> None:
        """Set the number of known tokens of requests (B,) to `num_tokens` (B,), and their newest
        tokens to `last_tokens` (B, N)."""
        self._write(*self._learn(req_indices, num_tokens, last_tokens), req_indices)

    def append(self, req_indices: Tensor, tokens: Tensor) -> None:
        """Append a sampled token to each request. `tokens` (B,): a token of -1 is stored as 0."""
        self._write(*self._append(self._num_tokens, req_indices, tokens), req_indices)

    def accept(
        self, rows: VerifyBatch, sampled: Tensor, req_indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Accept drafts that match the `sampled` (R,) tokens, and append the accepted tokens to the
        requests. Returns (B, 2 + max_drafts), the number of drafts followed by the accepted tokens,
        padded with NO_TOKEN; and the same tensor without the first column."""
        accepted: Tensor
        tokens: Tensor
        accepted, tokens, index, values, lengths = self._accept(
            sampled, rows.drafts, rows.num_drafts, rows.last_positions, req_indices
        )
        self._write(index, values, lengths, req_indices)
        return accepted, tokens

    def limit(self, rows: VerifyBatch, limits: Tensor) -> VerifyBatch:
        """Copy of `rows` with at most `limits` (B,) drafts per request."""
        return rows._replace(num_drafts=self._limit(rows.num_drafts, limits))

    def draft_next(self, accepted: Tensor, inputs: DraftInputs, bucket: Bucket) -> Tensor:
        """Draft for the next launch. Returns the first result of `accept`, followed by the drafts
        (B, `num_next_drafts`), padded with NO_TOKEN, which the next `prepare` can verify. `inputs`:
        inputs of the launch in `bucket` that accepted the tokens."""
        next_drafts: Tensor
        if self._drafter is None:
            next_drafts, drafts, lengths = self._draft_next(
                self._history, self._num_tokens, accepted, inputs.req_indices, *self._search.tensors
            )
        else:
            _, drafts, num_drafts, last = self._draft(self._drafter, inputs, bucket)
            next_drafts, drafts, lengths = self._next_drafts(accepted, drafts, num_drafts, last)
        with self._backend.recipe:
            self._search.keep(inputs.req_indices, drafts, lengths)
        return next_drafts

    def _write(self, index: Tensor, values: Tensor, lengths: Tensor, req_indices: Tensor) -> None:
        with self._backend.recipe:
            self._history.index_copy_(0, index, values)
            self._num_tokens.index_copy_(0, req_indices, lengths)

    def _upload_request(self, req_index: int, tokens: Tokens) -> None:
        padded = np.zeros(self._max_len, np.int64)
        padded[: len(tokens)] = tokens[: self._max_len]
        index = req_index * self._max_len + np.arange(self._max_len)
        columns = (padded, index, np.array([len(tokens)]), np.array([req_index]))
        for device, column in zip(self._uploaded, columns, strict=True):
            host = self._backend.host_tensor(len(column), self._backend.index_dtype)
            host.numpy()[:] = column
            self._backend.upload(device, host)
            self._host.append(host)


def lookback(shift: int, num_rows: int) -> int:
    """Distance from the last known token back to the first of the drafter's `num_rows`
    positions."""
    return num_rows - 1 + shift


class _Places:
    """Maps positions to KV-cache slots and blocks."""

    def __init__(self, block_size: int, pad_block: int) -> None:
        self._block_size = block_size
        self._pad_block = pad_block

    def rows(
        self, given: DraftInputs, tokens: Tensor, positions: Tensor, is_valid: Tensor
    ) -> DraftBatch:
        """Launch inputs for `tokens` at `positions`, both (W, B); padding where `is_valid` is
        false."""
        width, batch = positions.shape
        positions = torch.where(is_valid, positions, 0)
        pads = given.pad_slots.view(-1, batch)[:width]
        slots = torch.where(is_valid, self._slots(positions, given), pads)
        offsets = torch.arange(width, dtype=positions.dtype, device=positions.device).unsqueeze(1)
        groups = given.block_groups.clamp(min=0)
        usage = positions.index_select(1, groups) - given.block_starts + 1
        is_read = is_valid.to(positions.dtype).index_select(1, groups) > 0
        is_read = is_read & (usage > 0) & (given.block_groups >= 0)
        return DraftBatch(
            tokens.reshape(-1, 1),
            positions.reshape(-1, 1),
            slots.reshape(-1),
            torch.where(is_read, given.block_list, self._pad_block).reshape(-1),
            torch.where(is_read, given.block_groups + offsets * batch, -1).reshape(-1),
            torch.where(is_read, given.block_starts, 0).reshape(-1),
            torch.where(is_read, usage.clamp(max=self._block_size), 1).reshape(-1),
        )

    def _slots(self, positions: Tensor, given: DraftInputs) -> Tensor:
        column = torch.div(positions, self._block_size, rounding_mode="floor")
        inside = positions - column * self._block_size
        blocks = torch.zeros_like(positions)
        for number in range(given.windows.shape[1]):
            is_here = column == given.first_blocks + number
            blocks = torch.where(is_here, given.windows[:, number], blocks)
        return blocks * self._block_size + inside


def _num_drafts(given: DraftInputs, last: Tensor, most: Tensor) -> Tensor:
    """(B,): number of drafts that fit, at most `most`; -1 for padding."""
    room = torch.minimum((given.limits - last - 2).clamp(min=0), most)
    found = torch.where(given.may_draft > 0, room, 0)
    return torch.where(given.may_draft < 0, -1, found)


class _Verified:
    """Maps drafts to the inputs of the launch that verifies them."""

    __name__ = "verified"

    def __init__(self, places: _Places) -> None:
        self._places = places

    def __call__(
        self, newest: Tensor, drafts: Tensor, num_drafts: Tensor, last: Tensor, *inputs: Tensor
    ) -> VerifyBatch:
        """`newest` (B, 1): last known tokens. `last` (B,): their positions."""
        given = DraftInputs(*inputs)
        tokens = torch.cat((newest, drafts), dim=1)
        offsets = torch.arange(tokens.shape[1], dtype=last.dtype, device=last.device).unsqueeze(1)
        is_valid = offsets <= num_drafts
        read = self._places.rows(given, tokens.t(), last + offsets, is_valid)
        return VerifyBatch(*read, drafts, num_drafts, last, last - given.lows)


class _Prepare:
    """Maps known tokens and uploaded inputs to the inputs of a launch, with drafts found by
    searching the known tokens."""

    __name__ = "prepare"

    def __init__(self, search: TextSearch, max_len: int, places: _Places) -> None:
        self._search = search
        self._max_len = max_len
        self._verified = _Verified(places)

    def __call__(self, history: Tensor, num_tokens: Tensor, *inputs: Tensor) -> VerifyBatch:
        """`inputs`: the fields of DraftInputs, followed by the tensors of the search."""
        inputs, searched = inputs[: len(DraftInputs._fields)], inputs[len(DraftInputs._fields) :]
        given = DraftInputs(*inputs)
        last = num_tokens.index_select(0, given.req_indices) - 1
        known = history.view(-1, self._max_len).index_select(0, given.req_indices)
        drafts, most = self._search(known, last, given.req_indices, *searched)
        newest = known.gather(1, last.clamp(0, self._max_len - 1).unsqueeze(1).long())
        num_drafts = _num_drafts(given, last, most)
        return self._verified(newest, drafts, num_drafts, last, *inputs)


class _Begin:
    """Maps known tokens and uploaded inputs to the inputs of a drafter's first launch."""

    __name__ = "begin"

    def __init__(
        self, max_drafts: int, max_len: int, drafter: DeviceDrafter, places: _Places
    ) -> None:
        self._max_drafts = max_drafts
        self._max_len = max_len
        self._shift = drafter.shift
        self._num_rows = drafter.num_rows
        self._drafter_len = drafter.max_model_len
        self._places = places

    def __call__(
        self, history: Tensor, num_tokens: Tensor, *inputs: Tensor
    ) -> tuple[DraftBatch, Tensor, Tensor, Tensor, Tensor]:
        """Returns the launch inputs, the last positions (B,), the tokens there (B, 1), the number
        of drafts (B,), and the drafter's last positions (B,)."""
        given = DraftInputs(*inputs)
        last = num_tokens.index_select(0, given.req_indices) - 1
        known = history.view(-1, self._max_len).index_select(0, given.req_indices)
        most = (self._drafter_len - last).clamp(min=0, max=self._max_drafts)
        num_drafts = _num_drafts(given, last, most)
        offsets = torch.arange(self._num_rows, dtype=last.dtype, device=last.device)
        # (num_rows, B)
        ends = last - (self._num_rows - 1) + offsets.unsqueeze(1)
        tokens = known.gather(1, ends.t().clamp(0, self._max_len - 1).long())
        positions = ends - self._shift
        is_valid = (positions >= 0) & (positions < self._drafter_len) & (num_drafts >= 0)
        # Positions after accepted drafts may not have a block yet.
        is_valid = is_valid & (positions < given.limits)
        read = self._places.rows(given, tokens.t(), positions, is_valid)
        return read, last, tokens[:, -1:].clone(), num_drafts, last - self._shift


class _Follow:
    """Maps drafts (B,) to the inputs of a drafter's next launch."""

    __name__ = "follow"

    def __init__(self, places: _Places) -> None:
        self._places = places

    def __call__(
        self, position: Tensor, left: Tensor, drafts: Tensor, *inputs: Tensor
    ) -> tuple[DraftBatch, Tensor, Tensor]:
        """`position` (B,): positions of the previous launch. `left` (B,): number of drafts that
        remained then. Returns the launch inputs, and the updated `position` and `left`."""
        position, left = position + 1, left - 1
        # If no drafts remain, the output of the row is unused.
        is_valid = (left > 0).unsqueeze(0)
        read = self._places.rows(
            DraftInputs(*inputs), drafts.unsqueeze(0), position.unsqueeze(0), is_valid
        )
        return read, position, left


class _Accept:
    """Compares sampled tokens with drafts. Returns the accepted tokens, and the updates of the
    known tokens."""

    __name__ = "accept"

    def __init__(self, width: int, max_len: int, scratch: int) -> None:
        self._width = width
        self._max_len = max_len
        self._scratch = scratch

    def __call__(
        self,
        sampled: Tensor,
        drafts: Tensor,
        num_drafts: Tensor,
        last: Tensor,
        requests: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        width = self._width
        tokens = sampled.view(width, -1).t().contiguous()
        is_alive = torch.ones_like(num_drafts)
        num_accepted = torch.zeros_like(num_drafts)
        for position in range(width - 1):
            agrees = (drafts[:, position] == tokens[:, position]) & (num_drafts > position)
            is_alive = is_alive * agrees.to(is_alive.dtype)
            num_accepted = num_accepted + is_alive
        offsets = torch.arange(width, dtype=last.dtype, device=last.device).unsqueeze(0)
        is_valid = offsets <= num_accepted.unsqueeze(1)
        kept = torch.where(is_valid, tokens, NO_TOKEN)
        accepted = torch.cat((num_drafts.unsqueeze(1), kept), dim=1)
        column = last.unsqueeze(1) + 1 + offsets
        is_stored = is_valid & (column < self._max_len) & (num_drafts >= 0).unsqueeze(1)
        index = requests.unsqueeze(1) * self._max_len + column
        spare = self._scratch * self._max_len + self._max_len - 1
        index = torch.where(is_stored, index, spare)
        lengths = torch.where(requests < self._scratch, last + 2 + num_accepted, 1)
        return accepted, kept, index.reshape(-1), tokens.clamp(min=0).reshape(-1), lengths


def _limit(num_drafts: Tensor, limits: Tensor) -> Tensor:
    return torch.minimum(num_drafts, limits)


def _next_drafts(
    accepted: Tensor, drafts: Tensor, count: Tensor, last: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate `accepted` with the first `count` (B,) of the `drafts` that follow the positions
    `last`. Returns the result, the drafts padded with NO_TOKEN, and the number of known tokens
    before the drafts (B,)."""
    offsets = torch.arange(drafts.shape[1], dtype=count.dtype, device=count.device)
    drafts = torch.where(offsets < count.unsqueeze(1), drafts, NO_TOKEN)
    return torch.cat((accepted, drafts), dim=1), drafts, last + 1


class _DraftNext:
    """Searches for the next drafts. Returns the accepted tokens followed by the drafts, the drafts,
    and the number of known tokens before the drafts (B,)."""

    __name__ = "draft_next"

    def __init__(self, search: TextSearch, max_len: int) -> None:
        self._search = search
        self._max_len = max_len

    def __call__(
        self,
        history: Tensor,
        num_tokens: Tensor,
        accepted: Tensor,
        requests: Tensor,
        *searched: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths = num_tokens.index_select(0, requests)
        known = history.view(-1, self._max_len).index_select(0, requests)
        drafts, count = self._search(known, lengths - 1, requests, *searched)
        return _next_drafts(accepted, drafts, count, lengths - 1)


class _Learn:
    """Maps the newest tokens of requests to updates of the known tokens."""

    __name__ = "learn"

    def __init__(self, max_len: int, scratch: int) -> None:
        self._max_len = max_len
        self._scratch = scratch

    def __call__(
        self, requests: Tensor, num_tokens: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = tokens.shape[1]
        offsets = torch.arange(width, dtype=requests.dtype, device=requests.device).unsqueeze(0)
        column = num_tokens.unsqueeze(1) - width + offsets
        is_stored = (column >= 0) & (requests < self._scratch).unsqueeze(1)
        spare = self._scratch * self._max_len + self._max_len - 1
        index = torch.where(is_stored, requests.unsqueeze(1) * self._max_len + column, spare)
        lengths = torch.where(requests < self._scratch, num_tokens, 1)
        return index.reshape(-1), tokens.reshape(-1), lengths


class _Append:
    """Maps one token per request to updates of the known tokens."""

    __name__ = "append"

    def __init__(self, max_len: int, scratch: int) -> None:
        self._max_len = max_len
        self._scratch = scratch

    def __call__(
        self, num_tokens: Tensor, requests: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = num_tokens.index_select(0, requests)
        is_stored = (requests < self._scratch) & (count < self._max_len)
        spare = self._scratch * self._max_len + self._max_len - 1
        index = torch.where(is_stored, requests * self._max_len + count, spare)
        lengths = torch.where(requests < self._scratch, count + 1, 1)
        return index, tokens.clamp(min=0), lengths
