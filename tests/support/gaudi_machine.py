"""A Gaudi machine as files in a folder, for preflights: the driver's and kernel's files, and the
output of hl-smi. Nothing is executed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.loading.compiler_files import COMPILER_FILES
from hpu.doctor.machine import Machine

MODULES = ("habanalabs", "habanalabs_cn", "habanalabs_ib", "habanalabs_en")
VENDOR_TORCH = "2.7.1+hpu.1.22.2.32.git6dbe0a4"
ENOUGH_PAGES = 100_000


class GaudiMachine:
    """Eight free cards of the same generation by default. A test may add files later."""

    def __init__(self, root: Path, *, cards: int = 8, pci_id: str = "0x1060") -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        self.versions: dict[str, str | None] = {
            "torch": VENDOR_TORCH,
            "habana-torch-plugin": "1.22.1.6",
        }
        self.modules = {"habana_frameworks"}
        self.driver: str | None = "1.22.1-6f0bb5a"
        self.package_manager = "dpkg-query"
        self.packages: dict[str, str] = {}
        """Versions of the vendor's system packages, by name."""
        self.links_down: list[tuple[int, int]] = []
        """(card, port) of links that are down."""
        self.smi_modules: list[int] = list(range(cards))
        self.write("proc/modules", "".join(f"{name} 16384 0 - Live 0x0\n" for name in MODULES))
        for path in COMPILER_FILES.values():
            self.write(path, "")
        self.huge_pages(ENOUGH_PAGES)
        for index in range(cards):
            self.card(index, pci_id=pci_id)

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def huge_pages(self, count: int) -> None:
        """Reserve `count` pages of 2 MiB, with plenty of free memory."""
        self.write(
            "proc/meminfo",
            f"MemTotal: 1056309248 kB\nMemAvailable: 1000000000 kB\n"
            f"HugePages_Total: {count}\nHugepagesize: 2048 kB\n",
        )

    def card(self, index: int, *, vendor: str = "0x1da3", pci_id: str = "0x1060") -> str:
        """Create the files of a card; returns its device node."""
        self.write(f"dev/accel/accel{index}", "")
        self.write(f"dev/accel/accel_controlD{index}", "")
        device = f"sys/devices/pci0000:00/0000:{index + 0x10:02x}:00.0"
        self.write(f"{device}/vendor", f"{vendor}\n")
        self.write(f"{device}/device", f"{pci_id}\n")
        link = self.root / f"sys/class/accel/accel{index}/device"
        link.parent.mkdir(parents=True)
        link.symlink_to(os.path.relpath(self.root / device, link.parent))
        return f"/dev/accel/accel{index}"

    def hold(self, pid: int, node: str, command: str = "python3\0server.py\0") -> None:
        """Make a process hold a node open, beside other files."""
        self.write(f"proc/{pid}/cmdline", command)
        folder = self.root / f"proc/{pid}/fd"
        folder.mkdir(parents=True, exist_ok=True)
        for number, target in enumerate(("/dev/null", node)):
            (folder / str(number)).symlink_to(target)

    def run(self, argv: Sequence[str]) -> str | None:
        """Output of hl-smi, if the machine has a driver, and of `package_manager`."""
        if argv[0] == self.package_manager:
            return "".join(f"{name} {version}\n" for name, version in self.packages.items())
        if argv[0] != "hl-smi" or self.driver is None:
            return None
        if "-n" in argv:
            return self.ports(argv[2], argv[4])
        if "driver_version" in argv:
            return f"{self.driver}\n" * len(self.smi_modules)
        return "".join(
            f"{index}, {module}, 0000:{index + 0x10:02x}:00.0, 00P1-{index}, HL-325L, "
            f"131072 MiB, 672 MiB\n"
            for index, module in enumerate(self.smi_modules)
        )

    def ports(self, what: str, bus_id: str) -> str:
        """Output of `hl-smi -n`: six ports; the last port is external and unused."""
        words = ["internal"] * 5 + ["external"]
        if what == "link":
            words = ["UP"] * 5 + ["DOWN"]
            for card, port in self.links_down:
                if bus_id == f"0000:{card + 0x10:02x}:00.0":
                    words[port] = "DOWN"
        return "".join(f"port {port:2d}:\t{word}\n" for port, word in enumerate(words))

    def seen(self, **changes: Any) -> Machine:
        """The machine as a preflight sees it."""
        facts: dict[str, Any] = {
            "environment": self.environment,
            "root": self.root,
            "run": self.run,
            "version": self.versions.get,
            "has_module": self.modules.__contains__,
            "python": (3, 10),
            "pid": 1,
        }
        return Machine(**{**facts, **changes})
