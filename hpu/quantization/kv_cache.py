"""KV cache formats other than the model's dtype: how the keys or values of a token are stored,
written and read. A backend chooses the format (Backend.kv_cache_format)."""

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
"""Largest e4m3 value in checkpoints and on a CPU."""
INT8_MAX = 127.0
MIN_AMAX = 1e-30
"""Vectors whose maximum magnitude is at most this value are stored as zeros: the inverse of their
scale may be infinite."""
WIDENED = {torch.float8_e4m3fn: torch.bfloat16, torch.float16: torch.float32}
"""Dtype -> wider dtype in which nan_to_num runs: torch defines few operations besides casts for
FP8, and the bridge's list for nan_to_num has no float16."""


class Codec(Protocol):
    """Encoder and decoder of the keys, or the values, of a layer. It uses static shapes on the
    tensors' device, so it can be captured."""

    def encode(self, x: Tensor) -> Tensor:
        """Cache rows (..., row_size) for `x` (..., head_dim)."""
        ...

    def decode(self, rows: Tensor) -> Tensor:
        """(..., head_dim) in the model's dtype."""
        ...


class KVCacheFormat(Protocol):
    """Storage format of keys and values for all layers of a model."""

    name: str
    """Name in --kv-cache-dtype."""
    dtype: torch.dtype
    """Dtype of the cache tensors."""
    has_layer_scales: bool
    """Whether each layer has a scale for its keys and a scale for its values: from the checkpoint,
    calculated, or 1."""
    unit: float
    """Value that a stored 1 represents at a scale of 1."""

    def row_size(self, head_dim: int) -> int:
        """Cache entries per head of a token."""
        ...

    def codec(self, dtype: torch.dtype, scale: Tensor | None) -> Codec:
        """Codec for a model of `dtype`. `scale` (1) float32: scale of the layer's keys or values;
        None if layers have no scales."""
        ...

    def clean(self, rows: Tensor) -> Tensor:
        """`rows` of a cache with non-finite values replaced by zeros."""
        ...


class EncodedKVCache:
    """KVCacheOps of a cache in a KVCacheFormat."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __call__(self, input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        return cache.index_copy_(0, slot_mapping, self._codec.encode(input))

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor | None) -> Tensor:
        return self._codec.decode(cache if blocks is None else cache.index_select(0, blocks))

    def rounded(self, x: Tensor) -> Tensor:
        """`x` (..., head_dim) rounded as if it was written to the cache and read back: attention of
        a prompt over its own tokens then has the same keys and values as in the cache."""
        return self._codec.decode(self._codec.encode(x))


class CastFormat:
    """KVCacheFormat of a float dtype other than the model's."""

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
            # Clamped: an infinite key or value could make the output of the whole sequence NaN.
            x = x.clamp(-self._largest, self._largest)
        return x.to(self._stored)

    def decode(self, rows: Tensor) -> Tensor:
        return rows.to(self._dtype)


class Int8Format:
    """KVCacheFormat of 8-bit integers with a float32 scale for each head of each token: the largest
    magnitude / 127, computed at the write. The bytes of the scale follow the integers."""

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
        # NaN if any element is NaN.
        amax = wide.abs().amax(-1, keepdim=True)
        inverse = torch.where(amax > MIN_AMAX, INT8_MAX / amax, 0.0)
        numbers = torch.nan_to_num(wide * inverse).round_().to(torch.int8)
        return torch.cat((numbers, (amax / INT8_MAX).view(torch.int8)), dim=-1)

    def decode(self, rows: Tensor) -> Tensor:
        numbers = rows[..., :-INT8_SCALE_BYTES].float()
        return (numbers * _scales(rows)).to(self._dtype)


def _scales(rows: Tensor) -> Tensor:
    """Scales (..., 1) float32 of int8 `rows`."""
    return rows[..., -INT8_SCALE_BYTES:].contiguous().view(torch.float32)


class Fp8Format:
    """KVCacheFormat of e4m3 with the range of checkpoints. Stored as uint8, because torch cannot
    write FP8 by index on a CPU. Values beyond the range are clamped."""

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
    """(n) float32: for each of `scales` (n), the sum of squared errors of `x` (any shape, on the
    host) when it is rounded to e4m3 with that scale."""
    codecs = [_Fp8(x.dtype, scale) for scale in scales]
    return torch.stack([(codec.decode(codec.encode(x)) - x).square().sum() for codec in codecs])


class HpuFp8Format:
    """KVCacheFormat of e4m3 on Gaudi, with the casts of vLLM's plug-in. Scales of checkpoints keep
    their meaning on every card: the largest cached value is FP8_MAX times the scale, so on a
    Gaudi 2, whose e4m3 ends earlier, a stored 1 represents more."""

    dtype = torch.float8_e4m3fn
    has_layer_scales = True

    def __init__(self, name: str, largest: float) -> None:
        """`largest`: largest e4m3 value of the card."""
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
    """Codec with scales as tensors: Python numbers would be constants, and each layer would need
    its own recipe. The card's casts support float32 and bfloat16, but not float16, which is cast
    through float32 (fp8_ops.cpp of HabanaAI/gaudi-pytorch-bridge)."""

    def __init__(self, dtype: torch.dtype, scale: Tensor, unit: float) -> None:
        self._dtype = dtype
        self._wide = torch.float32 if dtype == torch.float16 else dtype
        # Computed on the host: on the device these operations would be launches.
        own = scale.detach().cpu() * unit
        self._scale = own.to(scale.device)
        self._multiplier = own.reciprocal().to(scale.device)

    def encode(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.float16 else x
        rows, _ = torch.ops.hpu.cast_to_fp8_v2(
            wide, self._multiplier, False, False, torch.float8_e4m3fn
        )
        return rows  # type: ignore[no-any-return]

    def decode(self, rows: Tensor) -> Tensor:
        x: Tensor = torch.ops.hpu.cast_from_fp8(rows, self._scale, self._wide)
        return x.to(self._dtype)


FLOATS = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


def cast_format(kv_cache_dtype: str, dtype: torch.dtype) -> CastFormat | None:
    """Format of a float dtype; None if it is the model's `dtype`. Raises KeyError for another
    format."""
    stored = FLOATS[kv_cache_dtype]
    return None if stored == dtype else CastFormat(kv_cache_dtype, stored)


def plain_format(kv_cache_dtype: str, dtype: torch.dtype) -> KVCacheFormat | None:
    """Format that uses plain torch operations, for a model of `dtype`; None: the model's dtype.
    Raises KeyError for an unknown name."""
    if kv_cache_dtype == INT8:
        return Int8Format()
    if kv_cache_dtype in (FP8, FP8_INC):
        return Fp8Format(kv_cache_dtype)
    return cast_format(kv_cache_dtype, dtype)


def zero_non_finite(rows: Tensor) -> Tensor:
    """`rows`, of a cache or of a launch, with non-finite values replaced by zeros."""
    wide = rows.to(WIDENED.get(rows.dtype, rows.dtype))
    return torch.nan_to_num(wide, 0.0, 0.0, 0.0).to(rows.dtype)
