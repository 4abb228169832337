"""What can be refused before any process is started: a device by what is installed, a context by
what the checkpoint says. Loads no torch and touches no device."""

import importlib.metadata

from config.engine import EngineConfig
from config.env import is_installed
from config.errors import ConfigError
from config.model import ModelConfig, read_model_config

EMULATED_CONTEXT = 512
"""Tokens of a context on the emulated card unless more are asked for: its warm-up computes every
bucket of every length on the host, which takes hours for a context of 8192."""


def check_device(device: str) -> None:
    """Raise ConfigError for a device that cannot be here."""
    if not is_installed("torch"):
        raise ConfigError("torch is not installed here; on a CPU: pip install 'gaudiserve[cpu]'")
    if device == "hpu" and not is_installed("habana_frameworks"):
        raise ConfigError(
            "device is 'hpu', and habana_frameworks, the runtime of Gaudi, is not installed here; "
            "without a Gaudi the devices are cpu and hpu-emulator"
        )
    if device == "cuda" and _torch_version().endswith("+cpu"):
        raise ConfigError(
            f"device is 'cuda', and torch {_torch_version()} is built for the CPU alone; install "
            "another torch, or use the device cpu"
        )


def check_checkpoint(config: EngineConfig, folder: str) -> None:
    """Raise ConfigError for a model that cannot be served, or not as `config` asks."""
    choose_max_model_len(config.max_model_len, read_model_config(folder))


def choose_max_model_len(
    asked: int | None, facts: ModelConfig, *, is_emulated: bool = False
) -> int:
    """What was asked for, or all that the checkpoint was made for; on the emulated card no more
    than EMULATED_CONTEXT. Raises ConfigError."""
    if asked is None:
        return min(facts.max_position, EMULATED_CONTEXT) if is_emulated else facts.max_position
    if asked > facts.max_position:
        raise ConfigError(
            f"max_model_len is {asked}, the checkpoint was made for {facts.max_position}: "
            f"set --max-model-len to {facts.max_position} or less"
        )
    return asked


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
