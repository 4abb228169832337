"""Explanations of the runtime's error texts."""

import re

from hpu.doctor.cards import find_cards
from hpu.doctor.environment import compiler_findings
from hpu.doctor.links import infiniband_findings
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
        r"float32 operation is not supported|fp32 operations are not supported",
        "this revision of the card multiplies no float32 matrices (Gaudi 2B, 2C and 2D): use a "
        "model in bfloat16",
    ),
    (
        r"synlaunch failed",
        "a compiled shape could not be started, most often because the card's memory is full: "
        "lower --gpu-memory-utilization",
    ),
)
"""(case-insensitive regular expression, explanation)."""

BUSY, FAILED = 20, 26
ACQUISITIONS = {
    8: "the driver reports no usable card (status 8)",
    16: "fewer cards are usable than this server needs (status 16)",
    17: "the card was reset: wait until `hl-smi` lists it again (status 17)",
    BUSY: "another process uses the card, or used it until a moment ago (status 20)",
    22: "another process uses the card, or used it until a moment ago (status 22)",
    24: "the card is in reset or has failed: look at `hl-smi` and the kernel's log (status 24)",
    FAILED: "the driver could not acquire the card and gave no reason (status 26): the driver and "
    "the runtime may be of different releases, or the container lacks the card's node in "
    "/dev/infiniband",
}
"""Status code of a failed device acquisition -> explanation (HabanaAI/Intel_Gaudi3_Software,
synapse/include/synapse_common_types.h, synStatus)."""
COMPILATION = re.compile(r"graph ?compile|can not compile", re.IGNORECASE)


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
    if COMPILATION.search(text) and (found := compiler_findings(machine, has_cards=True)):
        return f"{found[0].what}: {found[0].do}"
    return next(
        (meaning for pattern, meaning in MEANINGS if re.search(pattern, text, re.IGNORECASE)), None
    )


def _acquisition(text: str, machine: Machine) -> str:
    found = re.search(r"synStatus\s*[=:]?\s*(\d+)", text, re.IGNORECASE)
    status = int(found[1]) if found else None
    meaning = ACQUISITIONS.get(
        status or 0, f"the driver could not acquire the card (status {status or 'unknown'})"
    )
    cards = find_cards(machine).cards
    if closed := infiniband_findings(machine, cards):
        return f"{meaning}; {closed[0].what}: {closed[0].do}"
    if held := lines_of_used_cards(cards):
        return f"{meaning}; {'; '.join(held)}"
    return (
        f"{meaning}; no visible process uses a card, but a process in another container may: run "
        "`gaudiserve doctor`"
    )
