"""The CPU back end's C++ kernels: decode.cpp, compiled once for this machine and cached on disk."""

import contextlib
import ctypes
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import torch
from torch import Tensor

from config import log
from config.cache_folder import HINT, foreign_writer, read_cached
from config.child_command import running
from config.errors import ConfigError
from config.loading.env import cache_home, environment
from config.model.decoder_spec import ClampedSwiGLU
from config.owned_directory import OwnedDirectory
from config.progress import OnStep, unreported_step
from config.whole_files import write_whole
from hpu.host import cpu_flags
from hpu.native.pages import HugePages
from hpu.native.panels import INT8_ROWS, INT16_ROWS, PANEL, TILE_INPUTS, kind_of, to_panels
from hpu.quantization.quantized_weight import GROUP_SIZE, Mxfp4Weight, QuantizedWeight

# Not __name__, which is __main__ in `python -m`.
logger = logging.getLogger("hpu.native.library")

SOURCE = Path(__file__).with_name("decode.cpp")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC")
NEEDED = frozenset(("avx2", "fma", "f16c"))
"""CPU flags that the kernels need. -march=native adds AVX-512, its BF16 and AMX if available."""
DIGEST_BYTES = 32
MAX_LIBRARY_BYTES = 64 << 20
"""Larger files are rejected: the library of this module has about 1 MiB."""
COMPILE_TIMEOUT_S = 1800.0
"""Timeout of a compilation, which takes 1 to 3 minutes on two cores, and longer on busy cores."""
COUNT_S = 1.0
"""Interval between progress reports of a compilation."""
AFTER_COMPILATION = "preparing the device"
"""Progress text that follows the compilation."""
MOST_LOST = 2.0**-11
"""Maximum relative change of a weight (root of the sum of squares) by 16-bit integers: less than
half of the change by rounding from float32 to bfloat16."""


class Product(ctypes.Structure):
    """A packed weight: `Product` in hpu/native/products.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("width", ctypes.c_int64),
    )


class PackedLinear:
    """Linear layer y = x W^T + b in bfloat16, computed in a single call of the library."""

    def __init__(
        self, library: "Library", weight: Tensor | QuantizedWeight, bias: Tensor | None
    ) -> None:
        """Pack a copy of `weight` (out, in), which `has_kernel` must accept."""
        self._library = library
        kind, group, scales, order = 0, 0, None, None
        shape: tuple[int, ...] = tuple(weight.shape)
        width = shape[1]
        if isinstance(weight, QuantizedWeight):
            kind, panels = to_panels(weight)
            packed = library.pages.allocate(panels.shape, panels.dtype).copy_(panels)
            scales = weight.scales.flatten() if kind == INT8_ROWS else None
            group, order, width = weight.group_size, weight.order, weight.num_inputs
        else:
            packed, scales = library.pack(weight)
            kind = 0 if scales is None else INT16_ROWS
        # Keep the tensors alive: `product` holds only their addresses.
        self._tensors = (packed, bias, scales, order)
        self.product = Product(
            packed.data_ptr(),
            _address_or_null(bias),
            *shape,
            kind,
            _address_or_null(scales),
            group,
            _address_or_null(order),
            width,
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.product.outputs))
        self._library.multiply(self.product, x, x.numel() // self.product.width, out)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """Gated matmul, (..., in) to (..., out / 2): silu(first half of the outputs) * second
        half."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.product.outputs // 2))
        self._library.gate(self.product, x, x.numel() // self.product.width, out)
        return out

    def multiply_float32(self, x: Tensor) -> Tensor:
        """Multiply (M, in) to (M, out) in float32: the sums before rounding to bfloat16."""
        out = x.new_empty((len(x), self.product.outputs), dtype=torch.float32)
        self._library.multiply_float32(self.product, x.contiguous(), len(x), out)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """Index of the largest output per row, (M, in) to (M,) int64 (see Library.argmax)."""
        indices = x.new_empty(len(x), dtype=torch.int64)
        self._library.argmax(self.product, x.contiguous(), len(x), indices)
        return indices


class _Stacked(ctypes.Structure):
    """Weights of all experts: `Stacked` in hpu/native/experts.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
    )


class ExpertsStructure(ctypes.Structure):
    """The experts of a layer: `Experts` in hpu/native/experts.h."""

    _fields_ = (
        *((name, _Stacked) for name in ("gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "inner")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


Stack = Tensor | tuple[QuantizedWeight | Mxfp4Weight, ...]
"""A weight of every expert: (experts, out, in) bfloat16, or a tuple of equally quantized
weights."""


class Stacks(NamedTuple):
    """Weights of all experts, in the layout of ExpertWeights."""

    w13: Stack
    """(2 * inner, hidden) per expert."""
    w2: Stack
    """(hidden, inner) per expert."""
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    first: int | None = None
    """Id of the first expert of this rank under expert parallelism; None: all experts are here."""


class _Choice(ctypes.Structure):
    """Routed tokens: `Choice` in hpu/native/experts.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "top_k")),
        *((name, ctypes.c_void_p) for name in ("ids", "weights", "x")),
    )


class PackedExperts:
    """MoEImpl that computes the routed experts of a layer in a single call of the library."""

    def __init__(self, library: "Library", stacks: Stacks, activation: str | ClampedSwiGLU) -> None:
        """Pack copies of the weights, which `has_experts_kernel` must accept."""
        self._library = library
        self._first_expert = stacks.first
        gate_up, bias, swiglu = stacks.w13, stacks.w13_bias, (0.0, 0.0)
        if isinstance(activation, ClampedSwiGLU):
            swiglu = activation.alpha, activation.limit
            if activation.interleaved:
                gate_up, bias = _gates_first(gate_up), _gates_first(bias)
        packed = (
            _pack_stack(library, gate_up, bias),
            _pack_stack(library, stacks.w2, stacks.w2_bias),
        )
        # Keep the tensors alive: the structure holds only their addresses.
        self._tensors = packed
        hidden, inner = stacks.w2[0].shape
        if isinstance(stacks.w2[0], QuantizedWeight):
            inner = stacks.w2[0].num_inputs
        self.structure = ExpertsStructure(
            *(_stacked(tensor) for tensor in packed), len(stacks.w2), hidden, inner, *swiglu
        )

    def __call__(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool,
        activation: str,
    ) -> Tensor:
        x, ids = hidden_states.contiguous(), expert_routing_table.contiguous()
        if self._first_expert is not None:
            count, ids = self.structure.count, ids - self._first_expert
            ids = ids.masked_fill_((ids < 0) | (ids >= count), count)
        weights = router_weights.float().contiguous()
        out = torch.empty_like(x)
        pointers = (ids.data_ptr(), weights.data_ptr(), x.data_ptr())
        self._library.mix_experts(self.structure, _Choice(*ids.shape, *pointers), out)
        return out


class Library:
    """The compiled decode.cpp. Calls run on `num_threads` threads of torch's own pool."""

    def __init__(self, path: Path, num_threads: int) -> None:
        """Raises OSError when `path` cannot be loaded."""
        self._code = ctypes.CDLL(str(path))
        self._code.use_tiles.restype = ctypes.c_int64
        self._code.round_inputs.restype = ctypes.c_int64
        self._code.instruction_set.restype = ctypes.c_char_p
        self._threads = ctypes.c_int64(num_threads)
        self.has_tiles = self.use_tiles(True)
        """Whether the machine has AMX tiles."""
        self.instruction_set: str = self._code.instruction_set().decode()
        """Instruction set of the compiled code, without AMX: AVX512-BF16, AVX-512 or AVX2."""
        self.has_integers = self.instruction_set == "AVX2"
        """Whether matmuls with bfloat16 weights are faster with 16-bit integers."""
        self.rounds_inputs = False
        """Whether matmuls with quantized weights round their inputs to 8 bits."""
        self.pages = HugePages()
        """Allocator of the packed weights."""

    def use_tiles(self, enabled: bool) -> bool:
        """Enable or disable AMX tiles for the matmuls of this process. Returns whether tiles are
        used: False on a machine without tiles."""
        return bool(self._code.use_tiles(ctypes.c_int64(enabled)))

    def round_inputs(self, wanted: bool) -> bool:
        """Enable or disable rounding of inputs to 8 bits, in blocks of 32, for the matmuls of this
        process with quantized weights. Returns whether inputs are rounded: never on a machine
        without AVX512-VNNI and VBMI."""
        self.rounds_inputs = bool(self._code.round_inputs(ctypes.c_int64(wanted)))
        return self.rounds_inputs

    def use_threads(self, num_threads: int) -> None:
        """Run later calls on `num_threads` threads."""
        self._threads = ctypes.c_int64(num_threads)

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pack a copy of `weight` (out, in) bfloat16 in panels: (values, None) as bfloat16, or
        (values, scales (out,) float32) of kind INT16_ROWS if 16-bit integers are faster and change
        the weight by at most MOST_LOST."""
        packed = self.pages.allocate(weight.shape, weight.dtype)
        weight = weight.contiguous()
        arguments = (_address(weight), *map(ctypes.c_int64, weight.shape), _address(packed))
        if self.has_integers and weight.shape[1] % GROUP_SIZE == 0:
            scales, squares = (
                weight.new_empty(len(weight), dtype=torch.float32),
                (ctypes.c_double * 2)(),
            )
            self._code.pack_integers(*arguments, _address(scales), squares, self._threads)
            if squares[1] <= MOST_LOST**2 * squares[0]:
                return packed, scales
        self._code.pack(*arguments, self._threads)
        return packed, None

    def multiply(self, by: Product, x: Tensor, rows: int, out: Tensor) -> None:
        """Multiply `x` (rows, in) by `by` into `out` (rows, out), both contiguous bfloat16."""
        count = ctypes.c_int64(rows)
        self._code.multiply_all(ctypes.byref(by), _address(x), count, _address(out), self._threads)

    def gate(self, by: Product, x: Tensor, rows: int, out: Tensor) -> None:
        """Gated `multiply` into `out` (rows, out / 2): silu(first half) * second half."""
        count = ctypes.c_int64(rows)
        self._code.gate_all(ctypes.byref(by), _address(x), count, _address(out), self._threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of a contiguous `x` (..., size); size is a multiple of
        16."""
        out, size = torch.empty_like(x), x.shape[-1]
        sizes = (ctypes.c_int64(x.numel() // size), ctypes.c_int64(size))
        addresses = (_address(x), _address(weight), _address(out))
        self._code.norm_all(*addresses, *sizes, ctypes.c_float(eps), self._threads)
        return out

    def multiply_float32(self, by: Product, x: Tensor, rows: int, out: Tensor) -> None:
        """`multiply` into a float32 `out`, without rounding to bfloat16."""
        count = ctypes.c_int64(rows)
        self._code.exact_all(ctypes.byref(by), _address(x), count, _address(out), self._threads)

    def argmax(self, by: Product, x: Tensor, rows: int, indices: Tensor) -> None:
        """Write the index of the largest output of `multiply_float32` per row to `indices` (rows,)
        int64. The first of equal outputs wins; -1 if the largest output is not finite."""
        count = ctypes.c_int64(rows)
        self._code.best_of_all(
            ctypes.byref(by), _address(x), count, _address(indices), self._threads
        )

    def mix_experts(self, experts: ctypes.Structure, choice: ctypes.Structure, out: Tensor) -> None:
        """Write the weighted sum of each token's experts to `out` (rows, hidden) bfloat16."""
        pointers = (ctypes.byref(experts), ctypes.byref(choice), _address(out))
        self._code.mix_experts(*pointers, self._threads)

    def attend_patches(self, patches: ctypes.Structure) -> None:
        """Attention of a vision tower; `patches` is a tower._Patches."""
        self._code.attend_patches(ctypes.byref(patches), self._threads)

    # The structures of the methods below are defined in hpu/native/decoder.py.

    def decode(self, model: ctypes.Structure, step: ctypes.Structure) -> None:
        """Run the whole model on the next token of each sequence."""
        self._code.decode(ctypes.byref(model), ctypes.byref(step), self._threads)

    def prompt(
        self, model: ctypes.Structure, step: ctypes.Structure, prompts: ctypes.Structure
    ) -> None:
        """Run the whole model on the new tokens of prompts."""
        arguments = (ctypes.byref(model), ctypes.byref(step), ctypes.byref(prompts))
        self._code.prompt(*arguments, self._threads)


def has_kernel(weight: Tensor | QuantizedWeight) -> bool:
    """Whether the library has a kernel for `weight` (out, in), bfloat16 if it is a tensor."""
    if isinstance(weight, QuantizedWeight):
        return kind_of(weight) is not None
    out_features, in_features = weight.shape
    return out_features % PANEL == 0 and in_features % 2 == 0


def multiplies_in_tiles(library: Library, weight: Tensor) -> bool:
    """Whether matmuls of many rows with `weight` (out, in) bfloat16 run in AMX tiles. Without
    tiles, or with inputs that do not fill whole tiles, torch's matmuls are faster."""
    return library.has_tiles and has_kernel(weight) and weight.shape[1] % TILE_INPUTS == 0


def has_experts_kernel(stacks: Stacks, activation: str | ClampedSwiGLU) -> bool:
    """Whether PackedExperts has a kernel for `stacks` and `activation`."""
    if isinstance(activation, str) and activation not in ("silu", "swish"):
        return False
    # Gate and up outputs alternate; PackedExperts separates them for the kernel.
    is_interleaved = isinstance(activation, ClampedSwiGLU) and activation.interleaved
    return all(_is_packable(stack, is_interleaved) for stack in stacks[:2])


def _is_packable(stack: Stack, is_interleaved: bool) -> bool:
    if isinstance(stack, Tensor):
        _, out, size = stack.shape
        return stack.dtype == torch.bfloat16 and out % PANEL == size % PANEL == 0
    if is_interleaved and not all(isinstance(weight, Mxfp4Weight) for weight in stack):
        return False
    kinds = {kind_of(weight) for weight in stack}
    return len(kinds) == 1 and None not in kinds


S = TypeVar("S", Stack, Tensor | None)


def _gates_first(stack: S) -> S:
    """Reorder the outputs of `stack`: the even outputs first, then the odd outputs."""
    if stack is None:
        return None
    if isinstance(stack, Tensor):
        return torch.cat((stack[:, ::2], stack[:, 1::2]), dim=1)
    out = stack[0].shape[0]
    outputs = torch.cat((torch.arange(0, out, 2), torch.arange(1, out, 2)))
    return tuple(weight.select(outputs) for weight in stack if isinstance(weight, Mxfp4Weight))


class _PackedStack(NamedTuple):
    """Packed weights of all experts; a _Stacked holds their addresses."""

    weight: Tensor
    """(experts, ...)"""
    inputs: int
    bias: Tensor | None
    kind: int = 0
    scales: Tensor | None = None
    group: int = 0
    order: Tensor | None = None


def _pack_stack(library: Library, stack: Stack, bias: Tensor | None) -> _PackedStack:
    if isinstance(stack, Tensor):
        # Each expert has a whole number of panels, so no panel crosses an expert boundary.
        packed, scales = library.pack(stack.flatten(0, 1))
        kind = 0 if scales is None else INT16_ROWS
        return _PackedStack(packed.view(stack.shape), stack.shape[2], bias, kind, scales)
    kind, first = to_panels(stack[0])
    packed = library.pages.allocate((len(stack), *first.shape), first.dtype)
    for target, weight in zip(packed, stack, strict=True):
        target.copy_(to_panels(weight)[1])
    scales = (
        torch.stack([weight.scales.flatten() for weight in stack]) if kind == INT8_ROWS else None
    )
    orders = [weight.order for weight in stack]
    order = None
    if any(order is not None for order in orders):
        same = torch.arange(stack[0].shape[1], dtype=torch.int32)
        order = torch.stack([same if order is None else order for order in orders])
    size = stack[0].shape[1]
    return _PackedStack(packed, size, bias, kind, scales, stack[0].group_size, order)


def _stacked(packed: _PackedStack) -> _Stacked:
    return _Stacked(
        packed.weight.data_ptr(),
        _address_or_null(packed.bias),
        packed.weight[0].nbytes,
        packed.kind,
        _address_or_null(packed.scales),
        packed.group,
        _address_or_null(packed.order),
        packed.inputs,
    )


def _address_or_null(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def kernel_folder(cache_dir: str | None) -> Path:
    """Folder of the compiled kernels."""
    return Path(cache_dir or cache_home()) / "kernels"


def open_library(
    folder: Path,
    num_threads: int,
    *,
    int8_activations: bool = True,
    on_step: OnStep = unreported_step,
) -> Library | None:
    """Load the library for this machine from `folder`, or compile it and save it there if possible.

    Returns None and logs the reason if it cannot be compiled or loaded: the CPU back end then uses
    torch's operators. `int8_activations`: round the inputs of quantized weights to 8 bits on a
    machine with AVX512-VNNI and VBMI but without AMX tiles (with tiles, bfloat16 inputs are
    faster). `on_step` is called every COUNT_S during a compilation.
    """
    flags = cpu_flags()
    missing = sorted(NEEDED - flags)
    if platform.system() != "Linux" or missing:
        why = f"the CPU has no {', '.join(missing)}" if missing else "this is not Linux"
        logger.info("Kernels: torch's, because %s", why)
        return None
    try:
        library = _load(folder, flags, num_threads, on_step)
    except (OSError, ConfigError) as error:
        logger.warning("Kernels: torch's, because gaudiserve's cannot be loaded: %s", error)
        return None
    if library is None:
        return None
    rounds = library.round_inputs(int8_activations and not library.has_tiles)
    logger.info(
        "Kernels: compiled for this CPU (%s%s)",
        library.instruction_set,
        " and AMX" if library.has_tiles else "",
    )
    if rounds:
        # Not at INFO: the model that is served may have no quantized weights.
        logger.debug("Kernels: quantized weights are multiplied by activations in 8 bits")
    return library


def _load(folder: Path, flags: frozenset[str], num_threads: int, on_step: OnStep) -> Library | None:
    """Load the compiled file in `folder`; compile it if the file is missing or truncated, or if
    `folder` is not trusted (see foreign_writer).

    Returns None and logs the reason if it cannot be compiled. If the compiled file cannot be saved,
    or `folder` is not trusted, each start compiles. If two processes compile at the same time, the
    later file replaces the earlier file.
    """
    runtime = openmp_runtime()
    source = b"".join(file.read_bytes() for file in SOURCES)
    # The file names the runtime by its soname, not by its path: another environment with the same
    # torch needs no compilation.
    names = [Path(path).name for path in runtime]
    identity = (source, sorted(flags), FLAGS, names, torch.__version__)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    path = folder / f"decode-{key}.so"
    reason = foreign_writer(folder)
    if reason:
        logger.warning(
            "Kernels: not loaded from %s and not saved there, because it %s; %s",
            folder,
            reason,
            HINT,
        )
    elif _is_whole(path):
        return Library(path, num_threads)
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("Kernels: torch's, because there is no C++ compiler: install g++ or clang++")
        return None
    # Checked before the compilation, which takes minutes.
    is_kept = not reason and _is_writable(folder)
    logger.info(
        "Kernels: compiling with %s, since %s lacks kernels of this version, CPU and torch %s",
        *(compiler, folder, torch.__version__),
    )
    with OwnedDirectory("gaudiserve-kernels-") as made:
        compiled = Path(made, path.name)
        if not _compile(compiler, compiled, runtime, on_step):
            return None
        if not is_kept:
            # The mapping of a loaded file outlives the file.
            return Library(compiled, num_threads)
        content = compiled.read_bytes()
        try:
            write_whole(path, content + _digest(content))
        except OSError as error:
            _warn_not_kept(folder, error)
            return Library(compiled, num_threads)
    return Library(path, num_threads)


def _is_writable(folder: Path) -> bool:
    """Whether files can be written to `folder`, which is created if missing; logs the reason if
    not."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        _warn_not_kept(folder, error)
        return False


def _warn_not_kept(folder: Path, error: OSError) -> None:
    logger.warning(
        "Kernels are compiled at each start, because %s cannot be written (%s); %s",
        *(folder, error.strerror, HINT),
    )


def _compile(compiler: str, path: Path, runtime: list[str], on_step: OnStep) -> bool:
    """Compile the library to `path`. Returns False, with the reason in the log, on failure."""
    start = time.perf_counter()
    command = [compiler, *FLAGS, "-shared", str(SOURCE), "-o", str(path), *runtime]
    with tempfile.TemporaryFile() as output:
        status = _run_compiler(command, str(path.parent), output, on_step)
        seconds = time.perf_counter() - start
        # Before the log line: otherwise the last progress text may be shown after it.
        on_step(AFTER_COMPILATION)
        if status == 0:
            logger.info("Kernels: compiled in %.1f s", seconds)
            return True
        output.seek(0)
        reason = _reason(status, output.read().decode(errors="replace"))
    logger.warning(
        "Kernels: torch's, because %s failed after %.1f s: %s; the next start tries again",
        *(compiler, seconds, reason),
    )
    return False


def _run_compiler(
    command: list[str], folder: str, output: IO[bytes], on_step: OnStep
) -> int | None:
    """Run the compiler with its temporary files in `folder`. Returns the exit status; None if it
    was killed after COMPILE_TIMEOUT_S."""
    start = time.perf_counter()
    # The compiler's temporary files are removed with `folder`, even if the compiler is killed.
    variables = {**environment(), "TMPDIR": folder}
    with running(
        command, stdout=output, stderr=subprocess.STDOUT, environment=variables
    ) as process:
        while (seconds := time.perf_counter() - start) < COMPILE_TIMEOUT_S:
            on_step(
                f"compiling kernels for this CPU, once, usually 1 to 3 minutes: {seconds:.0f} s"
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(COUNT_S, COMPILE_TIMEOUT_S - seconds))
    return None


def _reason(status: int | None, output: str) -> str:
    if status is None:
        return f"it was not done within {COMPILE_TIMEOUT_S:g} s"
    # The lines before the first error only name the file.
    found = re.search(r"^.*\berror\b.*", output, re.MULTILINE)
    first = next(filter(None, map(str.strip, output.splitlines())), "")
    if status < 0:
        return f"it was killed by signal {-status}" + (
            ", probably because memory ran out" if status == -9 else ""
        )
    return (found[0] if found else first)[:300] or f"exit status {status} without output"


def _is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of its content. Loading a truncated file (full disk,
    crash) would kill the process with a signal."""
    try:
        content = read_cached(path, MAX_LIBRARY_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("Kernels: %s is not used and is compiled again: %s", path, error.strerror)
        return False
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def openmp_runtime() -> list[str]:
    """Path of torch's own OpenMP runtime, so that the library shares torch's thread pool. Empty if
    torch ships no runtime and uses the system's."""
    return [str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]]


if __name__ == "__main__":
    log.setup("install")
    open_library(kernel_folder(None), 1)
