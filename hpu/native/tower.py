"""NativeTowerKernels: operators of vision towers in the C++ library."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.native.library import Library, PackedLinear, has_kernel, multiplies_in_tiles
from hpu.native.panels import PANEL, TILE_INPUTS
from hpu.ops.cpu import can_pack
from hpu.ops.cpu_tower import TowerKernels

MOST_HEAD = 256
"""Maximum head dimension, as in hpu/native/model.h."""


class _Patches(ctypes.Structure):
    """Inputs of attention over patches: `Patches` in hpu/native/patches.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "ends")),
        *((name, ctypes.c_int64) for name in ("parts", "heads", "size")),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
    )


class NativeTowerKernels(TowerKernels):
    """Kernels of the library; torch's operators where the library has no kernel or is not
    faster."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def pack(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        if self._is_faster(weight):
            return PackedLinear(self._library, weight, bias)
        return super().pack(weight, bias)

    def gated_mlp(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear
    ) -> Callable[[Tensor], Tensor] | None:
        # Pad the inner size to whole tiles: inner features of zero do not change the result.
        missing = -gate.out_features % TILE_INPUTS
        both = (gate, up)
        gate_up = torch.cat(
            [functional.pad(linear.weight.detach(), (0, 0, 0, missing)) for linear in both]
        )
        narrowed = functional.pad(down.weight.detach(), (0, missing))
        if not self._is_faster(gate_up) or not self._is_faster(narrowed):
            return None
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = torch.cat(
                [functional.pad(linear.bias.detach(), (0, missing)) for linear in (gate, up)]
            )
        first = PackedLinear(self._library, gate_up, bias)
        second = PackedLinear(self._library, narrowed, down.bias)
        return lambda hidden: second(first.gate(hidden))

    def rms_norm(self, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        if len(weight) % PANEL:
            return super().rms_norm(weight, eps)
        return lambda hidden: self._library.rms_norm(hidden.contiguous(), weight, eps)

    def attend(
        self, qkv: Tensor, cosines: Tensor, sines: Tensor, ends: Tensor, scale: float
    ) -> Tensor:
        length, _, heads, size = qkv.shape
        if size > MOST_HEAD:
            return super().attend(qkv, cosines, sines, ends, scale)
        out = qkv.new_empty(length, heads, size)
        ends = ends.long()
        read = (qkv.contiguous(), cosines, sines, ends)
        pointers = (tensor.data_ptr() for tensor in read)
        shape = (len(ends) - 1, heads, size)
        self._library.attend_patches(_Patches(*pointers, *shape, scale, out.data_ptr()))
        return out

    def _is_faster(self, weight: Tensor) -> bool:
        if multiplies_in_tiles(self._library, weight):
            return True
        return not can_pack(weight.dtype, weight.device) and has_kernel(weight)
