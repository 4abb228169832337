"""Device: the properties of a value of --device that need no torch. DEVICES: all devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from config.kinds import Kinds


class Installed(NamedTuple):
    """The software installed on this machine."""

    has_module: Callable[[str], bool]
    """Whether a module could be imported, without importing it."""
    torch: str
    """Version of torch; empty: not installed."""


def _no_problem(installed: Installed) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device. The mapping KINDS of a file in this folder lists devices by name."""

    cards_variable: str = ""
    """Environment variable that lists the cards visible to a process; empty: the device has no
    cards."""
    ray_resource: str = ""
    """Ray's resource name of a card; empty: the device has no cards."""
    is_gaudi: bool = False
    """Whether the model runs on the vendor's runtime or its emulator."""
    uses_cores: bool = False
    """Whether the model runs on the host's cores."""
    driver: str = ""
    """Name of the kernel driver; empty: the device has no driver, or hpu/doctor/ checks it."""
    driver_file: str = ""
    """File that exists while the driver is loaded, without the leading slash."""
    problem: Callable[[Installed], str] = _no_problem
    """Reason why the device cannot be used with the installed software; empty: no problem found."""


DEVICES = Kinds[Device]("config.devices", "KINDS", "device")
