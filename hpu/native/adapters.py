"""Adapters of a CompiledDecoder: their matrices in the layout of the library, in slots."""

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpu.native.panels import PANEL

CHUNK_ROWS = 4
"""Rows of one adapter that are multiplied at once, as `AdapterRows` in hpu/native/lora.h."""
PRODUCTS = ("qkv", "out", "gate_up", "down")
MAX_OUTPUTS = 3

Packed = list[tuple[Tensor, Tensor] | None]
"""Of each output of a product (rank, in) and panels of (out, rank), the rank rounded up to PANEL;
None: the adapter has no weights for it."""


Slots = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class _Part(ctypes.Structure):
    """As `LowRankPart` in hpu/native/lora.h."""

    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64))


class _LowRank(ctypes.Structure):
    """As `LowRank` there."""

    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ends", ctypes.c_int64 * MAX_OUTPUTS),
    )


class AdapterRows(ctypes.Structure):
    """As `AdapterRows` there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "order", "starts")),
        *((name, ctypes.c_int64) for name in ("chunks", "max_rank")),
    )


class ProductSlots:
    """The adapters of one product."""

    def __init__(self, output_sizes: Sequence[int], max_loras: int) -> None:
        """`output_sizes`: multiples of PANEL, at most MAX_OUTPUTS."""
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
        """Put an adapter into `slot`; empty if it has no weights for the product."""
        # The structures hold the addresses.
        self._kept[slot] = packed
        for output in range(self._count):
            pair = packed[output] if packed else None
            part = self._parts[slot * self._count + output]
            part.a, part.b, part.rank = None, None, 0
            if pair is not None:
                part.a, part.b, part.rank = pair[0].data_ptr(), pair[1].data_ptr(), len(pair[0])


def pack(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`a` (rank, in) and `b` (out, rank), bfloat16, as Packed has them."""
    rank = -(-a.shape[0] // PANEL) * PANEL
    rows = a.new_zeros((rank, a.shape[1]))
    rows[: len(a)] = a
    columns = b.new_zeros((b.shape[0], rank))
    columns[:, : b.shape[1]] = b
    panels = columns.view(-1, PANEL, rank // 2, 2).permute(0, 2, 1, 3).contiguous()
    return rows, panels


def can_pack(output_sizes: Sequence[int]) -> bool:
    """Whether a product with these outputs takes adapters."""
    return len(output_sizes) <= MAX_OUTPUTS and all(size % PANEL == 0 for size in output_sizes)


class NativeAdapters:
    """The slots of all products of a compiled decoder."""

    def __init__(
        self, products: Mapping[str, Sequence[int]], max_loras: int, max_rank: int
    ) -> None:
        """`products`: the sizes of the outputs of each, by a name."""
        self.slots = {name: ProductSlots(sizes, max_loras) for name, sizes in products.items()}
        self._max_rank = -(-max_rank // PANEL) * PANEL
        self._foreign: set[int] = set()
        """Slots of adapters with weights that the library does not multiply."""
        self._last: tuple[bytes, int, tuple[AdapterRows, object] | None] = (b"", 0, None)
        """Slots and length of the last launch, and its rows: those of most decodes are the same."""

    def pack(self, staged: Sequence[Tensor]) -> Packed:
        """Of what GroupedSlots holds of an adapter: `a` and `b` of each output, empty for none."""
        pairs = zip(staged[::2], staged[1::2], strict=True)
        return [
            pack(a.to(torch.bfloat16), b.to(torch.bfloat16)) if len(a) else None for a, b in pairs
        ]

    def set(self, slot: int, packed: Mapping[str, Packed], *, is_whole: bool) -> None:
        """Put an adapter into `slot`. `is_whole`: the products have all of its weights."""
        for name, product in self.slots.items():
            product.set(slot, packed.get(name, []))
        (self._foreign.discard if is_whole else self._foreign.add)(slot)

    def knows(self, slots: Tensor) -> bool:
        """Whether the library multiplies all weights of the adapters in `slots` (B)."""
        return not self._foreign or self._foreign.isdisjoint(slots.tolist())

    def rows(self, slots: Tensor, length: int) -> "tuple[AdapterRows, object] | None":
        """The rows of a launch of `length` tokens of each of `slots` (B), and what they refer to;
        None if none has an adapter."""
        by_row = slots.numpy()
        key = by_row.tobytes()
        if self._last[:2] != (key, length):
            self._last = (key, length, self._rows(by_row, length))
        return self._last[2]

    def _rows(self, by_row: Slots, length: int) -> "tuple[AdapterRows, object] | None":
        if (by_row < 0).all():
            return None
        if length > 1:
            by_row = np.repeat(by_row, length)
        by_row = np.ascontiguousarray(by_row, np.int64)
        order = np.argsort(by_row, kind="stable")
        order = order[np.count_nonzero(by_row < 0) :]
        sorted_slots = by_row[order]
        firsts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
        ends = np.append(firsts[1:], len(order))
        starts = [
            start
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
            for start in range(first, end, CHUNK_ROWS)
        ]
        starts_array = np.array([*starts, len(order)], np.int64)
        kept = (by_row, np.ascontiguousarray(order, np.int64), starts_array)
        addresses = (array.ctypes.data for array in kept)
        return AdapterRows(*addresses, len(starts), self._max_rank), kept
