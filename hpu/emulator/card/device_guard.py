"""Device guard of the emulated card. torch's own methods need a guard, which the vendor's bridge
registers for a real card."""

import ctypes
from pathlib import Path

import torch

REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""c10::impl::device_guard_impl_registry: one pointer for each type of device."""

META, HPU = 14, 15
"""c10::DeviceType of the meta device, whose guard does nothing, and of the card."""


def set_guard(enabled: bool) -> None:
    """Give the card the guard of the meta device, or remove it."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (HPU + 1)).in_dll(library, REGISTRY)
    guards[HPU] = guards[META] if enabled else None
