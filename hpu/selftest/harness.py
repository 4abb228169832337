"""Runs checks in this process, on its card or on an emulated card."""

import gc
import time
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack

import torch
from torch import Tensor
from torch import distributed as dist

from hpu.emulator.install import install
from hpu.emulator.settings import EmulatorConfig
from hpu.selftest.base import (
    COMPILE,
    FAILS,
    HOLDS,
    UNKNOWN,
    Began,
    Card,
    Check,
    Comparison,
    Ended,
    NotApplicable,
    Orders,
    Report,
    all_checks,
)

MAX_DETAIL = 500


def run(orders: Orders, environment: MutableMapping[str, str]) -> Iterator[Report]:
    """Run the checks of `orders`. `environment`: variables that an emulated card's runtime reads
    and sets."""
    yield Began("")
    with ExitStack() as stack:
        try:
            if orders.device == "hpu-emulator":
                stack.enter_context(install(_emulated(orders), environment))
            card = _open(orders)
            if orders.num_ranks > 1:
                stack.callback(dist.destroy_process_group)
        except Exception as error:
            yield Ended("", UNKNOWN, _text(error))
            return
        # Garbage is collected after each check, so exclude existing objects to keep this fast.
        gc.collect()
        gc.freeze()
        for name in orders.names:
            yield Began(name)
            yield run_check(all_checks()[name], card)


def _emulated(orders: Orders) -> EmulatorConfig:
    settings = orders.emulator
    return EmulatorConfig(
        generation=settings.card,
        memory_bytes=settings.memory_bytes,
        late_copy_s=settings.late_copy_s,
        faults=frozenset(settings.faults),
        release=orders.software,
    )


def _open(orders: Orders) -> Card:
    """Load the runtime, join the process group if there are several ranks, and acquire the card."""
    card = Card(orders.software, orders.rank, f"{orders.folder}/recipes", orders.shape)
    if orders.num_ranks > 1:
        hccl = card.module("distributed.hccl")
        hccl.initialize_distributed_hpu(
            world_size=orders.num_ranks, rank=orders.rank, local_rank=orders.rank
        )
        dist.init_process_group(
            "hccl",
            init_method=f"file://{orders.folder}/ranks",
            world_size=orders.num_ranks,
            rank=orders.rank,
        )
    card.put(torch.zeros(1))
    card.synchronize()
    return card


def run_check(check: Check, card: Card) -> Ended:
    """Run the program of `check` and compare the values that it yields."""
    start = time.monotonic()
    before = _num_allocations(card)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            detail = _first_difference(check, card)
        status = FAILS if detail else HOLDS
    except NotApplicable as error:
        status, detail = UNKNOWN, str(error)
    except Exception as error:
        # Drop the traceback, whose frames hold tensors.
        error.with_traceback(None)
        status, detail = FAILS, _text(error)
    if check.mode == COMPILE:
        # Compiled code keeps references to the tensors of its function.
        torch.compiler.reset()
    gc.collect()
    left = _num_allocations(card) - before
    return Ended(check.name, status, detail[:MAX_DETAIL], time.monotonic() - start, left)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL]


def _first_difference(check: Check, card: Card) -> str:
    for comparison in check.program(card):
        if difference := _difference(comparison):
            return f"{comparison.what}: {difference}"
    return ""


def _difference(comparison: Comparison) -> str:
    """Difference between the found and the expected value; empty if they agree."""
    found, expected = comparison.found, comparison.expected
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return "" if found == expected else f"{found}, expected {expected}"
    on_host = found.cpu()
    if on_host.shape != expected.shape:
        return f"shape {tuple(on_host.shape)}, expected {tuple(expected.shape)}"
    if not expected.is_floating_point():
        wrong = on_host != expected
    else:
        on_host, expected = on_host.float(), expected.float()
        allowed = comparison.tolerance * expected.abs().clamp_min(1)
        # NaN agrees only with NaN.
        wrong = ~((on_host - expected).abs() <= allowed) & (on_host != expected)
        wrong &= ~(on_host.isnan() & expected.isnan())
    if not bool(wrong.any()):
        return ""
    index = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values differ; at {index} "
        f"{on_host[index].item():g}, expected {expected[index].item():g}"
    )


def _num_allocations(card: Card) -> int:
    """Number of active allocations. Bytes would include the workspace, which never shrinks."""
    card.synchronize()
    return int(card.hpu.memory_stats()["ActiveAllocs"])
