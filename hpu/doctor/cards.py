"""Finds cards and the processes that use them, from device nodes, the driver's files, hl-smi, and
the open files of all processes. Opens no device."""

import os
import stat
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from config.loading.cards import card_nodes
from config.setting import is_count
from hpu.doctor.machine import Machine
from hpu.gaudi_devices import GENERATIONS, NO_FLOAT32_PRODUCTS

SMI_FIELDS = "index,module_id,bus_id,uuid,name,memory.total,memory.used"

MAX_COMMAND = 80


class Holder(NamedTuple):
    """A process that has a card's device node open."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


class NodeOwner(NamedTuple):
    """Owner and mode of a device node."""

    user: int
    group: int
    mode: int

    @property
    def opens_to_group(self) -> bool:
        return self.mode & 0o060 == 0o060

    def __str__(self) -> str:
        return f"user {self.user}, group {self.group}, mode {self.mode:04o}"


class DetectedCard(NamedTuple):
    """A card; unknown values are empty or None."""

    node: str
    """Path of the device node; empty if only hl-smi reports the card."""
    module: int | None
    bus_id: str
    generation: str | None
    name: str
    memory: str
    """Memory as `used of total`, in hl-smi's format."""
    holders: tuple[Holder, ...]
    is_open_to_us: bool
    owner: NodeOwner | None = None
    """Owner of the device node; None if it cannot be read."""
    revision: int | None = None
    """PCI revision."""

    @property
    def multiplies_float32(self) -> bool:
        """Whether the card multiplies float32 matrices; True if its generation or revision is
        unknown."""
        return self.revision not in NO_FLOAT32_PRODUCTS.get(self.generation or "", ())

    def __str__(self) -> str:
        module = "module unknown" if self.module is None else f"module {self.module}"
        return ", ".join(part for part in (module, self.node, self.bus_id) if part)


class Cards(NamedTuple):
    """All cards, and the number of processes whose open files could not be read."""

    cards: tuple[DetectedCard, ...]
    hidden_processes: int


class _Row(NamedTuple):
    module: int | None
    name: str
    memory: str


def find_cards(machine: Machine) -> Cards:
    """All cards with a device node or, without device nodes, all cards that hl-smi reports; sorted
    by module."""
    nodes = card_nodes(machine.root)
    rows = _smi_rows(machine)
    names = {card.node for card in nodes}
    holders, hidden = _card_holders(machine, names) if nodes else ({}, 0)
    cards = []
    for node, device, module in nodes:
        bus_id = _bus_id(machine.root / device)
        row = rows.pop(bus_id, _Row(None, "", ""))
        cards.append(
            DetectedCard(
                node,
                row.module if module is None else module,
                bus_id,
                _generation(machine.text(f"{device}/device")),
                row.name,
                row.memory,
                tuple(holders.get(node, ())),
                os.access(machine.root / node.lstrip("/"), os.R_OK | os.W_OK),
                _owner(machine.root / node.lstrip("/")),
                _number(machine.text(f"{device}/revision")),
            )
        )
    if not nodes:
        cards = [
            DetectedCard("", row.module, bus_id, None, row.name, row.memory, (), True)
            for bus_id, row in rows.items()
        ]
    cards.sort(key=lambda card: (card.module is None, card.module, card.node))
    return Cards(tuple(cards), hidden)


def _owner(node: Path) -> NodeOwner | None:
    try:
        found = os.stat(node)
    except OSError:
        return None
    return NodeOwner(found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def _bus_id(device: Path) -> str:
    try:
        return os.path.basename(os.readlink(device))
    except OSError:
        return ""


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def _generation(pci_id: str | None) -> str | None:
    number = _number(pci_id)
    return next((name for name, facts in GENERATIONS.items() if number in facts.pci_ids), None)


def _smi_rows(machine: Machine) -> dict[str, _Row]:
    text = machine.run(["hl-smi", "-Q", SMI_FIELDS, "-f", "csv,noheader"])
    rows = {}
    for line in (text or "").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(SMI_FIELDS.split(",")):
            _, module, bus_id, _, name, total, used = words
            rows[bus_id] = _Row(_number(module), name, f"{used} of {total}")
    return rows


def _card_holders(machine: Machine, nodes: set[str]) -> tuple[dict[str, list[Holder]], int]:
    """Other processes that have each node open, and the number of processes that could not be
    read."""
    found: defaultdict[str, list[Holder]] = defaultdict(list)
    hidden = 0
    proc = machine.root / "proc"
    pids = sorted(int(name) for name in os.listdir(proc) if is_count(name)) if proc.is_dir() else []
    for pid in pids:
        folder = proc / str(pid) / "fd"
        try:
            links = os.listdir(folder)
        except PermissionError:
            hidden += 1
            continue
        except OSError:
            # The process has ended in the meantime.
            continue
        opened = {_target(folder / link) for link in links} & nodes
        if pid != machine.pid:
            for node in opened:
                found[node].append(Holder(pid, _command(machine, pid)))
    return found, hidden


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _command(machine: Machine, pid: int) -> str:
    line = (machine.text(f"proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    words = line or machine.text(f"proc/{pid}/comm") or "name unknown"
    return words if len(words) <= MAX_COMMAND else f"{words[: MAX_COMMAND - 3]}..."
