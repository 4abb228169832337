"""NativeDecoder: a plain decoder's step as one call of the compiled library. Knows no files; what
it computes is what hpu/models/decoder.py does, which is its reference."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.layers.context import DecodeContext, PrefillContext
from hpu.native.library import Library, PackedLinear, Product

MOST_HEAD = 256
MOST_GROUP = 16


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "head_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("window", ctypes.c_int64),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "inner", "heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "head_dim", "rotated", "block_size")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "multiplier")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "blocks")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "block_list", "groups")),
        *((name, ctypes.c_void_p) for name in ("starts", "usage", "rotation", "total", "hidden")),
    )


class _Prompts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "length", "context")),
        *((name, ctypes.c_void_p) for name in ("query_lens", "context_lens")),
    )


class LayerWeights(NamedTuple):
    """One layer's weights and caches, in bfloat16."""

    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norm: Tensor | None
    """(heads + kv_heads, head_dim)"""
    keys: Tensor
    values: Tensor
    window: int
    """Tokens that a query sees, itself included; 0: all."""


class Sizes(NamedTuple):
    """What all layers share."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    eps: float
    scale: float
    multiplier: float

    @property
    def fit(self) -> bool:
        """Whether the library takes them."""
        group = self.heads // self.kv_heads
        return (
            self.hidden % 16 == self.inner % 16 == 0
            and self.head_dim % 32 == self.rotated % 32 == 0
            and self.head_dim <= MOST_HEAD
            and group <= MOST_GROUP
        )


class NativeDecoder:
    """All layers and the last norm."""

    def __init__(
        self,
        library: Library,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        block_size: int,
    ) -> None:
        assert sizes.fit
        self._library = library
        self._kept = (tuple(layers), norm)
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._model = _Model(
            ctypes.addressof(self._layers), norm.data_ptr(), len(layers), *sizes[:6], block_size
        )
        self._model.eps, self._model.scale, self._model.multiplier = sizes[6:]

    def __call__(self, total: Tensor, rotation: Tensor, context: DecodeContext) -> Tensor:
        """(B, 1, hidden) to the same, normed. `total` holds the embedded tokens and is overwritten;
        `rotation` (B, 2 * rotated) is cos, then sin with its first half negated."""
        hidden = torch.empty_like(total)
        columns = [
            *(context.positions, context.slots, context.block_list, context.block_groups),
            *(context.block_starts, context.block_usage),
        ]
        assert all(column.dtype == torch.int64 for column in columns)
        given = [*(column.contiguous() for column in columns), rotation, total, hidden]
        step = _Step(
            total.shape[0], context.block_list.shape[0], *(tensor.data_ptr() for tensor in given)
        )
        self._library.decode(self._model, step)
        return hidden

    def prompt(self, total: Tensor, rotation: Tensor, context: PrefillContext) -> Tensor:
        """(B, Q, hidden) to the same, normed: the new tokens of prompts, over what is cached of
        them. The rest is as for a decode, with B * Q rows."""
        hidden = torch.empty_like(total)
        batch, length, _ = total.shape
        blocks = context.block_list.shape[0] // batch
        columns = [context.slots, context.block_list, context.query_lens, context.context_lens]
        assert all(column.dtype == torch.int64 for column in columns)
        slots, block_list, query_lens, context_lens = (column.contiguous() for column in columns)
        step = _Step(rows=batch * length, slots=slots.data_ptr(), block_list=block_list.data_ptr())
        step.rotation, step.total = rotation.data_ptr(), total.data_ptr()
        step.hidden = hidden.data_ptr()
        lengths = (query_lens.data_ptr(), context_lens.data_ptr())
        self._library.prompt(self._model, step, _Prompts(batch, length, blocks, *lengths))
        return hidden


def _layer(weights: LayerWeights) -> _Layer:
    head_norm = weights.head_norm
    return _Layer(
        *(linear.product for linear in weights[:4]),
        *(weights.attention_norm.data_ptr(), weights.mlp_norm.data_ptr()),
        None if head_norm is None else head_norm.data_ptr(),
        *(weights.keys.data_ptr(), weights.values.data_ptr(), weights.window),
    )
