"""Checks of copies between host and card, and of streams and events."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpu.selftest.base import Card, Check, Comparison, Fallback

if TYPE_CHECKING:
    from torch import Tensor

BRIDGE = "HabanaAI/gaudi-pytorch-bridge, backend/synapse_helpers/device.cpp and stream.cpp"
LOCKSTEP = Fallback("overlap-depth", ("1",))
"""Fallback: the host waits for each step before it prepares the next step."""
SENTINEL = -7_654_321
ARRIVAL_TIMEOUT_S = 1.0
NUM_COPIES = 8
LARGE_BYTES, LARGE_LIMIT_S = 64 << 20, 5.0


def copies_beside_work(card: Card) -> Iterator[Comparison]:
    stream = card.hpu.Stream()
    for number, host in enumerate(_sources(card)):
        source = card.put(host) * 2
        card.mark()
        computed = card.hpu.Event()
        computed.record()
        stream.wait_event(computed)
        target = card.torch.full((64,), float(SENTINEL))
        with card.hpu.stream(stream):
            target.copy_(source, non_blocking=True)
        copied = stream.record_event()
        yield _arrived(
            card, f"copy {number} on a second stream", target, host * 2, copied.synchronize
        )


def copies_among_work(card: Card) -> Iterator[Comparison]:
    for number, host in enumerate(_sources(card)):
        source = card.put(host) * 2
        card.mark()
        target = card.torch.full((64,), float(SENTINEL))
        target.copy_(source, non_blocking=True)
        copied = card.hpu.Event()
        copied.record()
        yield _arrived(
            card, f"copy {number} on the default stream", target, host * 2, copied.synchronize
        )


def _sources(card: Card) -> "Iterator[Tensor]":
    return (card.values(64, seed=number) for number in range(NUM_COPIES))


def _arrived(
    card: Card, what: str, target: "Tensor", expected: "Tensor", wait: Callable[[], None]
) -> Comparison:
    """Comparison of `target` after its copy has run concurrently with other work. `wait`: waits for
    the event after the copy."""
    # Some cards multiply no float32 matrices.
    weight = card.put(card.values(256, 256, seed=1).bfloat16())
    product = weight @ weight
    card.mark()
    wait()
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    while bool((target == SENTINEL).any()) and time.monotonic() < deadline:
        time.sleep(1e-4)
    del product
    return Comparison(what, target, expected)


def large_copies(card: Card) -> Iterator[Comparison]:
    host = card.torch.arange(LARGE_BYTES // 4, dtype=card.torch.int32)
    doubled = card.put(host) * 2
    card.mark()
    found: list[Tensor] = []
    errors: list[RuntimeError] = []

    def copy() -> None:
        try:
            with card.torch.inference_mode():
                found.append(doubled.cpu())
        except RuntimeError as error:
            errors.append(error)

    # A hanging copy cannot be cancelled: its thread ends with the process.
    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    thread.join(LARGE_LIMIT_S)
    if errors:
        raise errors[0]
    what = f"a copy of {LARGE_BYTES >> 20} MiB to the host"
    yield Comparison(f"{what} returns within {LARGE_LIMIT_S:.0f} s", bool(found), True)
    yield Comparison(what, found[0], host * 2)


def uploads(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    target = card.put(torch.zeros(1024))
    card.synchronize()
    for number in range(NUM_COPIES):
        expected = card.values(1024, seed=number)
        source = expected.clone()
        target.copy_(source, non_blocking=True)
        source.fill_(float(SENTINEL))
        yield Comparison(f"upload {number}, whose source changed afterwards", target + 0, expected)
        time.sleep(2e-3)
        yield Comparison(f"upload {number}, a moment later", target + 0, expected)


def events(card: Card) -> Iterator[Comparison]:
    begin, end = (card.hpu.Event(enable_timing=True) for _ in range(2))
    weight = card.put(card.values(512, 512, seed=1).bfloat16())
    card.mark()
    begin.record()
    product = weight
    for _ in range(4):
        product = (product @ weight) / 64
    card.mark()
    end.record()
    start = time.monotonic()
    end.synchronize()
    milliseconds = float(begin.elapsed_time(end))
    waited = (time.monotonic() - start) * 1e3
    yield Comparison("query after synchronize", bool(end.query()), True)
    what = f"{milliseconds:g} ms between two events, {waited:g} ms waited"
    yield Comparison(what, 0 < milliseconds < 60_000, True)


CHECKS = (
    Check(
        name="host-copies",
        assumption="copies to the host on a second stream wait, and arrive",
        source=BRIDGE,
        program=copies_beside_work,
        fallbacks=(Fallback("host-copies", ("default", "blocking")),),
        is_quick=True,
        limit_s=20.0,
    ),
    Check(
        name="default-copies",
        assumption="non-blocking copies on the stream of the launches arrive",
        source=BRIDGE,
        program=copies_among_work,
        fallbacks=(Fallback("host-copies", ("side", "blocking")),),
        limit_s=20.0,
    ),
    Check(
        name="large-copies",
        assumption="a copy of 64 MiB to the host returns",
        source="public launch script for Gaudi 2; HabanaAI/gaudi-pytorch-bridge, lazy_kernels.cpp "
        "(copy_hpu_lazy_D2H)",
        program=large_copies,
        fallbacks=(Fallback("PT_HPU_ENABLE_D2H_ASYNC_THREAD", ("0",)),),
        limit_s=20.0,
    ),
    Check(
        name="uploads",
        assumption="an upload below 1 MiB reads its source before it returns",
        source=BRIDGE,
        program=uploads,
        fallbacks=(LOCKSTEP,),
        is_quick=True,
    ),
    Check(
        name="events",
        assumption="events have times, and are done after a synchronization",
        source="HabanaAI/gaudi-pytorch-bridge, HPUEvent.cpp",
        program=events,
        fallbacks=(LOCKSTEP,),
        is_quick=True,
    ),
)
