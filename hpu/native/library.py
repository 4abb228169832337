"""The compiled half of the CPU back end: decode.cpp, built once for this machine and kept on disk.
Knows no models."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from config.loading.env import cache_home
from hpu.backends.host import cpu_flags
from hpu.native.pages import HugePages
from hpu.native.quantized import INT8_ROWS, PANEL, kind_of, panels
from hpu.quantization.quantized import Quantized

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.cpp")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")
NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"))
COMPILE_TIMEOUT_S = 120.0


class Product(ctypes.Structure):
    """A packed weight as decode.cpp sees it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
    )


class PackedLinear:
    """y = x W^T + b in bfloat16, as one call of the library."""

    def __init__(self, library: "Library", weight: Tensor | Quantized, bias: Tensor | None) -> None:
        """`weight` (out, in), of which `packer` takes the shape; it may be dropped afterwards."""
        self._library = library
        kind, scales = 0, None
        if isinstance(weight, Quantized):
            kind, found = panels(weight)
            packed = library.pages.take(found.shape, found.dtype).copy_(found)
            shape = weight.values.shape
            scales = weight.scales.flatten() if kind == INT8_ROWS else None
        else:
            packed, shape = library.pack(weight), weight.shape
        self._kept = (packed, bias, scales)
        given = (packed.data_ptr(), _start(bias), *shape, kind, _start(scales))
        self.product = Product(*given)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        given = hidden.contiguous()
        out = hidden.new_empty((*hidden.shape[:-1], self.product.outputs))
        self._library.multiply(self.product, given, given.numel() // self.product.inputs, out)
        return out

    def exact(self, hidden: Tensor) -> Tensor:
        """(M, in) to (M, out) in float32: sums that are not rounded to bfloat16."""
        out = hidden.new_empty((len(hidden), self.product.outputs), dtype=torch.float32)
        self._library.exact(self.product, hidden.contiguous(), len(hidden), out)
        return out

    def best(self, hidden: Tensor) -> Tensor:
        """(M, in) to (M,) of int64, as Library.best_of."""
        places = hidden.new_empty(len(hidden), dtype=torch.int64)
        self._library.best_of(self.product, hidden.contiguous(), len(hidden), places)
        return places


class Library:
    """decode.cpp, loaded. Calls run on `num_threads` threads of torch's own pool."""

    def __init__(self, path: Path, num_threads: int) -> None:
        """Raises OSError when `path` cannot be loaded."""
        self._code = ctypes.CDLL(str(path))
        self._code.use_tiles.restype = ctypes.c_int64
        self._threads = ctypes.c_int64(num_threads)
        self.has_tiles = self.use_tiles(True)
        """Whether the machine multiplies in tiles (AMX)."""
        self.pages = HugePages()
        """Where weights lie."""

    def use_tiles(self, wanted: bool) -> bool:
        """Whether products run in tiles from now on, in this process: where the machine has them,
        if they are wanted."""
        return bool(self._code.use_tiles(ctypes.c_int64(wanted)))

    def use_threads(self, num_threads: int) -> None:
        """Let the calls from now on run on so many."""
        self._threads = ctypes.c_int64(num_threads)

    def pack(self, weight: Tensor) -> Tensor:
        """A copy of `weight` (out, in) in panels."""
        packed = self.pages.take(weight.shape, weight.dtype)
        given = weight.contiguous()
        rows, columns = map(ctypes.c_int64, weight.shape)
        self._code.pack(_at(given), rows, columns, _at(packed), self._threads)
        return packed

    def multiply(self, by: Product, hidden: Tensor, rows: int, out: Tensor) -> None:
        """`hidden` (rows, in) times `by` into `out` (rows, out), both contiguous."""
        count = ctypes.c_int64(rows)
        self._code.multiply_all(ctypes.byref(by), _at(hidden), count, _at(out), self._threads)

    def exact(self, by: Product, hidden: Tensor, rows: int, out: Tensor) -> None:
        """As `multiply`, into `out` of float32."""
        count = ctypes.c_int64(rows)
        self._code.exact_all(ctypes.byref(by), _at(hidden), count, _at(out), self._threads)

    def best_of(self, by: Product, hidden: Tensor, rows: int, places: Tensor) -> None:
        """The place of the greatest of each row of what `exact` gives, into `places` (rows,) of
        int64: the first of several, -1 where that is no finite number."""
        count = ctypes.c_int64(rows)
        self._code.best_of_all(ctypes.byref(by), _at(hidden), count, _at(places), self._threads)

    # The structures of what follows are those of hpu/native/decoder.py.

    def decode(self, model: ctypes.Structure, step: ctypes.Structure) -> None:
        """One token a row through the whole model."""
        self._code.decode(ctypes.byref(model), ctypes.byref(step), self._threads)

    def prompt(
        self, model: ctypes.Structure, step: ctypes.Structure, prompts: ctypes.Structure
    ) -> None:
        """The tokens of prompts through the whole model."""
        given = (ctypes.byref(model), ctypes.byref(step), ctypes.byref(prompts))
        self._code.prompt(*given, self._threads)


class Shaped(Protocol):
    """A linear layer, as far as its shape goes."""

    out_size: int
    in_size: int
    quantized: Quantized | None


def packer(
    library: Library | None, linear: Shaped
) -> Callable[[Tensor | Quantized, Tensor | None], PackedLinear] | None:
    """What packs the layer's weight for `library`; None if it cannot."""
    if library is None or linear.out_size % PANEL or linear.in_size % 2:
        return None
    if linear.quantized is not None and kind_of(linear.quantized) is None:
        return None
    return partial(PackedLinear, library)


def _start(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def kernel_folder(cache_dir: str | None) -> Path:
    """Where the compiled file is kept."""
    return Path(cache_dir or cache_home()) / "kernels"


def open_library(folder: Path, num_threads: int) -> Library | None:
    """The library for this machine, from `folder` or compiled into it; None, with a line in the
    log, where it cannot be had: then torch's own operators do all."""
    flags = cpu_flags()
    missing = sorted(NEEDED - flags)
    if platform.system() != "Linux" or missing:
        why = f"the CPU has no {', '.join(missing)}" if missing else "this is not Linux"
        logger.info("Kernels: torch's own, since %s", why)
        return None
    try:
        path = _build(folder, flags)
        if path is None:
            return None
        library = Library(path, num_threads)
    except OSError as error:
        logger.warning("Kernels: torch's own, since ours cannot be loaded: %s", error)
        return None
    logger.info("Kernels: compiled for this CPU%s", " (AMX)" if library.has_tiles else "")
    return library


def _build(folder: Path, flags: frozenset[str]) -> Path | None:
    """The compiled file. Two processes may both build it: the last one's is kept."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    runtime = _openmp()
    source = b"".join(file.read_bytes() for file in SOURCES)
    identity = (source, sorted(flags), FLAGS, str(runtime), torch.__version__)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    path = folder / f"decode-{key}.so"
    if path.is_file():
        return path
    if compiler is None:
        logger.info("Kernels: torch's own, since there is no C++ compiler (g++ would do)")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{path.name}.{os.getpid()}"
    start = time.perf_counter()
    command = [compiler, *FLAGS, "-shared", str(SOURCE), "-o", str(unfinished), *runtime]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        logger.warning(
            "Kernels: torch's own, since %s failed: %s", compiler, said.strip()[:300] or error
        )
        unfinished.unlink(missing_ok=True)
        return None
    unfinished.replace(path)
    logger.info("Kernels: compiled in %.1f s", time.perf_counter() - start)
    return path


def _openmp() -> list[str]:
    """Torch's own OpenMP runtime, so that both share one pool of threads; empty if it has none
    beside it: then the system's is the one that torch uses too."""
    return [str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]]


if __name__ == "__main__":
    open_library(kernel_folder(None), 1)
