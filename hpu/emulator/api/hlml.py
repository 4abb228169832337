"""The module `pyhlml`: the driver's library of card information."""

from types import ModuleType
from typing import NamedTuple

from hpu.emulator.card.device import EmulatedDevice


class MemoryInfo(NamedTuple):
    """Memory of a card in bytes. `used` is the size of the memory pool of a process, not of its
    live tensors."""

    total: int
    used: int
    free: int


class Utilization(NamedTuple):
    aip: int


class HLMLError(Exception):
    """An error of the driver's library."""


def make_module(device: EmulatedDevice) -> ModuleType:
    """`pyhlml`; a handle is the card's index."""
    module = ModuleType("pyhlml")

    def handle(index: int) -> int:
        if not 0 <= index < device.config.num_devices:
            raise HLMLError(f"card {index} of {device.config.num_devices}")
        return index

    def memory_info(card: int) -> MemoryInfo:
        limit = device.memory.limit
        is_ours = device.acquisition.is_acquired and module_id(card) == device.acquisition.module
        used = limit if is_ours else 0
        return MemoryInfo(limit, used, limit - used)

    def module_id(card: int) -> int:
        modules = device.variables.modules()
        return modules[card % len(modules)]

    vars(module).update(
        HLMLError=HLMLError,
        hlmlInit=lambda: None,
        hlmlShutdown=lambda: None,
        hlmlDeviceGetCount=lambda: device.config.num_devices,
        hlmlDeviceGetHandleByIndex=handle,
        hlmlDeviceGetName=lambda card: device.generation.name,
        hlmlDeviceGetMemoryInfo=memory_info,
        hlmlDeviceGetModuleID=module_id,
        hlmlDeviceGetUtilizationRates=lambda card: Utilization(0),
        hlmlDeviceGetTemperature=lambda card, sensor=0: 35,
        hlmlDeviceGetPowerUsage=lambda card: 100_000,
        hlmlDeviceGetUUID=lambda card: f"emulated-{card}",
        hlmlDeviceGetSerial=lambda card: f"EM{card:08d}",
        hlmlGetDriverVersion=lambda: device.config.release,
    )
    return module
