"""Device: the facts about a value of --device that need no torch. DEVICES: all devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from config.kinds import Kinds


class Installed(NamedTuple):
    """The software of this machine."""

    has_module: Callable[[str], bool]
    """Whether a module could be imported, without importing it."""
    torch: str
    """Version of torch; empty: not installed."""


def _no_problem(installed: Installed) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device. A file of this folder lists its devices in KINDS."""

    cards_variable: str = ""
    """Environment variable that lists the cards a process may use; empty: the device has no
    cards."""
    ray_resource: str = ""
    """Ray's resource name of a card; empty: the device has no cards."""
    is_gaudi: bool = False
    """Whether the vendor's runtime, or its emulator, runs the model."""
    uses_cores: bool = False
    """Whether the host's cores compute the model."""
    driver: str = ""
    """Name of the kernel's driver; empty: the device has no driver, or its checks are in
    hpu/doctor/."""
    driver_file: str = ""
    """File that exists while the driver is loaded, without the leading slash."""
    problem: Callable[[Installed], str] = _no_problem
    """Returns the reason why the device cannot be used with the installed software; empty: it can,
    as far as this shows."""


DEVICES = Kinds[Device]("config.devices", "KINDS", "device")
