"""LoRA adapters of a CompiledDecoder: slots with the matrices in the layout of the library."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpu.layers.linear import LinearBase
from hpu.models.base import CompiledAdapters
from hpu.native.pages import LINE_BYTES, HugePages
from hpu.native.panels import PANEL, TILE_INPUTS

CHUNK_ROWS, CHUNK_ROWS_OF_TILES = 4, 16
"""Maximum number of rows with the same adapter that are multiplied together, without and with
tiles."""
BLOCK_ROWS, TILE_ROWS = 32, 16
"""Rows of a block of a tiled matmul; rows of a tile."""
OVERREAD = 1024
"""Bytes after the last matrix that a tile may read."""
RANKS = 8
"""Ranks are padded to a multiple of this."""
LINEARS = ("qkv", "out", "gate_up", "down")
MAX_OUTPUTS = 3


class LowRankPair(NamedTuple):
    """LoRA matrices for an output of a matmul, in the layout of hpu/native/lora.h."""

    a: Tensor
    b: Tensor
    rank: int


Packed = Sequence[LowRankPair | None]
"""LoRA matrices for each output of a matmul; None: the adapter has no weights for that output."""

Slots = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class _Part(ctypes.Structure):
    """Addresses of a LowRankPair: `LowRankPart` in hpu/native/lora.h."""

    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64))


class _LowRank(ctypes.Structure):
    """All slots of a matmul: `LowRank` in hpu/native/lora.h."""

    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ends", ctypes.c_int64 * MAX_OUTPUTS),
    )


class AdapterRows(ctypes.Structure):
    """Rows of a launch, grouped by adapter: `AdapterRows` in hpu/native/lora.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "order", "starts", "places", "tiles")),
        *((name, ctypes.c_int64) for name in ("chunks", "max_rank")),
    )


class LinearSlots:
    """Adapter slots of a matmul."""

    def __init__(self, output_sizes: Sequence[int], max_loras: int) -> None:
        """`output_sizes`: at most MAX_OUTPUTS multiples of PANEL."""
        count = len(output_sizes)
        self._parts = (_Part * (max_loras * count))()
        self._kept: dict[int, Packed] = {}
        self._count = count
        ends = np.cumsum([size // PANEL for size in output_sizes]).tolist()
        ends += [ends[-1]] * (MAX_OUTPUTS - count)
        self.structure = _LowRank(
            ctypes.addressof(self._parts), count, (ctypes.c_int64 * MAX_OUTPUTS)(*ends)
        )

    def set(self, slot: int, packed: Packed) -> None:
        """Load an adapter into `slot`; `packed` is empty if it has no weights for the matmul."""
        # Keep the tensors alive: the structures hold only their addresses.
        self._kept[slot] = packed
        for output in range(self._count):
            pair = packed[output] if packed else None
            part = self._parts[slot * self._count + output]
            part.a, part.b, part.rank = None, None, 0
            if pair is not None:
                part.a, part.b, part.rank = pair.a.data_ptr(), pair.b.data_ptr(), pair.rank


def pack(a: Tensor, b: Tensor) -> LowRankPair:
    """Pack `a` (rank, in) and `b` (out, rank), both bfloat16; the rank is padded."""
    rank, size = -(-len(a) // RANKS) * RANKS, a.shape[1]
    rows = a.new_zeros((rank, size))
    rows[: len(a)] = a
    columns = b.new_zeros((b.shape[0], rank))
    columns[:, : b.shape[1]] = b
    steps = [rows[:, k : k + TILE_INPUTS].reshape(-1) for k in range(0, size, TILE_INPUTS)]
    panels = columns.view(-1, PANEL, rank // 2, 2).permute(0, 2, 1, 3)
    return LowRankPair(torch.cat(steps), panels.contiguous(), rank)


def _together(linears: Mapping[str, Packed]) -> dict[str, Packed]:
    """Copy the matrices into contiguous huge pages: for each matmul, first all `a`, then all
    `b`."""
    pairs = [pair for packed in linears.values() for pair in packed if pair is not None]
    pages = HugePages(
        sum(tensor.nbytes + LINE_BYTES for pair in pairs for tensor in pair[:2]) + OVERREAD
    )

    def moved(tensor: Tensor) -> Tensor:
        return pages.allocate(tensor.shape, tensor.dtype).copy_(tensor)

    found: dict[str, Packed] = {}
    for name, packed in linears.items():
        firsts = [None if pair is None else moved(pair.a) for pair in packed]
        found[name] = [
            None if pair is None or a is None else LowRankPair(a, moved(pair.b), pair.rank)
            for a, pair in zip(firsts, packed, strict=True)
        ]
    return found


def can_pack(output_sizes: Sequence[int]) -> bool:
    """Whether the library supports adapters of a matmul with these outputs."""
    return len(output_sizes) <= MAX_OUTPUTS and all(size % PANEL == 0 for size in output_sizes)


class NativeAdapters(CompiledAdapters):
    """Adapter slots of all matmuls of a compiled decoder."""

    def __init__(
        self, names: Mapping[LinearBase, str], max_loras: int, max_rank: int, *, has_tiles: bool
    ) -> None:
        self.names = names
        self._chunk_rows = CHUNK_ROWS_OF_TILES if has_tiles else CHUNK_ROWS
        self.slots = {
            name: LinearSlots(linear.output_sizes, max_loras) for linear, name in names.items()
        }
        self._max_rank = -(-max_rank // PANEL) * PANEL
        self._foreign: set[int] = set()
        """Slots whose adapters have weights that the library cannot apply."""
        self._last: tuple[bytes, int, tuple[AdapterRows, tuple[Slots, ...]] | None] = (b"", 0, None)
        """Slots, length and result of the last call of `rows`: most decodes repeat the call."""

    def pack(self, staged: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Packed]:
        """Pack an adapter of PerAdapterSlots. `staged` holds `a` and `b` for each output of each
        matmul; an empty pair means no weights."""
        return _together(
            {
                name: [
                    pack(a.to(torch.bfloat16), b.to(torch.bfloat16)) if len(a) else None
                    for a, b in zip(matrices[::2], matrices[1::2], strict=True)
                ]
                for name, matrices in staged.items()
            }
        )

    def set(self, slot: int, packed: Mapping[str, Packed], *, is_whole: bool) -> None:
        """Load an adapter into `slot`. `is_whole`: `packed` holds all weights of the adapter."""
        for name, product in self.slots.items():
            product.set(slot, packed.get(name, []))
        (self._foreign.discard if is_whole else self._foreign.add)(slot)

    def knows(self, slots: Tensor) -> bool:
        """Whether the library applies all weights of the adapters in `slots` (B,)."""
        return not self._foreign or self._foreign.isdisjoint(slots.tolist())

    def rows(self, slots: Tensor, length: int) -> "tuple[AdapterRows, tuple[Slots, ...]] | None":
        """Rows of a launch with `length` tokens per sequence, for `slots` (B,), and the arrays that
        the rows point to. None if no sequence has an adapter."""
        by_row = slots.numpy()
        key = by_row.tobytes()
        if self._last[:2] != (key, length):
            self._last = (key, length, self._rows(by_row, length))
        return self._last[2]

    def _rows(self, by_row: Slots, length: int) -> "tuple[AdapterRows, tuple[Slots, ...]] | None":
        if (by_row < 0).all():
            return None
        if length > 1:
            by_row = np.repeat(by_row, length)
        by_row = np.ascontiguousarray(by_row, np.int64)
        blocks = np.arange(len(by_row)) // BLOCK_ROWS
        order = np.lexsort((by_row, blocks))
        order = order[by_row[order] >= 0]
        blocks = blocks[order]
        in_block = _since_change(blocks)
        in_group = _since_change(blocks * (by_row.max() + 1) + by_row[order])
        begins = (in_group % self._chunk_rows == 0) | (in_block % TILE_ROWS == 0)
        starts = np.flatnonzero(begins)
        places = np.zeros(len(by_row), np.int64)
        places[order] = np.arange(len(order))
        tiles = blocks * 2 + in_block // TILE_ROWS
        num_tiles = 2 * -(-len(by_row) // BLOCK_ROWS)
        columns = (
            *(by_row, order, np.append(starts, len(order)), places),
            np.searchsorted(tiles[starts], np.arange(num_tiles + 1)),
        )
        kept = tuple(np.ascontiguousarray(column, np.int64) for column in columns)
        addresses = (array.ctypes.data for array in kept)
        return AdapterRows(*addresses, len(starts), self._max_rank), kept


def _since_change(values: Slots) -> Slots:
    """Offset of each value in its run of equal values."""
    firsts = np.flatnonzero(np.diff(values, prepend=-1))
    return np.arange(len(values)) - np.repeat(firsts, np.diff(firsts, append=len(values)))
