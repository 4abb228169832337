"""Report of `gaudiserve doctor`: host, packages, Gaudi, device, mode and last self-test of a
server, and its cache folder. Imports no torch and opens no device."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from config.checkpoint.demo import NAMES
from config.devices.base import DEVICES
from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.execution import EMULATED_RELEASE, RUNTIME_DISTRIBUTION, ModeChoice, choose_mode
from config.json_text import Json
from config.model.quantization.inc import INC, MODULE, PACKAGE
from config.version import VERSION
from engine.selftest.fallbacks import shown
from engine.selftest.start import stored
from hpu.doctor.cards import DetectedCard
from hpu.doctor.machine import ERROR, OK, WARN, Finding, Machine
from hpu.doctor.preflight import Preflight, has_sign_of_gaudi, preflight
from hpu.doctor.software import RUNTIME, has_runtime, has_vendor_torch
from hpu.host import has_fast_bfloat16, load_average, usable_cores, usable_memory

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
    "habana-torch-dataloader",
    "habana-media-loader",
    "neural-compressor-pt",
    "pyhlml",
)
"""Packages whose versions are reported."""

NOT_CHECKED = "The model and the port were not checked."
CACHE_REMEDY = "set --cache-dir to another folder"

MIN_FREE_BYTES = 2**30
"""Free space below which the doctor warns: the demo model and compiled kernels need 0.3 GB."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings by section, and whether a server with these settings can start."""

    requested_device: str
    device: str
    reason: str
    mode: ModeChoice | None
    """Execution mode on a Gaudi or its emulator; None on another device, or if the
    settings contradict each other."""
    sections: dict[str, tuple[Finding, ...]]
    cards: tuple[DetectedCard, ...]
    packages: dict[str, str | None]
    python: str
    can_serve: bool

    @property
    def verdict(self) -> str:
        """Last line of the report: whether a server can run here."""
        command = f"`gaudiserve serve --device {self.requested_device}`"
        if self.can_serve:
            return f"{command} can run here, on {self.device}. {NOT_CHECKED}"
        hint = "" if self.device == "cpu" else "; try --device cpu"
        return f"{command} cannot run here{hint}."


def this_machine(environment: Mapping[str, str]) -> Machine:
    """This machine, with `environment` as its variables."""
    return Machine(environment=environment)


def diagnose(machine: Machine, config: EngineConfig, cache_folder: str) -> Diagnosis:
    """Check what a server with `config` needs, except the model and the port."""
    device_name, reason = _device(machine, config.device)
    packages = {name: machine.version(name) for name in PACKAGES}
    num_cards = config.parallel.world_size * config.data_parallel.num_local
    cards = preflight(machine, num_cards=num_cards)
    mode, contradiction = _mode(machine, config, device_name)
    gaudi: tuple[Finding, ...] = cards.findings
    if device_name != "hpu" and not has_sign_of_gaudi(machine):
        gaudi = (Finding(OK, "cards", "none here: no runtime, no driver, no card"),)
    device = [
        Finding(OK, "device", f"--device {config.device} selects {device_name}: {reason}"),
        *_device_problems(machine, device_name, cards),
        *_compressor(machine, config),
    ]
    is_gaudi = DEVICES[device_name].is_gaudi or has_sign_of_gaudi(machine)
    if is_gaudi or contradiction:
        device.append(_mode_finding(mode, contradiction, device_name))
    if DEVICES[device_name].is_gaudi:
        device.append(_selftest(machine, config))
    device.append(_cache(cache_folder, config.model))
    return Diagnosis(
        config.device,
        device_name,
        reason,
        mode if DEVICES[device_name].is_gaudi else None,
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


def _device(machine: Machine, requested: str) -> tuple[str, str]:
    """(device, reason): the device that a worker would choose."""
    if requested != "auto":
        return requested, "it was requested"
    if has_runtime(machine):
        return "hpu", f"{RUNTIME} is installed"
    return "cpu", f"{RUNTIME} is not installed, and a GPU is used only if --device names it"


def _mode(
    machine: Machine, config: EngineConfig, device_name: str
) -> tuple[ModeChoice | None, str]:
    """(mode on a Gaudi, ""), or (None, contradiction)."""
    is_emulated = device_name == "hpu-emulator"
    try:
        choice = choose_mode(
            config.execution.mode,
            enforce_eager=config.enforce_eager,
            lazy_variable=machine.environment.get("PT_HPU_LAZY_MODE"),
            has_vendor_torch=is_emulated or bool(has_vendor_torch(machine)),
            release=EMULATED_RELEASE
            if is_emulated
            else machine.version(RUNTIME_DISTRIBUTION) or "",
        )
    except ConfigError as error:
        return None, str(error)
    return choice, ""


def _mode_finding(mode: ModeChoice | None, contradiction: str, device_name: str) -> Finding:
    is_hpu = DEVICES[device_name].is_gaudi
    if mode is None:
        return Finding(ERROR if is_hpu else WARN, "execution mode", contradiction)
    here = "" if is_hpu else " on a Gaudi"
    return Finding(OK, "execution mode", f"{mode.mode}{here}: {mode.reason}")


def _device_problems(machine: Machine, device_name: str, cards: Preflight) -> Iterator[Finding]:
    if machine.version("torch") is None:
        yield Finding(ERROR, "torch", "this Python has no torch", "install torch, then try again")
    if device_name == "hpu" and cards.errors:
        about = ", ".join(dict.fromkeys(finding.about for finding in cards.errors))
        yield Finding(ERROR, "hpu", f"the errors above prevent the use of a card: {about}")
    facts = DEVICES[device_name]
    if facts.driver and machine.text(facts.driver_file) is None:
        yield Finding(
            ERROR,
            device_name,
            f"the kernel has no {facts.driver} driver: /{facts.driver_file} does not exist",
            "--device cpu needs no driver",
        )


def _compressor(machine: Machine, config: EngineConfig) -> Iterator[Finding]:
    if config.quantization == INC and not machine.has_module(MODULE):
        what = f"--quantization is {INC}, and Intel Neural Compressor is not installed here"
        yield Finding(ERROR, "compressor", what, f"pip install {PACKAGE}")


def _selftest(machine: Machine, config: EngineConfig) -> Finding:
    """The result of the last self-test of this card, if it is usable."""
    for found in stored(config, machine):
        part = "the quick part" if found.is_quick else "all checks"
        what = f"self-test, {part}: {found.summary}"
        wrong = [result for result in found.results if result.is_wrong]
        if not wrong:
            return Finding(OK, "self-test", what)
        settings = [
            shown(fallback.setting, fallback.values[0])
            for result in wrong
            for fallback in result.fallbacks
        ]
        do = "`serve` avoids the failures with these settings, unless you set them: "
        return Finding(WARN, "self-test", what, do + " ".join(dict.fromkeys(settings)))
    return Finding(
        OK,
        "self-test",
        "no self-test of this card, driver, release and version: `gaudiserve selftest` runs it; "
        "the first start on a card runs the quick part",
    )


def _host(machine: Machine) -> tuple[Finding, ...]:
    free, total = usable_memory(machine.root)
    bfloat16 = "bfloat16 is multiplied in hardware"
    if not has_fast_bfloat16(machine.root):
        bfloat16 = (
            "gaudiserve's kernels multiply bfloat16; --dtype auto is float32 for models that the "
            "kernels do not support"
        )
    return (
        _cores(machine),
        Finding(OK, "memory", f"{bytes_text(free)} of {bytes_text(total)} of memory are free"),
        Finding(OK, "bfloat16", bfloat16),
    )


def _cores(machine: Machine) -> Finding:
    cores, load = usable_cores(machine.root), load_average(machine.root)
    if load is None or load <= cores:
        return Finding(OK, "cores", f"{cores} cores may be used")
    return Finding(
        WARN,
        "cores",
        f"{cores} cores may be used, and the load average is {load:.1f}: a server would wait for "
        "cores",
        "end other processes, or give this process more cores",
    )


def _packages(packages: dict[str, str | None]) -> tuple[Finding, ...]:
    installed = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return (Finding(OK, "packages", installed or "no known package is installed"),)


def _cache(folder: str, model: str) -> Finding:
    """Check that files can be created in the folder, or in its nearest existing parent if the
    folder does not exist."""
    # A server stores these models in the folder.
    level = ERROR if model in NAMES or model.lower().endswith(".gguf") else WARN
    existing = Path(folder)
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        # Permission bits are not enough: for root, all folders of /sys and /proc appear writable.
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        what = f"--cache-dir is {folder}, which cannot be written to ({existing}: {error.strerror})"
        return Finding(level, "cache folder", what, CACHE_REMEDY)
    what = f"{folder}, {bytes_text(free)} left on its disk"
    if free < MIN_FREE_BYTES:
        what += f"; models and kernels need {bytes_text(MIN_FREE_BYTES)} or more"
        return Finding(WARN, "cache folder", what, CACHE_REMEDY)
    return Finding(OK, "cache folder", what)


def as_text(diagnosis: Diagnosis) -> str:
    """The report as text: a line per finding, followed by its remedy."""
    lines = [f"gaudiserve {VERSION}, Python {diagnosis.python}"]
    for section, findings in diagnosis.sections.items():
        lines += ["", section]
        for finding in findings:
            lines.append(f"  {finding.level:<5} {finding.what}")
            if finding.do:
                lines.append(f"{'':>8}{finding.do}")
    return "\n".join([*lines, "", diagnosis.verdict])


def as_json(diagnosis: Diagnosis) -> Json:
    """The report as JSON."""
    return {
        "version": VERSION,
        "python": diagnosis.python,
        "device": {
            "asked": diagnosis.requested_device,
            "taken": diagnosis.device,
            "why": diagnosis.reason,
        },
        "execution_mode": diagnosis.mode._asdict() if diagnosis.mode else None,
        "packages": diagnosis.packages,
        "cards": [card._asdict() for card in diagnosis.cards],
        "findings": [
            {"section": section, **finding._asdict()}
            for section, findings in diagnosis.sections.items()
            for finding in findings
        ],
        "can_serve": diagnosis.can_serve,
        "not_checked": ["model", "port"],
    }
