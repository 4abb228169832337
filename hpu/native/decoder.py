"""NativeDecoder: a plain decoder's step as one call of the compiled library. Knows no files; what
it computes is what hpu/models/decoder.py does, which is its reference."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.layers.metadata import DecodeAttentionInputs, PrefillAttentionInputs
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
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "embedding", "rotation")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "inner", "heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "head_dim", "rotated", "block_size")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "multiplier")),
        ("embedding_multiplier", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "blocks")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "slots", "block_list")),
        *((name, ctypes.c_void_p) for name in ("groups", "starts", "usage", "hidden", "total")),
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


class EndWeights(NamedTuple):
    """What lies around the layers, in bfloat16."""

    norm: Tensor
    embedding: Tensor
    """(tokens, hidden)"""
    rotation: Tensor
    """(positions, 2 * rotated): cos, then sin with its first half negated."""


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
    embedding_multiplier: float

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
    """From tokens to the last norm."""

    def __init__(
        self,
        library: Library,
        sizes: Sizes,
        layers: Sequence[LayerWeights],
        ends: EndWeights,
        block_size: int,
    ) -> None:
        assert sizes.fit
        self._library = library
        self._hidden = sizes.hidden
        self._kept = (tuple(layers), ends)
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._model = _Model(
            ctypes.addressof(self._layers),
            *(tensor.data_ptr() for tensor in ends),
            len(layers),
            *sizes[:6],
            block_size,
            *sizes[6:],
        )

    def __call__(self, tokens: Tensor, context: DecodeAttentionInputs) -> Tensor:
        """(B, 1) to (B, 1, hidden), normed."""
        hidden = self._room(tokens)
        given = map(_address, (tokens, *context))
        step = _Step(len(tokens), len(context.block_list), *given, hidden.data_ptr())
        self._library.decode(self._model, step)
        return hidden

    def prompt(self, tokens: Tensor, context: PrefillAttentionInputs) -> Tensor:
        """(B, Q) to (B, Q, hidden), normed: the new tokens of prompts, over what is cached of
        them."""
        hidden = self._room(tokens)
        batch, length = tokens.shape
        columns = (tokens, context.positions, context.slot_mapping, context.block_list)
        step = _Step(batch * length, 0, *map(_address, columns), hidden=hidden.data_ptr())
        lengths = map(_address, (context.query_lens, context.context_lens))
        prompts = _Prompts(batch, length, len(context.block_list) // batch, *lengths)
        self._library.prompt(self._model, step, prompts)
        return hidden

    def _room(self, tokens: Tensor) -> Tensor:
        return torch.empty((*tokens.shape, self._hidden), dtype=torch.bfloat16)


def _address(column: Tensor) -> int:
    assert column.dtype == torch.int64 and column.is_contiguous()
    return column.data_ptr()


def _layer(weights: LayerWeights) -> _Layer:
    head_norm = weights.head_norm
    return _Layer(
        *(linear.product for linear in weights[:4]),
        *(weights.attention_norm.data_ptr(), weights.mlp_norm.data_ptr()),
        None if head_norm is None else head_norm.data_ptr(),
        *(weights.keys.data_ptr(), weights.values.data_ptr(), weights.window),
    )
