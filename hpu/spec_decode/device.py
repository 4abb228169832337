"""Speculation on a device with its own memory: tokens, drafts and accepted lengths stay there.

The host plans a launch before it knows how many drafts of the last one were accepted. So it uploads
what holds for any number (all blocks of a request, and the few of them that its next tokens may lie
in), and tensor operations of static shapes do the rest: they look for drafts in the known tokens,
compute positions and slots, and accept. Every request has the row of its last token and
`max_drafts` further ones; row j of request i is row j * B + i of the launch.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from config.params.speculation import SpeculationMethod
from hpu.backends.base import Backend
from hpu.spec_decode.acceptance_counts import AcceptanceCounts
from hpu.spec_decode.base import Tokens

NO_TOKEN = -2
"""Behind the accepted tokens of a request."""


class DraftInputs(NamedTuple):
    """What the host uploads for a decode of batch B over N blocks."""

    req_indices: Tensor
    """(B,): the scratch index for padding."""
    limits: Tensor
    """(B,): tokens that blocks and context have room for."""
    may_draft: Tensor
    """(B,): 1, or 0 for a request that needs more than the most likely token; -1 for padding."""
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
    ) -> None:
        self.width = 1 + method.max_drafts
        """Rows of a request."""
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
        self._prepare = backend.compiled(
            _Prepare(method, max_model_len, block_size, pad_block, self._scratch)
        )
        self._accept = backend.compiled(_Accept(self.width, max_model_len, self._scratch))
        self._append = backend.compiled(_Append(max_model_len, self._scratch))
        # Keep the zeros out of the recipe that each new request runs.
        backend.mark_step()
        self._write_request(self._scratch, np.zeros(1, np.uint32))

    def add_request(self, req_index: int, tokens: Tokens) -> None:
        """Upload the tokens of a request."""
        self._write_request(req_index, tokens)

    def take_host_tensors(self) -> list[Tensor]:
        """What uploads since the last call read: to be kept until the device is done."""
        taken, self._host = self._host, []
        return taken

    def prepare(self, inputs: DraftInputs) -> Rows:
        """The rows of a launch."""
        rows: Rows = self._prepare(self._history, self._num_tokens, *inputs)
        return rows

    def append(self, req_indices: Tensor, tokens: Tensor) -> None:
        """Append a sampled token to each request: `tokens` (B,), -1 counts as 0."""
        self._write(*self._append(self._num_tokens, req_indices, tokens), req_indices)

    def accept(
        self, rows: Rows, chosen: Tensor, sampled: Tensor | None, req_indices: Tensor
    ) -> Tensor:
        """(B, 2 + max_drafts): how many drafts there were, the accepted tokens, then NO_TOKEN. By
        `chosen` (R,), the most likely tokens, and `sampled` (B,), if given, for the first rows.
        Appends the tokens to the requests."""
        first = chosen[: len(req_indices)] if sampled is None else sampled
        accepted: Tensor
        accepted, index, values, lengths = self._accept(
            chosen, first, rows.drafts, rows.num_drafts, rows.last_positions, req_indices
        )
        self._write(index, values, lengths, req_indices)
        return accepted

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


class _Prepare:
    """Known tokens and uploaded inputs to the rows of a launch."""

    __name__ = "prepare"

    def __init__(
        self,
        method: SpeculationMethod,
        max_len: int,
        block_size: int,
        pad_block: int,
        scratch: int,
    ) -> None:
        self._method = method
        self._max_len = max_len
        self._block_size = block_size
        self._pad_block = pad_block
        self._scratch = scratch

    def __call__(self, history: Tensor, num_tokens: Tensor, *inputs: Tensor) -> Rows:
        given = DraftInputs(*inputs)
        requests = given.req_indices
        last = num_tokens.index_select(0, requests) - 1
        known = history.view(-1, self._max_len).index_select(0, requests)
        drafts, is_found = lookup(known, last, self._method)
        room = (given.limits - last - 2).clamp(min=0, max=self._method.max_drafts)
        num_drafts = torch.where(given.may_draft > 0, torch.where(is_found, room, 0), 0)
        num_drafts = torch.where(given.may_draft < 0, -1, num_drafts)
        newest = known.gather(1, last.clamp(0, self._max_len - 1).unsqueeze(1).long())
        tokens = torch.cat((newest, drafts), dim=1)
        width = tokens.shape[1]
        offsets = torch.arange(width, dtype=last.dtype, device=last.device).unsqueeze(1)
        # From here on (width, B) and (width, N).
        is_valid = offsets <= num_drafts
        positions = torch.where(is_valid, last + offsets, 0)
        slots = self._slots(positions, given)
        slots = torch.where(is_valid, slots, given.pad_slots.view(width, -1))
        groups = given.block_groups.clamp(min=0)
        usage = positions.index_select(1, groups) - given.block_starts + 1
        is_read = is_valid.to(last.dtype).index_select(1, groups) > 0
        is_read = is_read & (usage > 0) & (given.block_groups >= 0)
        batch = len(requests)
        return Rows(
            tokens.t().reshape(-1, 1),
            positions.reshape(-1, 1),
            slots.reshape(-1),
            torch.where(is_read, given.block_list, self._pad_block).reshape(-1),
            torch.where(is_read, given.block_groups + offsets * batch, -1).reshape(-1),
            torch.where(is_read, given.block_starts, 0).reshape(-1),
            torch.where(is_read, usage.clamp(max=self._block_size), 1).reshape(-1),
            drafts,
            num_drafts,
            last,
        )

    def _slots(self, positions: Tensor, given: DraftInputs) -> Tensor:
        column = torch.div(positions, self._block_size, rounding_mode="floor")
        inside = positions - column * self._block_size
        blocks = torch.zeros_like(positions)
        for number in range(given.windows.shape[1]):
            is_here = column == given.first_blocks + number
            blocks = torch.where(is_here, given.windows[:, number], blocks)
        return blocks * self._block_size + inside


def lookup(known: Tensor, last: Tensor, method: SpeculationMethod) -> tuple[Tensor, Tensor]:
    """(B, max_drafts) drafts, and (B,) whether they are any: as hpu/spec_decode/ngram.py, of the
    longest n-gram up to `lookup_max`. `known` (B, L) tokens, of which `last` (B,) is the index of
    the last one."""
    length = known.shape[1]
    index = torch.arange(length, dtype=last.dtype, device=last.device).unsqueeze(0)
    end = last.unsqueeze(1)
    agrees = index < end
    size = torch.zeros_like(known)
    for before in range(method.lookup_max):
        token = known.gather(1, (end - before).clamp(0, length - 1).long())
        shifted = known
        if before:
            shifted = torch.nn.functional.pad(known[:, : length - before], (before, 0), value=-1)
        agrees = agrees & (shifted == token)
        size = size + agrees.to(size.dtype)
    longest = size.amax(dim=1, keepdim=True)
    is_found = longest >= method.lookup_min
    # The most recent of the longest.
    found = torch.where(size == longest, index, -1).amax(dim=1, keepdim=True)
    period = end - found
    offset = torch.ones_like(found)
    drafts = []
    for _ in range(method.max_drafts):
        drafts.append(known.gather(1, (found + offset).clamp(0, length - 1).long()))
        # A continuation that reaches the last token goes on with itself.
        offset = torch.where(offset >= period, 1, offset + 1)
    return torch.cat(drafts, dim=1), is_found.squeeze(1)


class _Accept:
    """Tokens of all rows to those that are accepted, and what is written to the known tokens."""

    __name__ = "accept"

    def __init__(self, width: int, max_len: int, scratch: int) -> None:
        self._width = width
        self._max_len = max_len
        self._scratch = scratch

    def __call__(
        self,
        chosen: Tensor,
        first: Tensor,
        drafts: Tensor,
        num_drafts: Tensor,
        last: Tensor,
        requests: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = self._width
        others = chosen.view(width, -1)[1:].t()
        tokens = torch.cat((first.unsqueeze(1), others), dim=1)
        is_alive = torch.ones_like(num_drafts)
        num_accepted = torch.zeros_like(num_drafts)
        for position in range(width - 1):
            agrees = (drafts[:, position] == tokens[:, position]) & (num_drafts > position)
            is_alive = is_alive * agrees.to(is_alive.dtype)
            num_accepted = num_accepted + is_alive
        offsets = torch.arange(width, dtype=last.dtype, device=last.device).unsqueeze(0)
        is_valid = offsets <= num_accepted.unsqueeze(1)
        accepted = torch.where(is_valid, tokens, NO_TOKEN)
        accepted = torch.cat((num_drafts.unsqueeze(1), accepted), dim=1)
        column = last.unsqueeze(1) + 1 + offsets
        is_stored = is_valid & (column < self._max_len) & (num_drafts >= 0).unsqueeze(1)
        index = requests.unsqueeze(1) * self._max_len + column
        spare = self._scratch * self._max_len + self._max_len - 1
        index = torch.where(is_stored, index, spare)
        lengths = torch.where(requests < self._scratch, last + 2 + num_accepted, 1)
        return accepted, index.reshape(-1), tokens.clamp(min=0).reshape(-1), lengths


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
