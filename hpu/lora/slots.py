"""LoRA slots of a linear layer or embedding, and their matmuls.

PerAdapterSlots, for a CPU, multiplies the rows of each adapter by the matrices of that adapter.
PaddedSlots, for cards, multiplies all rows by the matrices of all slots and selects each row's own
slot between the two matmuls: shapes and addresses do not depend on the rows, so any mix of adapters
runs in the same graph.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.lora.adapter_weights import LowRank
from hpu.lora.context import LoRAContext

CopySlot = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Copies the source (1, ...) to the index (1) of the stack (slots, ...) and returns the stack."""


class LayerShape(NamedTuple):
    """Sizes of a layer on this rank."""

    in_features: int
    output_sizes: tuple[int, ...]


class Slots(Protocol):
    """Adapter slots of a layer."""

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the LoRA delta of `x` (B, Q, in) to `out` (B, Q, out). May write to `out`."""
        ...

    def stage(self, weights: Sequence[LowRank]) -> "list[Tensor]":
        """Host tensors of an adapter's weights for this layer, in the format of `set`. Runs on the
        thread that reads the adapter."""
        ...

    def set(self, slot: int, staged: "list[Tensor]") -> None:
        """Load an adapter into a slot; `staged` is empty if the adapter has no weights for the
        layer."""
        ...


class PerAdapterSlots:
    """Slots for a CPU: hold the matrices of the adapters without padding."""

    def __init__(self, shape: LayerShape, context: LoRAContext) -> None:
        self._context = context
        self.in_features = shape.in_features
        ends = torch.tensor(shape.output_sizes).cumsum(0).tolist()
        self._ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        self._slots: dict[int, list[Tensor]] = {}

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        for slot, rows in self._context.groups:
            staged = self._slots.get(slot)
            if staged is None:
                continue
            own = x if rows is None else x[rows]
            for (begin, end), a, b in zip(self._ranges, staged[::2], staged[1::2], strict=True):
                if not len(a):
                    continue
                delta = functional.linear(functional.linear(own, a), b)
                if rows is None:
                    out[..., begin:end] += delta
                else:
                    out[..., begin:end].index_add_(0, rows, delta)
        return out

    def low_rank(self, x: Tensor) -> Tensor:
        """Multiply by the `a` matrices only: (B, Q, in) to (B, Q, slots * rank), for
        `add_low_rank`."""
        context = self._context
        out = x.new_zeros((*x.shape[:-1], context.max_loras, context.max_rank))
        for slot, rows in context.groups:
            if slot in self._slots:
                a = self._slots[slot][0]
                t = functional.linear(x if rows is None else x[rows], a)
                out[slice(None) if rows is None else rows, ..., slot, : len(a)] = t
        return out.flatten(-2)

    def add_low_rank(self, t: Tensor, out: Tensor) -> Tensor:
        """Multiply `t` by the `b` matrices and add the result to `out`. `t`: any rows of the result
        of `low_rank`."""
        t = t.view(*t.shape[:-1], self._context.max_loras, self._context.max_rank)
        for slot, (_, b) in self._slots.items():
            own = t[..., slot, : b.shape[1]]
            rows = own.any(-1).nonzero().view(-1)
            if len(rows):
                out.index_add_(0, rows, functional.linear(own[rows], b))
        return out

    def add_looked_up(self, ids: Tensor, out: Tensor) -> Tensor:
        """Add the vectors of the tokens `ids` (B, Q) in the low-rank tables to `out` (B, Q,
        out)."""
        for slot, rows in self._context.groups:
            if slot in self._slots:
                a, b = self._slots[slot]
                t = a.t()[ids if rows is None else ids[rows]]
                delta = functional.linear(t, b)
                out = out + delta if rows is None else out.index_add_(0, rows, delta)
        return out

    def stage(self, weights: Sequence[LowRank]) -> list[Tensor]:
        """Matrices (rank, in) and (out, rank) of each output, alternating; empty tensors for
        outputs without weights."""
        if not weights:
            return []
        by_output = {weight.output: weight for weight in weights}
        staged = []
        for output in range(len(self._ranges)):
            weight = by_output.get(output)
            staged += [torch.empty(0), torch.empty(0)] if weight is None else [weight.a, weight.b]
        return staged

    def set(self, slot: int, staged: list[Tensor]) -> None:
        if staged:
            self._slots[slot] = staged
        else:
            self._slots.pop(slot, None)


class PaddedSlots:
    """Slots for cards: stacked matrices of all slots, padded with zeros to the maximum rank.

    Non-finite values of an adapter cannot reach rows of other slots: the results of `a` are
    selected per row, not multiplied by a mask, and `b` is always finite (see `stage`).

    The ranks of a `group` shard both matrices (fully sharded). Column-parallel layer: the rank
    holds its rows of `a`, whose results are all-gathered. Row-parallel layer: the rank holds its
    columns of `b`, and the results of `a` are reduce-scattered first.
    """

    def __init__(
        self,
        shape: LayerShape,
        context: LoRAContext,
        copy_slot: CopySlot,
        make: Callable[[tuple[int, ...], torch.dtype], Tensor],
        *,
        group: ProcessGroup = SINGLE,
        is_row_parallel: bool = False,
    ) -> None:
        self._context = context
        self.in_features = shape.in_features
        self._copy_slot = copy_slot
        self._make = make
        self._group = group
        self._is_row_parallel = is_row_parallel
        self._num_outputs = len(shape.output_sizes)
        slots, rank = context.max_loras, context.max_rank
        self._rank_a = rank // group.size if not is_row_parallel else rank
        self._rank_b = rank // group.size if is_row_parallel else rank
        num_rows = self._num_outputs * self._rank_a
        self.a = make((slots, num_rows, shape.in_features), context.dtype)
        self.b = [make((slots, self._rank_b, size), context.dtype) for size in shape.output_sizes]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.a, *self.b))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        t = functional.linear(x, self.a.flatten(0, 1))
        if self._group.size > 1 and self._is_row_parallel:
            t = self._scattered(t)
        rank = self._rank_a
        if self._group.size > 1:
            rank = self._rank_b
            if not self._is_row_parallel:
                t = self._gathered(t)
        t = t.view(*t.shape[:-1], self._context.max_loras, self._num_outputs * rank)
        t = torch.where(self._context.mask, t, 0)
        deltas = [
            torch.matmul(t[..., i * rank : (i + 1) * rank].flatten(-2), b.flatten(0, 1))
            for i, b in enumerate(self.b)
        ]
        return out + (deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1))

    def low_rank(self, x: Tensor) -> Tensor:
        """Multiply by `a` only; see PerAdapterSlots.low_rank."""
        t = functional.linear(x, self.a.flatten(0, 1))
        return self._selected(t)

    def add_low_rank(self, t: Tensor, out: Tensor) -> Tensor:
        """Multiply by `b` and add; see PerAdapterSlots.add_low_rank."""
        return out + torch.matmul(t, self.b[0].flatten(0, 1))

    def add_looked_up(self, ids: Tensor, out: Tensor) -> Tensor:
        """Add the looked-up vectors; see PerAdapterSlots.add_looked_up."""
        t = functional.embedding(ids, self.a.flatten(0, 1).t())
        return out + torch.matmul(self._selected(t), self.b[0].flatten(0, 1))

    def _selected(self, t: Tensor) -> Tensor:
        """(..., slots * rank) with zeros except in the row's own slot."""
        t = t.view(*t.shape[:-1], self._context.max_loras, self._rank_a)
        return torch.where(self._context.mask, t, 0).flatten(-2)

    def _gathered(self, t: Tensor) -> Tensor:
        """All-gather (..., slots * outputs * local LoRA rank) to (..., slots * outputs * LoRA
        rank)."""
        sizes = (self._context.max_loras * self._num_outputs, self._rank_a)
        return self._group.all_gather(t.view(*t.shape[:-1], *sizes)).flatten(-2)

    def _scattered(self, t: Tensor) -> Tensor:
        """Reduce-scatter (..., slots * LoRA rank) to (..., slots * local LoRA rank)."""
        sizes = (self._context.max_loras, self._group.size, self._rank_b)
        by_rank = t.view(*t.shape[:-1], *sizes).movedim(-2, 0).contiguous()
        return self._group.reduce_scatter(by_rank).squeeze(0).flatten(-2)

    def stage(self, weights: Sequence[LowRank]) -> list[Tensor]:
        """Tensors to copy to `a` and to each of `b`, with a leading dimension of 1. A non-finite
        `b` is replaced by zeros, with NaN in its rows of `a`: results of this adapter become NaN,
        while other adapters are unaffected (0 * NaN would be NaN)."""
        if not weights:
            return []
        context, rank = self._context, self._group.rank
        a = torch.zeros((1, *self.a.shape[1:]), dtype=context.dtype)
        bs = [torch.zeros((1, *b.shape[1:]), dtype=context.dtype) for b in self.b]
        for weight in weights:
            size = weight.a.shape[0]
            rows = torch.zeros((context.max_rank, weight.a.shape[1]), dtype=context.dtype)
            rows[:size] = weight.a
            columns = torch.zeros((context.max_rank, weight.b.shape[0]), dtype=context.dtype)
            columns[:size] = weight.b.t()
            first = weight.output * self._rank_a
            begin = 0 if self._is_row_parallel else rank * self._rank_a
            a[0, first : first + self._rank_a] = rows[begin : begin + self._rank_a]
            begin = rank * self._rank_b if self._is_row_parallel else 0
            bs[weight.output][0] = columns[begin : begin + self._rank_b]
        for output, b in enumerate(bs):
            if not bool(b.isfinite().all()):
                b.zero_()
                first = output * self._rank_a
                a[0, first : first + self._rank_a] = torch.nan
        return [a, *bs]

    def set(self, slot: int, staged: list[Tensor]) -> None:
        index = torch.tensor([slot], dtype=self._context.index_dtype).to(self._context.device)
        stacks = (self.a, *self.b)
        sources = staged or [
            torch.zeros((1, *stack.shape[1:]), dtype=stack.dtype) for stack in stacks
        ]
        for stack, source in zip(stacks, sources, strict=True):
            self._copy_slot(stack, index, source.to(stack.device))
