"""Speculation on a device with its own memory: tokens, drafts and accepted lengths stay there.

The host plans a launch before it knows how many drafts of the last one were accepted. So it uploads
what holds for any number (all blocks of a request, and the few of them that its next tokens may lie
in), and tensor operations of static shapes do the rest: they look for drafts in the known tokens,
compute positions and slots, and accept. Every request has the row of its last token and
`max_drafts` further ones; row j of request i is row j * B + i of the launch.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from config.params.speculation import SpeculationMethod
from hpu.backends.base import Backend
from hpu.layers.metadata import PrefillAttentionInputs
from hpu.protocol import Bucket
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.spec_decode.acceptance_counts import AcceptanceCounts
from hpu.spec_decode.base import Tokens
from hpu.spec_decode.device_search import TextSearch


class DraftInputs(NamedTuple):
    """What the host uploads for a decode of batch B over N blocks."""

    req_indices: Tensor
    """(B,): the scratch index for padding."""
    limits: Tensor
    """(B,): tokens that blocks and context have room for."""
    may_draft: Tensor
    """(B,): 1; -1 for padding."""
    lows: Tensor
    """(B,): the least position that its last known token may have."""
    first_blocks: Tensor
    """(B,): the first block of `windows` in the request's block table."""
    windows: Tensor
    """(B, W): the blocks that its next tokens may lie in."""
    block_list: Tensor
    """(N,): all blocks of the first request, then of the second, ..."""
    block_groups: Tensor
    """(N,): the request's index in the batch; -1 for padding."""
    block_starts: Tensor
    """(N,): position of the block's first token."""
    pad_slots: Tensor
    """(B * (1 + max_drafts),): slots of the pad block."""


class ReadRows(NamedTuple):
    """The rows of a launch and the blocks that they read: M = W * B rows and W * N blocks, of W
    rows of each request."""

    tokens: Tensor
    """(M, 1)"""
    positions: Tensor
    """(M, 1)"""
    slot_mapping: Tensor
    """(M,)"""
    block_list: Tensor
    """(W * N,); also the three that follow, as in DecodeAttentionInputs."""
    block_groups: Tensor
    block_starts: Tensor
    block_usage: Tensor


class Rows(NamedTuple):
    """The rows of a launch: R = B * (1 + max_drafts), N' = N * (1 + max_drafts)."""

    tokens: Tensor
    """(R, 1)"""
    positions: Tensor
    """(R, 1)"""
    slot_mapping: Tensor
    """(R,)"""
    block_list: Tensor
    """(N',); also the three that follow, as in DecodeAttentionInputs."""
    block_groups: Tensor
    block_starts: Tensor
    block_usage: Tensor
    drafts: Tensor
    """(B, max_drafts)"""
    num_drafts: Tensor
    """(B,): how many of them count; -1 for padding."""
    last_positions: Tensor
    """(B,): of the last known token."""
    ahead: Tensor
    """(B,): how many tokens are known that the host did not know of."""


class DeviceDrafter(Protocol):
    """A model or head that drafts on the device (hpu/runner/drafting/device_drafter.py). Position i
    of it has token i + `shift`."""

    shift: int
    num_rows: int
    """Of each request in its first launch: the last positions, which it may not have computed, or
    from other hidden states."""
    max_model_len: int

    def read_text(self, tokens: Callable[[PrefillAttentionInputs, int], Tensor]) -> None:
        """`tokens`: as DeviceSpeculation.prompt_tokens."""
        ...

    def draft(
        self, bucket: Bucket, first: ReadRows, follow: Callable[[Tensor], ReadRows]
    ) -> Tensor:
        """(B, K) drafts behind the `first` rows. `follow`: from drafts (B,) to the rows of the next
        launch, one of each request."""
        ...


class DeviceSpeculation:
    """The known tokens of `max_num_reqs` requests on the device, n-gram drafts from them, and
    their acceptance."""

    def __init__(
        self,
        method: SpeculationMethod,
        backend: Backend,
        counts: AcceptanceCounts,
        *,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        pad_block: int,
        search: TextSearch,
        drafter: DeviceDrafter | None = None,
        plans_drafts: bool = False,
    ) -> None:
        """`search`: drafts from known tokens; KeptDrafts where a `drafter` does, here or on another
        pipeline stage. `plans_drafts`: whether the drafts of each launch are set with `plan`."""
        self.width = 1 + method.max_drafts
        """Rows of a request."""
        self.lookback = 0 if drafter is None else lookback(drafter.shift, drafter.num_rows)
        """How far before the last known token positions are computed."""
        self._drafter = drafter
        self.num_promised = method.max_drafts
        """Columns of `promise`."""
        self.plans_drafts = plans_drafts
        self.counts = counts
        self._backend = backend
        self._max_len = max_model_len
        self._scratch = max_num_reqs
        # One dimension: in-place writes through views would copy the whole tensor.
        size = (max_num_reqs + 1) * max_model_len
        self._history = backend.zeros((size,), backend.index_dtype)
        self._num_tokens = backend.zeros((max_num_reqs + 1,), backend.index_dtype)
        self._uploaded = [
            backend.zeros((count,), backend.index_dtype)
            for count in (max_model_len, max_model_len, 1, 1)
        ]
        self._host: list[Tensor] = []
        """Host tensors that uploads read, until a launch takes them along."""
        places = _Places(block_size, pad_block)
        compiled = backend.compiled
        self._search = search
        self._prepare = compiled(_Prepare(search, max_model_len, places))
        if drafter is None:
            self._promise = compiled(_Promise(search, max_model_len))
        else:
            drafter.read_text(self.prompt_tokens)
            self._verified = compiled(_Verified(places))
            self._promised = compiled(_promised)
            self._follow = compiled(_Follow(places))
            self._begin = compiled(_Begin(method.max_drafts, max_model_len, drafter, places))
        self._accept = backend.compiled(_Accept(self.width, max_model_len, self._scratch))
        self._append = backend.compiled(_Append(max_model_len, self._scratch))
        self._learn = backend.compiled(_Learn(max_model_len, self._scratch))
        self._limit = backend.compiled(_limit)
        # Keep the zeros out of the recipe that each new request runs.
        backend.mark_step()
        self.add_request(self._scratch, np.zeros(1, np.uint32))
        self.remove_request(self._scratch)

    def add_request(self, req_index: int, tokens: Tokens) -> None:
        """Upload the tokens of a request."""
        self._write_request(req_index, tokens)
        _, _, num_tokens, request = self._uploaded
        self._search.add_request(request, num_tokens)
        self._backend.mark_step()

    def remove_request(self, req_index: int) -> None:
        """A request has ended, or is preempted."""
        if not self._search.remembers:
            return
        host = self._backend.host_tensor(1, self._backend.index_dtype)
        host.numpy()[:] = req_index
        request = self._uploaded[-1]
        self._backend.upload(request, host)
        self._host.append(host)
        self._search.remove_request(request, self._history, self._num_tokens)
        self._backend.mark_step()

    def prompt_tokens(self, inputs: PrefillAttentionInputs, shift: int) -> Tensor:
        """(B, Q) the known tokens `shift` behind those of a prefill, whose `state_indices` name its
        requests; any token where there is none."""
        positions, requests = inputs.positions, inputs.state_indices
        assert requests is not None, "the launch names its requests"
        if len(requests) > len(positions):
            # Several sequences behind each other in one row.
            tokens = torch.arange(positions.shape[1], device=positions.device)
            ends = inputs.query_lens.cumsum(0)
            owners = (tokens.unsqueeze(1) >= ends).sum(-1).clamp(max=len(requests) - 1)
            requests = requests.index_select(0, owners).unsqueeze(0)
        else:
            requests = requests.unsqueeze(1)
        index = requests * self._max_len + (positions + shift).clamp(max=self._max_len - 1)
        return self._history.index_select(0, index.reshape(-1)).view(positions.shape)

    def take_host_tensors(self) -> list[Tensor]:
        """What uploads since the last call read: to be kept until the device is done."""
        taken, self._host = self._host, []
        return taken

    @property
    def has_two_ways(self) -> bool:
        """Whether a drafter drafts when a launch begins, or for the next one when it ends."""
        return self._drafter is not None and not self.plans_drafts

    def plan(self, req_indices: Tensor, drafts: Tensor) -> None:
        """Draft these (B, max_drafts), NO_TOKEN behind them, when the next launch of the requests
        (B,) is prepared."""
        self._search.keep(req_indices, drafts, self._num_tokens.index_select(0, req_indices))
        self._backend.mark_step()

    def prepare(self, inputs: DraftInputs, bucket: Bucket, *, from_promised: bool) -> Rows:
        """The rows of a launch in `bucket`. Its drafts are made here, or are those that were
        promised, if any: a search finds these again, a drafter makes others if not `from_promised`.
        """
        rows: Rows
        if self._drafter is None or from_promised:
            searched = self._search.tensors
            rows = self._prepare(self._history, self._num_tokens, *inputs, *searched)
        else:
            rows = self._verified(*self._draft(self._drafter, inputs, bucket), *inputs)
        return rows

    def _draft(
        self, drafter: DeviceDrafter, inputs: DraftInputs, bucket: Bucket
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `_Verified` takes in front of the inputs."""
        first, last, newest, num_drafts = self._begin(self._history, self._num_tokens, *inputs)
        position, left = last - drafter.shift, num_drafts
        self._backend.mark_step()

        def follow(drafts: Tensor) -> ReadRows:
            nonlocal position, left
            read: ReadRows
            read, position, left = self._follow(position, left, drafts, *inputs)
            return read

        return newest, drafter.draft(bucket, first, follow), num_drafts, last

    def learn(self, req_indices: Tensor, num_tokens: Tensor, last_tokens: Tensor) -> None:
        """Set the known tokens of requests (B,) to `num_tokens` (B,), the newest of which are
        `last_tokens` (B, N)."""
        self._write(*self._learn(req_indices, num_tokens, last_tokens), req_indices)

    def append(self, req_indices: Tensor, tokens: Tensor) -> None:
        """Append a sampled token to each request: `tokens` (B,), -1 counts as 0."""
        self._write(*self._append(self._num_tokens, req_indices, tokens), req_indices)

    def accept(self, rows: Rows, sampled: Tensor, req_indices: Tensor) -> tuple[Tensor, Tensor]:
        """By the `sampled` (R,) tokens: (B, 2 + max_drafts) how many drafts there were, the
        accepted tokens, then NO_TOKEN; and the same without the first column. Appends the tokens to
        the requests."""
        accepted: Tensor
        tokens: Tensor
        accepted, tokens, index, values, lengths = self._accept(
            sampled, rows.drafts, rows.num_drafts, rows.last_positions, req_indices
        )
        self._write(index, values, lengths, req_indices)
        return accepted, tokens

    def limit(self, rows: Rows, limits: Tensor) -> Rows:
        """`rows` of which at most `limits` (B,) drafts count."""
        return rows._replace(num_drafts=self._limit(rows.num_drafts, limits))

    def promise(self, accepted: Tensor, inputs: DraftInputs, bucket: Bucket) -> Tensor:
        """What `accept` returned first, and behind it the drafts (B, `num_promised`) that `prepare`
        will make next of the same tokens; NO_TOKEN where it makes none. `inputs`: of the launch in
        `bucket` that has accepted them."""
        promised: Tensor
        if self._drafter is None:
            promised, drafts, lengths = self._promise(
                self._history, self._num_tokens, accepted, inputs.req_indices, *self._search.tensors
            )
        else:
            _, drafts, num_drafts, last = self._draft(self._drafter, inputs, bucket)
            promised, drafts, lengths = self._promised(accepted, drafts, num_drafts, last)
        self._search.keep(inputs.req_indices, drafts, lengths)
        self._backend.mark_step()
        return promised

    def _write(self, index: Tensor, values: Tensor, lengths: Tensor, req_indices: Tensor) -> None:
        self._history.index_copy_(0, index, values)
        self._num_tokens.index_copy_(0, req_indices, lengths)
        self._backend.mark_step()

    def _write_request(self, req_index: int, tokens: Tokens) -> None:
        padded = np.zeros(self._max_len, np.int64)
        padded[: len(tokens)] = tokens[: self._max_len]
        index = req_index * self._max_len + np.arange(self._max_len)
        columns = (padded, index, np.array([len(tokens)]), np.array([req_index]))
        for device, column in zip(self._uploaded, columns, strict=True):
            host = self._backend.host_tensor(len(column), self._backend.index_dtype)
            host.numpy()[:] = column
            self._backend.upload(device, host)
            self._host.append(host)
        values, at, length, request = self._uploaded
        self._history.index_copy_(0, at, values)
        self._num_tokens.index_copy_(0, request, length)
        # A recipe of its own: the same one however many requests a step adds.
        self._backend.mark_step()


def lookback(shift: int, num_rows: int) -> int:
    """How far before the last known token the first of `num_rows` positions is."""
    return num_rows - 1 + shift


class _Places:
    """Where the keys and values of rows lie."""

    def __init__(self, block_size: int, pad_block: int) -> None:
        self._block_size = block_size
        self._pad_block = pad_block

    def rows(
        self, given: DraftInputs, tokens: Tensor, positions: Tensor, is_valid: Tensor
    ) -> ReadRows:
        """Rows of `tokens` at `positions`, both (W, B); padding where they are not valid."""
        width, batch = positions.shape
        positions = torch.where(is_valid, positions, 0)
        pads = given.pad_slots.view(-1, batch)[:width]
        slots = torch.where(is_valid, self._slots(positions, given), pads)
        offsets = torch.arange(width, dtype=positions.dtype, device=positions.device).unsqueeze(1)
        groups = given.block_groups.clamp(min=0)
        usage = positions.index_select(1, groups) - given.block_starts + 1
        is_read = is_valid.to(positions.dtype).index_select(1, groups) > 0
        is_read = is_read & (usage > 0) & (given.block_groups >= 0)
        return ReadRows(
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
    """(B,) how many drafts have room; -1 for padding."""
    room = torch.minimum((given.limits - last - 2).clamp(min=0), most)
    found = torch.where(given.may_draft > 0, room, 0)
    return torch.where(given.may_draft < 0, -1, found)


class _Verified:
    """Drafts to the rows of the launch that verifies them."""

    __name__ = "verified"

    def __init__(self, places: _Places) -> None:
        self._places = places

    def __call__(
        self, newest: Tensor, drafts: Tensor, num_drafts: Tensor, last: Tensor, *inputs: Tensor
    ) -> Rows:
        """`newest` (B, 1): the last known tokens."""
        given = DraftInputs(*inputs)
        tokens = torch.cat((newest, drafts), dim=1)
        offsets = torch.arange(tokens.shape[1], dtype=last.dtype, device=last.device).unsqueeze(1)
        is_valid = offsets <= num_drafts
        read = self._places.rows(given, tokens.t(), last + offsets, is_valid)
        return Rows(*read, drafts, num_drafts, last, last - given.lows)


class _Prepare:
    """Known tokens and uploaded inputs to the rows of a launch, with drafts of the same tokens."""

    __name__ = "prepare"

    def __init__(self, search: TextSearch, max_len: int, places: _Places) -> None:
        self._search = search
        self._max_len = max_len
        self._verified = _Verified(places)

    def __call__(self, history: Tensor, num_tokens: Tensor, *inputs: Tensor) -> Rows:
        """Behind the inputs the tensors of the search."""
        inputs, searched = inputs[: len(DraftInputs._fields)], inputs[len(DraftInputs._fields) :]
        given = DraftInputs(*inputs)
        last = num_tokens.index_select(0, given.req_indices) - 1
        known = history.view(-1, self._max_len).index_select(0, given.req_indices)
        drafts, most = self._search(known, last, given.req_indices, *searched)
        newest = known.gather(1, last.clamp(0, self._max_len - 1).unsqueeze(1).long())
        num_drafts = _num_drafts(given, last, most)
        return self._verified(newest, drafts, num_drafts, last, *inputs)


class _Begin:
    """Known tokens and uploaded inputs to the rows of a drafter's first launch."""

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
    ) -> tuple[ReadRows, Tensor, Tensor, Tensor]:
        """And the last positions (B,), the tokens there (B, 1), and the number of drafts (B,)."""
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
        # Behind accepted drafts the request may have no block yet.
        is_valid = is_valid & (positions < given.limits)
        read = self._places.rows(given, tokens.t(), positions, is_valid)
        return read, last, tokens[:, -1:].clone(), num_drafts


class _Follow:
    """Drafts (B,) to the rows of a drafter's next launch."""

    __name__ = "follow"

    def __init__(self, places: _Places) -> None:
        self._places = places

    def __call__(
        self, position: Tensor, left: Tensor, drafts: Tensor, *inputs: Tensor
    ) -> tuple[ReadRows, Tensor, Tensor]:
        """`position` (B,) of the launch before, and how many drafts were to come then; both again
        for this one."""
        position, left = position + 1, left - 1
        # Without drafts to come nothing reads what the row computes.
        is_valid = (left > 0).unsqueeze(0)
        read = self._places.rows(
            DraftInputs(*inputs), drafts.unsqueeze(0), position.unsqueeze(0), is_valid
        )
        return read, position, left


class _Accept:
    """Tokens of all rows to those that are accepted, and what is written to the known tokens."""

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


def _promised(
    accepted: Tensor, drafts: Tensor, count: Tensor, last: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`accepted` and the first `count` (B,) of the `drafts` behind the positions `last`; these
    alone; and (B,) behind how many known tokens."""
    offsets = torch.arange(drafts.shape[1], dtype=count.dtype, device=count.device)
    drafts = torch.where(offsets < count.unsqueeze(1), drafts, NO_TOKEN)
    return torch.cat((accepted, drafts), dim=1), drafts, last + 1


class _Promise:
    """As DeviceSpeculation.promise; and the drafts, and (B,) behind how many known tokens."""

    __name__ = "promise"

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
        return _promised(accepted, drafts, count, lengths - 1)


class _Learn:
    """The newest tokens of requests to what is written to the known tokens."""

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
    """One token a request to what is written to the known tokens."""

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
