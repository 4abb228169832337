"""Device name to Backend. Imports only the chosen one, so that what is not used is not loaded."""

import importlib.util

from config.errors import ConfigError
from hpu.backends.base import Backend


def select_backend(device: str, *, num_threads: int | None = None) -> Backend:
    """The named backend, or the best one of this machine for `auto`: a Gaudi, else the CPU. A GPU
    has to be named: it is there to develop on.

    `num_threads` counts on the CPU only. Raises ConfigError when the machine has no such device.
    """
    if device == "auto" and importlib.util.find_spec("habana_frameworks") is not None:
        device = "hpu"
    if device in ("auto", "cpu"):
        from hpu.backends.cpu import CpuBackend

        return CpuBackend(num_threads)
    if device == "cuda":
        from hpu.backends.cuda import CudaBackend

        return CudaBackend()
    raise ConfigError(f"device {device!r} cannot be used by this version; --device cpu can")
