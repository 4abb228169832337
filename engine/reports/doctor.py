"""What `gaudiserve doctor` finds: host, packages, Gaudi, the device a server would take, its mode
and its cache folder. Imports no torch and touches no device."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import ModeChoice, choose_mode
from config.version import VERSION
from hpu.backends.gaudi_devices import GIB
from hpu.backends.host import has_fast_bfloat16, usable_cores, usable_memory
from hpu.doctor.cards import Card
from hpu.doctor.machine import ERROR, OK, WARN, Finding, Machine
from hpu.doctor.preflight import Preflight, has_sign_of_gaudi, preflight
from hpu.doctor.software import RUNTIME, has_runtime, is_vendor_torch

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "gguf",
    "fastapi",
    "uvicorn",
    "pydantic",
    "pyzmq",
    "msgspec",
    "habana-torch-plugin",
    "pyhlml",
)

"""Whose versions a report of a problem needs."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Findings by section of the report, and whether a server with these settings can start."""

    asked: str
    taken: str
    why: str
    mode: ModeChoice | None
    """Of a Gaudi or its emulator; None: the settings contradict each other."""
    sections: dict[str, tuple[Finding, ...]]
    cards: tuple[Card, ...]
    packages: dict[str, str | None]
    python: str
    can_serve: bool

    @property
    def verdict(self) -> str:
        """The last line."""
        if self.can_serve:
            return f"`gaudiserve serve --device {self.asked}` can run here, on {self.taken}."
        cure = "" if self.taken == "cpu" else "; --device cpu may"
        return f"`gaudiserve serve --device {self.asked}` cannot run here{cure}."


def this_machine(environment: Mapping[str, str]) -> Machine:
    """The one that we run on, with these variables."""
    return Machine(environment=environment)


def examine(machine: Machine, config: EngineConfig, cache_folder: str) -> Examination:
    """Look at everything that a server with `config` would need."""
    taken, why = _device(machine, config.device)
    packages = {name: machine.version(name) for name in PACKAGES}
    cards = preflight(machine)
    mode, contradiction = _mode(machine, config, taken)
    gaudi: tuple[Finding, ...] = cards.findings
    if taken != "hpu" and not has_sign_of_gaudi(machine):
        gaudi = (Finding(OK, "cards", "none here: no runtime, no driver, no card"),)
    device = [
        Finding(OK, "device", f"--device {config.device} takes {taken}: {why}"),
        *_device_problems(machine, taken, cards),
        _mode_finding(mode, contradiction, taken),
        _cache(cache_folder),
    ]
    return Examination(
        config.device,
        taken,
        why,
        mode,
        {
            "host": _host(machine),
            "packages": _packages(packages),
            "gaudi": gaudi,
            "device": tuple(device),
        },
        cards.cards,
        packages,
        ".".join(map(str, machine.python)),
        not any(finding.level == ERROR for finding in device),
    )


def _device(machine: Machine, asked: str) -> tuple[str, str]:
    """(device, why): what a worker would choose."""
    if asked != "auto":
        return asked, "it was asked for"
    if has_runtime(machine):
        return "hpu", f"{RUNTIME} is installed"
    return "cpu", f"{RUNTIME} is not installed, and a GPU has to be named"


def _mode(machine: Machine, config: EngineConfig, taken: str) -> tuple[ModeChoice | None, str]:
    """(mode on a Gaudi, nothing), or (nothing, the contradiction)."""
    try:
        choice = choose_mode(
            config.execution.mode,
            enforce_eager=config.enforce_eager,
            lazy_variable=machine.environment.get("PT_HPU_LAZY_MODE"),
            has_vendor_torch=taken == "hpu-emulator" or bool(is_vendor_torch(machine)),
        )
    except ConfigError as error:
        return None, str(error)
    return choice, ""


def _mode_finding(mode: ModeChoice | None, contradiction: str, taken: str) -> Finding:
    matters = taken in ("hpu", "hpu-emulator")
    if mode is None:
        return Finding(ERROR if matters else WARN, "execution mode", contradiction)
    here = "" if matters else " on a Gaudi"
    return Finding(OK, "execution mode", f"{mode.mode}{here}: {mode.reason}")


def _device_problems(machine: Machine, taken: str, cards: Preflight) -> Iterator[Finding]:
    if machine.version("torch") is None:
        yield Finding(ERROR, "torch", "this Python has no torch", "install torch, then try again")
    if taken == "hpu" and cards.errors:
        about = ", ".join(dict.fromkeys(finding.about for finding in cards.errors))
        yield Finding(ERROR, "hpu", f"the errors above stand in the way: {about}")
    if taken == "cuda" and machine.text("proc/driver/nvidia/version") is None:
        yield Finding(
            ERROR,
            "cuda",
            "the kernel has no NVIDIA driver: /proc/driver/nvidia/version is not there",
            "--device cpu needs none",
        )


def _host(machine: Machine) -> tuple[Finding, ...]:
    free, total = usable_memory(machine.root)
    fast = has_fast_bfloat16(machine.root)
    speed = "multiplied in hardware" if fast else "not multiplied in hardware: slow on this CPU"
    return (
        Finding(OK, "cores", f"{usable_cores(machine.root)} cores may be used"),
        Finding(OK, "memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory are free"),
        Finding(OK, "bfloat16", f"bfloat16 is {speed}"),
    )


def _packages(packages: dict[str, str | None]) -> tuple[Finding, ...]:
    there = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return (Finding(OK, "packages", there or "none of ours is installed"),)


def _cache(folder: str) -> Finding:
    """The folder, or what of its path exists, must take files."""
    there = Path(folder)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return Finding(
            WARN, "cache folder", f"{folder} cannot be written to", "name another by --cache-dir"
        )
    free = shutil.disk_usage(there).free
    return Finding(OK, "cache folder", f"{folder}, {free / GIB:.1f} GiB left on its disk")


def as_text(found: Examination) -> str:
    """The report for people: a line a finding, and below it what to do."""
    lines = [f"gaudiserve {VERSION}, Python {found.python}"]
    for section, findings in found.sections.items():
        lines += ["", section]
        for finding in findings:
            lines.append(f"  {finding.level:<5} {finding.what}")
            if finding.do:
                lines.append(f"{'':>8}{finding.do}")
    return "\n".join([*lines, "", found.verdict])


def as_json(found: Examination) -> dict[str, Any]:
    """The same for programs."""
    return {
        "version": VERSION,
        "python": found.python,
        "device": {"asked": found.asked, "taken": found.taken, "why": found.why},
        "execution_mode": found.mode._asdict() if found.mode else None,
        "packages": found.packages,
        "cards": [card._asdict() for card in found.cards],
        "findings": [
            {"section": section, **finding._asdict()}
            for section, findings in found.sections.items()
            for finding in findings
        ],
        "can_serve": found.can_serve,
    }
