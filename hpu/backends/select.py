"""Selects the Backend for a device name. Imports only the selected backend."""

import logging

from config.devices.base import DEVICES
from config.devices.hpu import RUNTIME
from config.engine import EngineConfig
from config.errors import counted
from config.loading import env
from config.loading.cards import card_nodes
from config.model.quantization.inc import INC
from config.progress import OnStep, unreported_step
from hpu.backends.base import Backend
from hpu.distributed.process_groups import SINGLE_RANK, Ranks

logger = logging.getLogger(__name__)


def select_backend(
    config: EngineConfig, ranks: Ranks = SINGLE_RANK, on_step: OnStep = unreported_step
) -> Backend:
    """Return the backend that `config.device` names; for `auto`, a Gaudi if its runtime is
    installed, else the CPU. An NVIDIA GPU, which is for development, must be named. The returned
    backend has joined the other `ranks` of the model. `on_step` is called while the CPU's kernels
    are built.

    The backend's file in hpu/backends/ has the name of the device's file in config/devices/; its
    BACKENDS maps device names to constructors. Raises ConfigError.
    """
    device = env.chosen_device(config.device)
    if config.device == "auto" and not DEVICES[device].is_gaudi and not ranks.rank:
        _warn_of_unused_cards()
    changed = config.execution.changed_on_gaudi
    if changed and not ranks.rank:
        if DEVICES[device].is_gaudi:
            mode = env.hpu_mode(config).mode
            uses_compressor = config.quantization == INC
            for flag, why in config.execution.unread_in(mode, uses_compressor=uses_compressor):
                logger.warning("%s has no effect: %s", flag, why)
        else:
            logger.info(
                "%s %s no effect on this device: only a Gaudi reads %s",
                ", ".join(changed),
                *(("has", "it") if len(changed) == 1 else ("have", "them")),
            )
    backend: Backend = DEVICES.counterpart(device, "hpu.backends", "BACKENDS")(
        config, ranks, on_step
    )
    return backend


def _warn_of_unused_cards() -> None:
    """Warn if the machine has Gaudi cards that this process cannot use without their runtime."""
    if cards := card_nodes():
        logger.warning(
            "The model runs on the CPU, although this machine has %s: %s is not installed in this "
            "Python environment. Install it with `make install-hpu` or use the HPU image; "
            "--device cpu removes this warning",
            counted(len(cards), "Gaudi card"),
            RUNTIME,
        )
