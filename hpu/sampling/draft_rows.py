"""Sampler inputs of a decode with drafts, with static shapes.

Row j * B + i has the logits after the first j drafts of request i. It is sampled as if these drafts
were accepted, with the matching random number and token counts. The number of tokens that are not
yet on the host is a device tensor: the uploaded values are valid for any such number.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.sampling.device_columns import ByWidth, DeviceColumns
from hpu.sampling.ops import SamplingLaunch, SamplingState
from hpu.sampling.params import Params, TableRows

NO_TOKEN = -2
"""Padding after the accepted tokens of a request."""


class SamplingRows(NamedTuple):
    """Requests of a decode with drafts. B: batch width, K: drafts per request."""

    req_indices: list[int]
    drafts: Tensor
    """(B, K)"""
    ahead: Tensor
    """(B,): generated tokens of each request beyond `num_generated`."""
    num_generated: npt.NDArray[np.int64]
    """(len(req_indices),)"""


class _Inputs(NamedTuple):
    """Uploaded inputs of a launch of B requests."""

    randoms: DeviceColumns
    """(num_randoms, B)"""
    num_banned: DeviceColumns
    """(1, B): number of tokens that remain until min_tokens."""
    limits: DeviceColumns
    """(1, B): largest number of drafts that has a bitmask."""


class DraftRows:
    """Compiled functions and inputs of launches with `width` rows per request. B: requests, R =
    width * B: rows, V: vocabulary."""

    def __init__(
        self, backend: Backend, state: SamplingState, max_drafts: int, max_inflight_steps: int
    ) -> None:
        self.width = width = 1 + max_drafts
        # Each launch in flight, including the current launch, may accept all drafts.
        num_randoms = max_drafts * max_inflight_steps + 1
        neutral = state.tables.neutral_row
        self._columns, _, self._bitmasks = state

        def expanded(
            params: Tensor, rows: TableRows, randoms: Tensor, num_banned: Tensor, ahead: Tensor
        ) -> tuple[Tensor, TableRows]:
            return _expanded(params, rows, randoms, num_banned, ahead, width, num_randoms, neutral)

        compiled = backend.compiled
        self.expanded: Callable[..., tuple[Tensor, TableRows]] = compiled(expanded)
        """Expands the uploaded columns of B requests to R rows. `ahead` (B,): number of each
        request's tokens that are not yet on the host. Returns params (len(Params) * R,) and table
        rows of (R,) each; `counts` and `last_tokens` index the outputs of `counts_before` and
        `last_before`."""
        self.counts_before: Callable[..., Tensor] = compiled(_counts_before)
        """Maps the counts table, its rows (B,) and drafts (B, width - 1) to counts (R, V)."""
        self.last_before: Callable[..., Tensor] = compiled(_last_before)
        """Maps the last-tokens table, its rows (B,) and drafts (B, width - 1) to last tokens (R,
        N)."""
        self.counts_after: Callable[..., Tensor] = compiled(_counts_after)
        """Maps the counts table, its rows (B,) and accepted tokens (B, width), padded with
        NO_TOKEN, to the new contents of these rows."""
        self.last_after: Callable[..., Tensor] = compiled(_last_after)

        def inputs(batch: int) -> _Inputs:
            return _Inputs(
                DeviceColumns(backend, num_randoms, batch, torch.float32),
                DeviceColumns(backend, 1, batch, backend.index_dtype),
                DeviceColumns(backend, 1, batch, backend.index_dtype),
            )

        self._inputs = ByWidth(backend, inputs)

    def upload(
        self, launch: SamplingLaunch, num_generated: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        """Upload random numbers, and the number of tokens that remain until min_tokens."""
        randoms, num_banned, _ = self._inputs[launch.width]
        self._columns.write_randoms(launch.indices, num_generated, randoms.host())
        randoms.upload(launch.pinned)
        self._columns.write_num_banned(launch.indices, num_generated, num_banned.host()[0])
        num_banned.upload(launch.pinned)
        return randoms.device, num_banned.device

    def upload_bitmasks(self, launch: SamplingLaunch, words: DeviceColumns) -> Tensor:
        """Upload the bitmasks of all rows as `words`. Returns the largest number of drafts (B,)
        that has a bitmask."""
        limits = self._inputs[launch.width].limits
        self._bitmasks.write_drafted(launch.indices, words.host(), limits.host()[0])
        words.upload(launch.pinned)
        limits.upload(launch.pinned)
        return limits.device


def _expanded(
    params: Tensor,
    rows: TableRows,
    randoms: Tensor,
    num_banned: Tensor,
    ahead: Tensor,
    width: int,
    num_randoms: int,
    neutral: int,
) -> tuple[Tensor, TableRows]:
    offsets = torch.arange(width, dtype=ahead.dtype, device=ahead.device).unsqueeze(1)
    # (width, B)
    offsets = (ahead.clamp(min=0) + offsets).clamp(max=num_randoms - 1)
    random = randoms.view(num_randoms, -1).gather(0, offsets.long())
    others = params.view(len(Params._fields), -1)[1:].repeat(1, width)
    # Not torch.arange: the compiler may trace its size as a symbol.
    every = torch.ones_like(offsets).reshape(-1).cumsum(0, dtype=ahead.dtype) - 1
    is_banned = (offsets < num_banned).reshape(-1)
    tiled = TableRows(
        bias=rows.bias.repeat(width),
        banned=torch.where(is_banned, rows.banned.repeat(width), neutral),
        counts=every,
        few_words=rows.few_words.repeat(width),
        many_words=rows.many_words.repeat(width),
        last_tokens=every.clone(),
    )
    return torch.cat((random.reshape(1, -1), others)).reshape(-1), tiled


def _counts_before(counts: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    every = torch.arange(counts.shape[1], device=drafts.device, dtype=drafts.dtype)
    found = [counts.index_select(0, rows)]
    for draft in drafts.unbind(1):
        found.append(found[-1] + (every == draft.unsqueeze(1)))
    return torch.cat(found)


def _counts_after(counts: Tensor, rows: Tensor, accepted: Tensor) -> Tensor:
    every = torch.arange(counts.shape[1], device=accepted.device, dtype=accepted.dtype)
    found = counts.index_select(0, rows)
    for token in accepted.unbind(1):
        found = found + (every == token.unsqueeze(1))
    return found


def _last_before(last_tokens: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    size = last_tokens.shape[1]
    both = torch.cat((last_tokens.index_select(0, rows), drafts + 1), dim=1)
    return torch.cat([both[:, start : start + size] for start in range(drafts.shape[1] + 1)])


def _last_after(last_tokens: Tensor, rows: Tensor, accepted: Tensor) -> Tensor:
    both = torch.cat((last_tokens.index_select(0, rows), accepted + 1), dim=1)
    count = (accepted != NO_TOKEN).to(torch.int32).sum(1, keepdim=True, dtype=torch.int32)
    index = torch.arange(last_tokens.shape[1], dtype=torch.int32, device=accepted.device)
    return both.gather(1, (count + index).long())
