"""Faults of an emulated card. Each fault breaks an assumption that the self-test check of the same
name verifies (hpu/selftest/checks), or that the back end verifies at start; the rest of the
emulator is unchanged.

The name of an operator fault may have the suffix `:crash` or `:hang`: its operators then abort the
process, or never return.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

CRASH, HANG = "crash", "hang"

WEDGED_COPIES = "wedged-copies"
"""In lazy mode, a copy to the host on a side stream waits forever for the thread that submits
launches, unless it is an asynchronous copy into pinned memory."""
LARGE_COPIES = "large-copies"
"""In lazy mode, a copy of LARGE_BYTES or more to the host waits forever unless
PT_HPU_ENABLE_D2H_ASYNC_THREAD is 0."""
LARGE_BYTES = 16 << 20
MIXED_EXPERTS = "mixed-experts"
"""mixture_of_experts with biases expects gate and up concatenated instead of interleaved."""
MIXED_CODES = "packed-experts"
"""mixture_of_experts with packed codes swaps the two codes of each byte."""

Value = Any
"""An argument or a result of an operator."""

Run = Callable[[], Value]
Effect = Callable[[Run, tuple[Value, ...]], Value]
"""Returns the result of an operator. Called with the function that runs the operator, and its
arguments."""


class OperatorFault(NamedTuple):
    """Wrong results or errors of some operators."""

    operators: tuple[str, ...]
    effect: Effect
    modes: tuple[str, ...] = ("lazy", "eager", "compiled")
    """Modes in which the operators are wrong."""


class RuntimeFault(NamedTuple):
    """A fault of the runtime; the emulated component looks it up by name."""

    operators: tuple[str, ...] = ()


def _scaled(run: Run, args: tuple[Value, ...]) -> Value:
    result = run()
    if isinstance(result, tuple):
        return (result[0] * -0.5, *result[1:])
    return result * -0.5


def _scaled_float16(run: Run, args: tuple[Value, ...]) -> Value:
    return _scaled(run, args) if str(args[0].dtype) == "torch.float16" else run()


def _scaled_views(run: Run, args: tuple[Value, ...]) -> Value:
    return run() if args[0].is_contiguous() and args[1].is_contiguous() else _scaled(run, args)


def _rounded_out(run: Run, args: tuple[Value, ...]) -> Value:
    result = run()
    return result.copy_(result.bfloat16())


def _few_experts(run: Run, args: tuple[Value, ...]) -> Value:
    if (count := len(args[3])) > 64:
        raise RuntimeError(f"Graph compile failed. mixture_of_experts: {count} experts in a call")
    return run()


def _uint4(*, has_groups: bool) -> Effect:
    """Wrong weights in calls with `g_idx` (`has_groups`), or in calls without it."""

    def effect(run: Run, args: tuple[Value, ...]) -> Value:
        return _scaled(run, args) if has_groups == (len(args) > 4) else run()

    return effect


def _last_row_lost(run: Run, args: tuple[Value, ...]) -> Value:
    result = run()
    return result.index_fill_(args[1], args[2][-1:].long(), 0)


def _not_written(run: Run, args: tuple[Value, ...]) -> Value:
    return args[0]


def _rounded(run: Run, args: tuple[Value, ...]) -> Value:
    result = run()
    return result.bfloat16().to(result.dtype) if result.is_floating_point() else result


def _unchanged(run: Run, args: tuple[Value, ...]) -> Value:
    return args[0].clone()


def _through_float32(run: Run, args: tuple[Value, ...]) -> Value:
    result = run()
    is_wide = result.dtype.itemsize == 8 and not result.is_floating_point()
    return result.float().to(result.dtype) if is_wide else result


def _small_range(run: Run, args: tuple[Value, ...]) -> Value:
    codes, largest = run()
    return codes.float().clamp(-64, 64).to(codes.dtype), largest


def _sdpa(applies: "Callable[[Tensor | None, bool, bool, str], bool]") -> Effect:
    """Wrong results of the calls of fused attention for which `applies` is true. `applies` gets the
    mask, whether the call is causal, whether it returns statistics, and the mode of its softmax."""

    def effect(run: Run, args: tuple[Value, ...]) -> Value:
        out, highest, inverse, seed = run()
        mask, is_causal, has_statistics, softmax_mode = args[3], args[6], args[7], args[8]
        if not applies(mask, is_causal, has_statistics, softmax_mode):
            return out, highest, inverse, seed
        return out * -0.5, highest, inverse * 2, seed

    return effect


def _wide(run: Run, args: tuple[Value, ...]) -> Value:
    out, *statistics = run()
    return (out * -0.5 if args[0].shape[-1] >= 192 else out, *statistics)


def _rows(mask: "Tensor | None") -> int:
    return 0 if mask is None else mask.shape[-2]


SDPA = ("hpu::sdpa_recomp_fwd",)

FAULTS: Mapping[str, OperatorFault | RuntimeFault] = {
    "cache-writes": OperatorFault(("aten::index_copy_",), _last_row_lost, ("lazy",)),
    "exact-comparisons": OperatorFault(("aten::amax", "aten::amin"), _rounded, ("lazy",)),
    "non-finite": OperatorFault(("aten::nan_to_num",), _unchanged, ("lazy",)),
    "int64": OperatorFault(("aten::add", "aten::sub"), _through_float32, ("lazy",)),
    "fused-sdpa": OperatorFault(
        SDPA, _sdpa(lambda mask, causal, statistics, mode: causal and mode != "fp32")
    ),
    "fused-sdpa-float32": OperatorFault(
        SDPA, _sdpa(lambda mask, causal, statistics, mode: mode == "fp32")
    ),
    "fused-sdpa-mask": OperatorFault(
        SDPA, _sdpa(lambda mask, causal, statistics, mode: _rows(mask) > 0 and not statistics)
    ),
    "fused-sdpa-wide": OperatorFault(SDPA, _wide),
    "fused-sdpa-statistics": OperatorFault(
        SDPA, _sdpa(lambda mask, causal, statistics, mode: _rows(mask) > 1 and statistics)
    ),
    "fused-sdpa-slices": OperatorFault(
        SDPA, _sdpa(lambda mask, causal, statistics, mode: _rows(mask) == 1 and statistics)
    ),
    "block-softmax": OperatorFault(("hpu::block_softmax_adjustment",), _scaled),
    "rms-norm": OperatorFault(("hpu::rms_norm", "hpu::rms_norm_fast"), _scaled),
    "rotary": OperatorFault(("hpu::rotary_pos_embedding",), _scaled),
    "experts": OperatorFault(("hpu::mixture_of_experts.fused_weights",), _scaled),
    "experts-in-a-call": OperatorFault(("hpu::mixture_of_experts.fused_weights",), _few_experts),
    "experts-with-bias": OperatorFault(("hpu::mixture_of_experts.bias_fused_weights",), _scaled),
    "float16": OperatorFault(("hpu::rms_norm", "hpu::rms_norm_fast"), _scaled_float16),
    "fp8-products": OperatorFault(("hpu::fp8_gemm_v2",), _scaled),
    "fp8-experts": OperatorFault(
        (
            "hpu::mixture_of_experts.fp8_fused_weights",
            "hpu::mixture_of_experts.fp8_fused_weights_dynamic",
        ),
        _scaled,
    ),
    "uint4": OperatorFault(("hpu::convert_from_uint4",), _uint4(has_groups=False)),
    "uint4-groups": OperatorFault(("hpu::convert_from_uint4",), _uint4(has_groups=True)),
    "products-of-views": OperatorFault(("aten::bmm",), _scaled_views, ("lazy",)),
    "float32-products": OperatorFault(("aten::matmul.out",), _rounded_out),
    "compiled-norms": OperatorFault(("aten::rsqrt",), _scaled, ("compiled",)),
    "fp8-casts": OperatorFault(("hpu::cast_to_fp8_v2",), _small_range),
    "compiled-cache-writes": OperatorFault(("aten::index_copy_",), _not_written, ("compiled",)),
    "collectives": OperatorFault(
        ("c10d::allreduce_",), lambda run, args: [run(), [tensor.mul_(2) for tensor in args[0]]][0]
    ),
    # The operators named here run on the host in lazy mode.
    "index-reduce": RuntimeFault(("aten::index_reduce",)),
    "sampler-operators": RuntimeFault(("aten::sort",)),
    "router-operators": RuntimeFault(("aten::scatter",)),
    "captured-collectives": RuntimeFault(),
    "compiled-guards": RuntimeFault(),
    "default-copies": RuntimeFault(),
    LARGE_COPIES: RuntimeFault(),
    "events": RuntimeFault(),
    "graph-cache-writes": RuntimeFault(),
    "graph-cache-slices": RuntimeFault(),
    "graph-cache-views": RuntimeFault(),
    "graph-failures": RuntimeFault(),
    "graph-inputs": RuntimeFault(),
    "graph-marks": RuntimeFault(),
    "graph-memory": RuntimeFault(),
    "graph-outputs": RuntimeFault(),
    "graph-replay": RuntimeFault(),
    "graph-sampler": RuntimeFault(),
    "graph-state-updates": RuntimeFault(),
    "graph-views": RuntimeFault(),
    "host-copies": RuntimeFault(),
    "memory-stats": RuntimeFault(),
    "metrics": RuntimeFault(),
    MIXED_CODES: RuntimeFault(),
    MIXED_EXPERTS: RuntimeFault(),
    "out-of-memory": RuntimeFault(),
    "recipe-cache": RuntimeFault(),
    "runtime-names": RuntimeFault(),
    "torch-compile": RuntimeFault(),
    "uploads": RuntimeFault(),
    WEDGED_COPIES: RuntimeFault(),
}


def names() -> Iterator[str]:
    """The names of all faults, without and with suffixes."""
    for name, fault in FAULTS.items():
        yield name
        if isinstance(fault, OperatorFault):
            yield from (f"{name}:{ending}" for ending in (CRASH, HANG))


def check_names(faults: Collection[str]) -> None:
    """Raise ConfigError for a fault that does not exist."""
    for fault in sorted(set(faults).difference(names())):
        known = ", ".join(sorted(names()))
        raise ConfigError(f"--emulator-faults has {fault!r}, it must be one of {known}")


def run(faults: Collection[str], name: str, mode: str, run: Run, args: tuple[Value, ...]) -> Value:
    """Run the operator `name`, with its overload, in `mode` on a card with `faults`. A fault that
    names an operator without an overload applies to all its overloads."""
    for fault in faults:
        own, _, ending = fault.partition(":")
        found = FAULTS[own]
        if not isinstance(found, OperatorFault):
            continue
        if not {name, name.partition(".")[0]}.isdisjoint(found.operators) and mode in found.modes:
            misbehave(ending)
            return found.effect(run, args)
    return run()


def misbehave(ending: str) -> None:
    """Abort the process or sleep forever, if the fault has such a suffix."""
    if ending == CRASH:
        os.abort()
    while ending == HANG:
        time.sleep(1)


def on_host(faults: Collection[str], name: str) -> bool:
    """Whether the operator `name` falls back to the host in lazy mode because of a fault."""
    return any(
        isinstance(found := FAULTS[fault.partition(":")[0]], RuntimeFault)
        and name in found.operators
        for fault in faults
    )
