"""Small programs that a real card runs differently, and that the emulator once allowed or refused:
files of the compiler, products in float32, fused attention, and functions of the package."""

from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor

BFLOAT16 = torch.bfloat16


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_nothing_compiles_without_the_path_of_the_compilers_kernels(lazy: bool) -> None:
    with (
        emulated(lazy=lazy, reads_kernel_path=True, variables={"GC_KERNEL_PATH": ""}),
        pytest.raises(RuntimeError, match="Graph compile failed.*synFail 26"),
    ):
        _ones().add(1).cpu()
    kernels = {"GC_KERNEL_PATH": "/usr/lib/habanalabs/libtpc_kernels.so"}
    with emulated(lazy=lazy, reads_kernel_path=True, variables=kernels):
        assert _ones().add(1).tolist() == [2.0] * 4
