"""The CPU's compiled kernels, skipped on machines that cannot compile them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpu.host import cpu_flags
from hpu.native import library as module
from hpu.native.library import COMPILERS, NEEDED, Library, open_library


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the kernels in `built`. Servers that tests start share it, because a compilation
    takes longer than most test files."""
    if os.environ.get("KERNEL_FLAGS"):
        return tmp_path_factory.mktemp("kernels")
    return module.kernel_folder(None)


@pytest.fixture(scope="session")
def built(kernel_folder: Path) -> Iterator[Library]:
    """Compiled kernels; KERNEL_FLAGS adds compiler flags."""
    if not cpu_flags() >= NEEDED or not any(map(shutil.which, COMPILERS)):
        pytest.skip("no compiler, or a CPU without AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FLAGS", (*module.FLAGS, *os.environ.get("KERNEL_FLAGS", "").split()))
        library = open_library(kernel_folder, 2)
        assert library is not None
        yield library


@pytest.fixture
def lone(built: Library) -> Iterator[Library]:
    """The kernels on one thread, with torch on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    built.use_threads(1)
    yield built
    built.use_threads(2)
    torch.set_num_threads(before)


def _in_mode(built: Library, mode: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    if mode == "tiles" and not built.has_tiles:
        pytest.skip("this CPU has no AMX")
    if mode == "integers" and not built.has_integers:
        pytest.skip("weights in bfloat16 are not multiplied in integers")
    monkeypatch.setattr(built, "has_integers", mode == "integers")
    built.use_tiles(mode == "tiles")
    rounds = built.round_inputs(mode == "bytes")
    if rounds == (mode == "bytes"):
        yield built
    built.use_tiles(True)
    built.round_inputs(not built.has_tiles)
    if rounds != (mode == "bytes"):
        pytest.skip("this CPU has no AVX512-VNNI")


@pytest.fixture(params=["tiles", "dots", "integers"])
def library(
    built: Library, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Library]:
    """Kernels in each mode of products with bfloat16 weights; the modes with quantized weights use
    bfloat16 inputs."""
    yield from _in_mode(built, request.param, monkeypatch)


@pytest.fixture(params=["tiles", "dots", "integers", "bytes"])
def quantizing(
    built: Library, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Library]:
    """Kernels in each mode of products with quantized weights."""
    yield from _in_mode(built, request.param, monkeypatch)


@pytest.fixture
def rounds_weights(quantizing: Library) -> bool:
    """Whether products of many rows round quantized weights to bfloat16. Without BF16 instructions,
    and with 8-bit inputs, products are computed in integers with unrounded weights."""
    return quantizing.instruction_set == "AVX512-BF16" and not quantizing.rounds_inputs
