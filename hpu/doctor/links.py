"""Checks that several cards are of the same generation, that the links between them are up
according to hl-smi, and that the InfiniBand nodes of cards can be opened."""

import os
import re

from hpu.doctor.cards import DetectedCard
from hpu.doctor.machine import ERROR, OK, WARN, Finding, Machine

_PORT = re.compile(r"port\s+(\d+)\s*:\s*(\w+)")
"""Line of `hl-smi -n link` (UP or DOWN) or `hl-smi -n ports` (internal or external)."""


def group_findings(
    machine: Machine, cards: tuple[DetectedCard, ...], num_cards: int
) -> list[Finding]:
    """Findings about the links and generations of `cards` when `num_cards` work together; empty for
    a single card, or if no card is visible."""
    if num_cards == 1 or not cards:
        return []
    return [*_generations(cards), *_links(machine, cards)]


def infiniband_findings(machine: Machine, cards: tuple[DetectedCard, ...]) -> list[Finding]:
    """A warning if the InfiniBand node of a card cannot be opened. The runtime opens it when it
    acquires the card, even a single card, and otherwise fails with status 26 (HabanaAI/HCL,
    hcl_ibverbs.cpp; INIT_HCCL_ON_ACQUIRE in HabanaAI/Intel_Gaudi3_Software)."""
    folder = machine.root / "sys/class/infiniband_verbs"
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    nodes = {machine.text(f"sys/class/infiniband_verbs/{name}/ibdev"): name for name in names}
    closed = []
    for card in cards:
        index = re.search(r"\d+$", card.node)
        name = nodes.get(f"hbl_{index[0]}") if index else None
        node = f"dev/infiniband/{name}"
        if name and not os.access(machine.root / node, os.R_OK | os.W_OK):
            closed.append(f"/{node} of {card}")
    if not closed:
        return []
    return [
        Finding(
            WARN,
            "infiniband",
            f"{'; '.join(closed)} cannot be opened: the runtime opens it when it acquires a card, "
            "and fails with status 26 otherwise",
            "start the container with the vendor's runtime (--runtime=habana, in Kubernetes "
            "runtimeClassName: habana), or with --device /dev/infiniband",
        )
    ]


def _generations(cards: tuple[DetectedCard, ...]) -> list[Finding]:
    generations = sorted({card.generation for card in cards if card.generation})
    if len(generations) < 2:
        return []
    counts = (
        f"{sum(card.generation == name for card in cards)} are {name}" for name in generations
    )
    return [
        Finding(
            ERROR,
            "generations",
            f"the cards are of {len(generations)} generations: {', '.join(counts)}",
            "name cards of one generation in HABANA_VISIBLE_MODULES",
        )
    ]


def _links(machine: Machine, cards: tuple[DetectedCard, ...]) -> list[Finding]:
    """Finding about the links between cards. External ports, which lead to other hosts, are
    ignored: they may be unused."""
    down, num_up = [], 0
    for card in cards:
        states = _ports(machine, card, "link")
        kinds = _ports(machine, card, "ports")
        for port, state in states.items():
            if kinds.get(port, "internal") == "external":
                continue
            if state == "up":
                num_up += 1
            else:
                down.append(f"port {port} of {card} is {state}")
    if down:
        return [
            Finding(
                WARN,
                "links",
                f"{len(down)} of {num_up + len(down)} links between cards are not up: "
                f"{'; '.join(down)}",
                "collectives over them hang or are slow: look at `hl-smi -n link -i BUS_ID`, bring "
                "the links up with the vendor's `manage_network_ifs.sh --up`, or load the driver "
                "again on the host",
            )
        ]
    if num_up:
        return [Finding(OK, "links", f"{num_up} links between {len(cards)} cards are up")]
    return [Finding(OK, "links", "hl-smi reports no links between cards")]


def _ports(machine: Machine, card: DetectedCard, what: str) -> dict[int, str]:
    """State or kind of each port in lower case, by port number; empty if unknown. `what`: "link"
    for the states, "ports" for the kinds."""
    if not card.bus_id:
        return {}
    text = machine.run(["hl-smi", "-n", what, "-i", card.bus_id])
    return {int(port): word.lower() for port, word in _PORT.findall((text or "").lower())}
