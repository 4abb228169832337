"""Explanations of the runtime's error texts."""

import re

from hpu.doctor.cards import find_cards
from hpu.doctor.machine import Machine
from hpu.doctor.preflight import lines_of_used_cards
from hpu.doctor.software import OTHER_RELEASE, release_mismatch

MEANINGS: tuple[tuple[str, str], ...] = (
    (
        r"workspace allocation of size",
        "a compiled shape needs more workspace than is left on the card: lower "
        "--gpu-memory-utilization or --max-num-batched-tokens",
    ),
    (
        r"cpu fallback is not supported during hpu graph capturing",
        "an operation that the card does not support ran during a graph capture: run with "
        "--enforce-eager, and report the operation",
    ),
    (
        r"empty tensor optional",
        "a graph without tensor cache has freed a tensor that it still needs: set "
        "PT_HPUGRAPH_DISABLE_TENSOR_CACHE=0",
    ),
    (
        r"graph compile failed",
        "a shape could not be compiled, most often because the card's memory is full: lower "
        "--gpu-memory-utilization or --max-num-batched-tokens",
    ),
    (
        r"synlaunch failed",
        "a compiled shape could not be started, most often because the card's memory is full: "
        "lower --gpu-memory-utilization",
    ),
)
"""(case-insensitive regular expression, explanation)."""

BUSY, FAILED = 20, 26
"""Status codes of a failed device acquisition."""


def explain(text: str, machine: Machine) -> str | None:
    """Explanation of the runtime's error `text` on this machine; None if there is none."""
    meaning = _meaning(text, machine)
    if mismatch := release_mismatch(machine):
        # The status of such an error, often 26, is generic, and any operation can be the first to
        # fail.
        return f"{meaning or text}; {mismatch}: {OTHER_RELEASE}"
    return meaning


def _meaning(text: str, machine: Machine) -> str | None:
    if re.search(r"device acquire failed", text, re.IGNORECASE):
        return _acquisition(text, machine)
    return next(
        (meaning for pattern, meaning in MEANINGS if re.search(pattern, text, re.IGNORECASE)), None
    )


def _acquisition(text: str, machine: Machine) -> str:
    found = re.search(r"synStatus\s*[=:]?\s*(\d+)", text, re.IGNORECASE)
    status = int(found[1]) if found else None
    meaning = {
        BUSY: "another process uses the card, or used it until a moment ago (status 20)",
        FAILED: "the driver could not acquire the card and gave no reason (status 26): the driver "
        "and the runtime may be of different releases",
    }.get(status or 0, f"the driver could not acquire the card (status {status or 'unknown'})")
    held = lines_of_used_cards(find_cards(machine).cards)
    if held:
        return f"{meaning}; {'; '.join(held)}"
    return (
        f"{meaning}; no visible process uses a card, but a process in another container may: run "
        "`gaudiserve doctor`"
    )
