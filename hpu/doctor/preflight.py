"""Checks of a Gaudi machine before a start. Opens no device and imports none of the vendor's
modules."""

import os
from typing import NamedTuple

from config.errors import ConfigError, counted
from config.setting import is_count
from hpu.doctor.cards import Cards, DetectedCard, find_cards
from hpu.doctor.environment import environment_findings, host_findings, visible_modules
from hpu.doctor.links import group_findings, infiniband_findings
from hpu.doctor.machine import ERROR, OK, WARN, Finding, Machine
from hpu.doctor.software import (
    has_runtime,
    loaded_modules,
    runtime_release,
    software_findings,
)
from hpu.gaudi_devices import KERNELS, has_kernel

IN_CONTAINER = "in a container: --runtime=habana -e HABANA_VISIBLE_DEVICES=all"


class Preflight(NamedTuple):
    """All findings, in the order in which errors should be fixed, and all cards."""

    findings: tuple[Finding, ...]
    cards: tuple[DetectedCard, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == ERROR)


def has_sign_of_gaudi(machine: Machine) -> bool:
    """Whether this machine has Gaudi's runtime, its driver or a card."""
    return has_runtime(machine) or bool(loaded_modules(machine)) or bool(find_cards(machine).cards)


def preflight(machine: Machine, *, num_cards: int = 1, rank: int | None = None) -> Preflight:
    """Run the checks that precede a start. With `rank`, only this worker's card must be free, and
    the checks of the group are skipped; otherwise, `num_cards` cards must be free."""
    found = find_cards(machine)
    findings = software_findings(machine)
    if found.cards:
        # A visible card proves that a driver is loaded, even if the kernel's list of modules lacks
        # it.
        findings = [_as_warning(finding) for finding in findings]
    findings += environment_findings(machine, found.cards, num_cards)
    findings += _card_findings(machine, found, num_cards, rank)
    findings += _revision_findings(found.cards)
    findings += infiniband_findings(machine, _visible(machine, found.cards))
    if rank is None:
        findings += group_findings(machine, _visible(machine, found.cards), num_cards)
    findings += host_findings(machine, num_cards)
    return Preflight(tuple(findings), found.cards)


def _revision_findings(cards: tuple[DetectedCard, ...]) -> list[Finding]:
    """A warning if a card multiplies no float32 matrices."""
    limited = next((card for card in cards if not card.multiplies_float32), None)
    if not limited:
        return []
    return [
        Finding(
            WARN,
            "card revision",
            f"{limited} has PCI revision {limited.revision} (Gaudi 2B, 2C or 2D): it multiplies no "
            "float32 matrices",
            "use models in bfloat16",
        )
    ]


def check_start(machine: Machine, *, num_cards: int = 1, rank: int = 0) -> None:
    """Raise ConfigError with the first error. Call it before a worker imports the runtime."""
    errors = preflight(machine, num_cards=num_cards, rank=rank).errors
    if errors:
        first = errors[0]
        raise ConfigError(f"{first.what}: {first.do}" if first.do else first.what)


def lines_of_used_cards(cards: tuple[DetectedCard, ...]) -> list[str]:
    """A line for each card in use, with the processes that use it."""
    return [
        f"the card {card} is held by {' and '.join(map(str, card.holders))}"
        for card in cards
        if card.holders
    ]


def _as_warning(finding: Finding) -> Finding:
    if finding.about == "driver" and finding.level == ERROR:
        return finding._replace(level=WARN)
    return finding


def _card_findings(
    machine: Machine, found: Cards, num_cards: int, rank: int | None
) -> list[Finding]:
    cards = found.cards
    if not cards:
        what = "no card is visible: there is neither a device node nor a line of hl-smi"
        return [Finding(ERROR, "cards", what, f"look at hl-smi on the host; {IN_CONTAINER}")]
    findings = [Finding(OK, "cards", f"{counted(len(cards), 'card')}: {_names(cards)}")]
    findings += _kernels(machine, cards)
    findings += _closed_nodes(cards)
    findings += _cards_in_use(machine, list(_visible(machine, cards)), num_cards, rank)
    if found.hidden_processes and not any(card.holders for card in cards):
        findings.append(
            Finding(
                OK,
                "cards",
                f"{found.hidden_processes} processes do not show their open files, and other "
                "containers are invisible: any of these processes may hold a card",
            )
        )
    return findings


def _closed_nodes(cards: tuple[DetectedCard, ...]) -> list[Finding]:
    """Findings about device nodes that this user may not open, with their owners and the remedy."""
    closed = [card for card in cards if not card.is_open_to_us]
    if not closed:
        return []
    nodes = "; ".join(f"{card.node} ({card.owner or 'owner unknown'})" for card in closed)
    what = f"user {os.getuid()} may not open {nodes}"
    # Nodes that are closed to their group come first: their owner can usually open the other nodes.
    owners = sorted((card.owner for card in closed if card.owner), key=lambda o: o.opens_to_group)
    owner = owners[0] if owners else None
    if not owner:
        do = "run as a user with access to them"
    elif owner.opens_to_group:
        group = owner.group
        do = (
            f"give this user the group {group}: docker run --group-add {group}, "
            f"ACCEL_GROUP={group} for deploy/compose.yaml, supplementalGroups: [{group}] in "
            "Kubernetes"
        )
    else:
        do = (
            f"run as user {owner.user} (docker run --user {owner.user}), or open the node to a "
            'group on the host with a udev rule: MODE="0660"'
        )
    return [Finding(ERROR if len(closed) == len(cards) else WARN, "cards", what, do)]


def _visible(machine: Machine, cards: tuple[DetectedCard, ...]) -> tuple[DetectedCard, ...]:
    """Cards that HABANA_VISIBLE_MODULES names, and cards whose module is unknown; all cards if the
    variable is unset or invalid."""
    modules = visible_modules(machine)
    return tuple(card for card in cards if modules is None or card.module in (None, *modules))


def _kernels(machine: Machine, cards: tuple[DetectedCard, ...]) -> list[Finding]:
    """Finding about the fused kernels of the first card and the installed release: how many are
    known to be available, and the names of the others."""
    generation, release = cards[0].generation, runtime_release(machine)
    if generation is None or release is None:
        return []
    known = {kernel: has_kernel(kernel, generation, release) for kernel in KERNELS}
    parts = [
        f"{sum(map(bool, known.values()))} of {len(known)} fused kernels are known to be available"
    ]
    for answer, words in ((False, "not there"), (None, "only the runtime can tell")):
        names = [kernel for kernel, found in known.items() if found is answer]
        if names:
            parts.append(f"{words}: {', '.join(names)}")
    return [Finding(OK, "kernels", f"{generation}: {'; '.join(parts)}")]


def _cards_in_use(
    machine: Machine, cards: list[DetectedCard], num_cards: int, rank: int | None
) -> list[Finding]:
    """Findings about cards in use. Includes an error if too few of `cards` are free: `num_cards`
    are needed; with `rank`, only this worker's card (any card, if its module is unknown)."""
    in_use = lines_of_used_cards(tuple(cards))
    free = [card for card in cards if not card.holders]
    remedy = "end it, or wait: a card stays busy for some seconds after its process has ended"
    module = _module_of_rank(machine, rank)
    if rank is not None and module is not None and any(card.module == module for card in cards):
        used = [card for card in cards if card.module == module and card.holders]
        if used:
            return [Finding(ERROR, "card held", lines_of_used_cards(tuple(used))[0], remedy)]
        return []
    needed = num_cards if rank is None else 1
    if len(cards) < needed:
        what = f"{len(cards)} cards are visible, {needed} are needed"
        return [Finding(ERROR, "cards", what, IN_CONTAINER)]
    if len(free) < needed:
        what = f"{len(free)} of {len(cards)} cards are free, {needed} needed: {'; '.join(in_use)}"
        return [Finding(ERROR, "card held", what, remedy)]
    pick = "" if free[0].module is None else f"HABANA_VISIBLE_MODULES={free[0].module}"
    do = f"name a free card: {pick}" if pick else ""
    return [Finding(WARN, "card held", line, do) for line in in_use]


def _module_of_rank(machine: Machine, rank: int | None) -> int | None:
    """Module of the worker `rank`, if a variable determines it."""
    word = machine.environment.get("HLS_MODULE_ID", "")
    if is_count(word):
        return int(word)
    visible = visible_modules(machine)
    return visible[rank] if visible and rank is not None and rank < len(visible) else None


def _names(cards: tuple[DetectedCard, ...]) -> str:
    return "; ".join(
        " ".join(
            part for part in (str(card), card.generation or "", card.name, card.memory) if part
        )
        for card in cards
    )
