"""Device nodes of Gaudi cards, and module ids of the cards that this process can see. Opens no
device."""

import os
import re
from pathlib import Path
from typing import NamedTuple

NODES = (("dev/accel", "accel", "accel"), ("dev", "hl", "habanalabs"))
"""(folder, name prefix, class folder below sys/class) of newer and older drivers."""
PCI_VENDOR = 0x1DA3
ROOT = Path("/")


class CardNode(NamedTuple):
    """Device node of a Gaudi card."""

    node: str
    """Path, such as /dev/accel/accel0."""
    device: str
    """The driver's folder for the card, relative to the root."""
    module: int | None
    """Module id, which may differ from the index in the name; None if the driver does not report
    it."""


def card_nodes(root: Path = ROOT) -> list[CardNode]:
    """The nodes of all Gaudi cards, in the order of their names."""
    found = []
    for folder, prefix, kind in NODES:
        try:
            names = sorted(os.listdir(root / folder))
        except OSError:
            continue
        for name in names:
            device = f"sys/class/{kind}/{name}/device"
            vendor = number_in(root / device / "vendor")
            # The folder also contains accelerators of other vendors.
            if re.fullmatch(rf"{prefix}\d+", name) and vendor in (None, PCI_VENDOR):
                module = number_in(root / device / "module_id")
                found.append(CardNode(f"/{folder}/{name}", device, module))
    return found


def visible_modules(root: Path = ROOT) -> list[int]:
    """Sorted module ids of the cards with nodes in this container; empty if the driver does not
    report all of them."""
    modules = [card.module for card in card_nodes(root)]
    return [] if None in modules else sorted(module for module in modules if module is not None)


def number_in(file: Path) -> int | None:
    """The integer in a driver file; None if the file cannot be read or has no integer."""
    try:
        return int(file.read_text(encoding="ascii", errors="replace"), 0)
    except (OSError, ValueError):
        return None
