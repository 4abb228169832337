"""Selects the Backend for a device name. Imports only the selected backend."""

from config.devices.base import DEVICES
from config.engine import EngineConfig
from config.loading import env
from config.progress import OnStep, unreported_step
from hpu.backends.base import Backend
from hpu.distributed.process_groups import SINGLE_RANK, Ranks


def select_backend(
    config: EngineConfig, ranks: Ranks = SINGLE_RANK, on_step: OnStep = unreported_step
) -> Backend:
    """The named backend; for `auto`, a Gaudi if its runtime is installed, else the CPU. An NVIDIA
    GPU, which is for development, must be named. The returned backend has joined the other `ranks`
    of the model. `on_step` is called during its preparation.

    The file in hpu/backends/ with the name of the device's file in config/devices/ makes it, in
    BACKENDS. Raises ConfigError if the machine has no such device or the device cannot be used.
    """
    device = env.chosen_device(config.device)
    backend: Backend = DEVICES.half(device, "hpu.backends", "BACKENDS")(config, ranks, on_step)
    return backend
