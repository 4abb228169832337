"""Formats of the KV cache other than the data type of the model: how the keys or values of a token
are stored, written and read. A back end chooses one (Backend.kv_cache_format)."""

from typing import Protocol

import torch
from torch import Tensor

from config.model.kv_cache_dtype import (
    BFLOAT16,
    FLOAT16,
    FP8,
    FP8_INC,
    INT8,
    INT8_SCALE_BYTES,
)

FP8_MAX = 448.0
"""Largest value of e4m3 in checkpoints and on a CPU."""
INT8_MAX = 127.0
MIN_AMAX = 1e-30
"""Numbers below it are stored as zeros: the inverse of their scale may be infinite."""


class Codec(Protocol):
    """Stores the keys, or the values, of one layer. Static shapes on the device of the tensors: it
    may be captured."""

    def encode(self, x: Tensor) -> Tensor:
        """Rows (..., row_size) of the cache for `x` (..., head_dim)."""
        ...

    def decode(self, rows: Tensor) -> Tensor:
        """(..., head_dim) in the data type of the model."""
        ...


class KVCacheFormat(Protocol):
    """How all layers of a model store keys and values."""

    name: str
    """As --kv-cache-dtype names it."""
    dtype: torch.dtype
    """Of the caches."""
    has_layer_scales: bool
    """Whether each layer has a scale of its keys and one of its values: those of the checkpoint, or
    1, or calculated ones."""
    unit: float
    """What a stored 1 stands for with a scale of 1."""

    def row_size(self, head_dim: int) -> int:
        """Entries of a cache for a head of a token."""
        ...

    def codec(self, dtype: torch.dtype, scale: Tensor | None) -> Codec:
        """For a model of `dtype`; `scale` (1) float32 of the layer's keys or values, if layers have
        scales."""
        ...

    def clean(self, rows: Tensor) -> Tensor:
        """`rows` of a cache with zeros for what is not finite."""
        ...


class EncodedKVCache:
    """KVCacheOps of a cache in a format."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __call__(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        return cache.index_copy_(0, slot_mapping, self._codec.encode(input))

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        return self._codec.decode(cache if blocks is None else cache.index_select(0, blocks))

    def rounded(self, x: Tensor) -> Tensor:
        """`x` (..., head_dim) as it would be read from the cache: attention of a prompt over its
        own tokens then gives what it gives over the same tokens in the cache."""
        return self._codec.decode(self._codec.encode(x))


class CastFormat:
    """KVCacheFormat of another float type."""

    has_layer_scales = False
    unit = 1.0

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def row_size(self, head_dim: int) -> int:
        return head_dim

    def codec(self, dtype: torch.dtype, scale: Tensor | None) -> Codec:
        return _Cast(self.dtype, dtype)

    def clean(self, rows: Tensor) -> Tensor:
        return zero_non_finite(rows)


class _Cast:
    def __init__(self, stored: torch.dtype, dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype
        self._largest = torch.finfo(stored).max

    def encode(self, x: Tensor) -> Tensor:
        if torch.finfo(x.dtype).max > self._largest:
            # Not to infinity, which would make the softmax of the whole sequence NaN.
            x = x.clamp(-self._largest, self._largest)
        return x.to(self._stored)

    def decode(self, rows: Tensor) -> Tensor:
        return rows.to(self._dtype)


class Int8Format:
    """KVCacheFormat of 8-bit integers with a float32 scale for each head of each token, the largest
    magnitude / 127, computed when they are written. Its bytes are behind those of the integers."""

    name = INT8
    dtype = torch.int8
    has_layer_scales = False
    unit = 1.0

    def row_size(self, head_dim: int) -> int:
        return head_dim + INT8_SCALE_BYTES

    def codec(self, dtype: torch.dtype, scale: Tensor | None) -> Codec:
        return _Int8(dtype)

    def clean(self, rows: Tensor) -> Tensor:
        return rows.masked_fill(~_scales(rows).isfinite(), 0)


class _Int8:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x: Tensor) -> Tensor:
        wide = x.float()
        # NaN where one number is.
        amax = wide.abs().amax(-1, keepdim=True)
        inverse = torch.where(amax > MIN_AMAX, INT8_MAX / amax, 0.0)
        numbers = torch.nan_to_num(wide * inverse).round_().to(torch.int8)
        return torch.cat((numbers, (amax / INT8_MAX).view(torch.int8)), dim=-1)

    def decode(self, rows: Tensor) -> Tensor:
        numbers = rows[..., :-INT8_SCALE_BYTES].float()
        return (numbers * _scales(rows)).to(self._dtype)


def _scales(rows: Tensor) -> Tensor:
    """(..., 1) float32 of int8 `rows`."""
    return rows[..., -INT8_SCALE_BYTES:].contiguous().view(torch.float32)


class Fp8Format:
    """KVCacheFormat of e4m3 with the range of checkpoints, in uint8: torch writes no FP8 by index
    on a CPU. Larger numbers are stored as the largest."""

    dtype = torch.uint8
    has_layer_scales = True
    unit = 1.0

    def __init__(self, name: str = FP8) -> None:
        self.name = name

    def row_size(self, head_dim: int) -> int:
        return head_dim

    def codec(self, dtype: torch.dtype, scale: Tensor | None) -> Codec:
        assert scale is not None
        return _Fp8(dtype, scale)

    def clean(self, rows: Tensor) -> Tensor:
        return rows.masked_fill((rows & 0x7F) == 0x7F, 0)


class _Fp8:
    def __init__(self, dtype: torch.dtype, scale: Tensor) -> None:
        self._dtype = dtype
        self._scale = scale.detach()
        self._inverse = self._scale.reciprocal()

    def encode(self, x: Tensor) -> Tensor:
        scaled = (x.float() * self._inverse).clamp(-FP8_MAX, FP8_MAX)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, rows: Tensor) -> Tensor:
        return (rows.view(torch.float8_e4m3fn).float() * self._scale).to(self._dtype)


def fp8_errors(x: Tensor, scales: Tensor) -> Tensor:
    """(n) float32: the sum of the square errors of `x`, any shape on the host, in e4m3 multiples of
    each of `scales` (n)."""
    codecs = [_Fp8(x.dtype, one) for one in scales]
    return torch.stack([(one.decode(one.encode(x)) - x).square().sum() for one in codecs])


class HpuFp8Format:
    """KVCacheFormat of e4m3 on Gaudi, as that of vLLM's plug-in without a calibration. The largest
    number of the cache is that of a checkpoint's scale, whatever the largest of the card is: on a
    Gaudi 2 codes stand for more."""

    dtype = torch.float8_e4m3fn
    has_layer_scales = True

    def __init__(self, name: str, largest: float) -> None:
        """`largest`: of the card's e4m3."""
        self.name = name
        self.unit = FP8_MAX / largest

    def row_size(self, head_dim: int) -> int:
        return head_dim

    def codec(self, dtype: torch.dtype, scale: Tensor | None) -> Codec:
        assert scale is not None
        return _HpuFp8(dtype, scale, self.unit)

    def clean(self, rows: Tensor) -> Tensor:
        return zero_non_finite(rows)


class _HpuFp8:
    """With scales as tensors: numbers would be part of a recipe, and each layer have its own."""

    def __init__(self, dtype: torch.dtype, scale: Tensor, unit: float) -> None:
        self._dtype = dtype
        # On the host: on the device these would be launches.
        own = scale.detach().cpu() * unit
        self._scale = own.to(scale.device)
        self._multiplier = own.reciprocal().to(scale.device)

    def encode(self, x: Tensor) -> Tensor:
        rows, _ = torch.ops.hpu.cast_to_fp8_v2(
            x, self._multiplier, False, False, torch.float8_e4m3fn
        )
        return rows  # type: ignore[no-any-return]

    def decode(self, rows: Tensor) -> Tensor:
        x: Tensor = torch.ops.hpu.cast_from_fp8(rows, self._scale, self._dtype)
        return x


FLOATS = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


def cast_format(kv_cache_dtype: str, dtype: torch.dtype) -> CastFormat | None:
    """That of a float type; None: it is `dtype`, of the model. KeyError for another format."""
    stored = FLOATS[kv_cache_dtype]
    return None if stored == dtype else CastFormat(kv_cache_dtype, stored)


def plain_format(kv_cache_dtype: str, dtype: torch.dtype) -> KVCacheFormat | None:
    """Of plain operations, for a model of `dtype`; None: its own data type."""
    if kv_cache_dtype == INT8:
        return Int8Format()
    if kv_cache_dtype in (FP8, FP8_INC):
        return Fp8Format(kv_cache_dtype)
    return cast_format(kv_cache_dtype, dtype)


def zero_non_finite(rows: Tensor) -> Tensor:
    """`rows` of a cache with zeros for what is not finite."""
    # In FP8 little more than casts is defined.
    wide = rows.to(torch.bfloat16) if rows.dtype == torch.float8_e4m3fn else rows
    return torch.nan_to_num(wide, 0.0, 0.0, 0.0).to(rows.dtype)
