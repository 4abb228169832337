"""What can be refused before any process is started: a device by what is installed, a context by
what the checkpoint says. Loads no torch and touches no device."""

import importlib.metadata
from pathlib import Path

from config.checkpoint.shapes import check_weights
from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.env import is_installed
from config.model.model_config import BLOCKS, ModelConfig, read_model_config
from config.model.pooler import PoolerConfig, choose_pooler

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
    facts = read_model_config(folder)
    pooler = choose_pooler(config, facts)
    choose_context(config, facts, pooler)
    if config.quantization is not None and pooler is not None:
        raise ConfigError(
            f"quantization is {config.quantization}, and {folder} is served for pooling, where "
            "weights keep their bits"
        )
    if config.quantization == "gguf" and not (Path(folder) / BLOCKS).is_file():
        raise ConfigError(
            f"quantization is gguf, and {folder} was made from no GGUF file: give one as the model"
        )
    check_weights(facts, pooler)


def choose_context(config: EngineConfig, facts: ModelConfig, pooler: PoolerConfig | None) -> int:
    """Tokens of the longest sequence that is served: what was asked for, or else all that the
    checkpoint was made for. A pooling model reads a text in one step, so that no more fits than
    max_num_batched_tokens; of its own it takes no more than sentence-transformers would read.
    Raises ConfigError."""
    is_emulated = config.device == "hpu-emulator"
    longest = choose_max_model_len(config.max_model_len, facts, is_emulated=is_emulated)
    if pooler is None:
        return longest
    budget = config.scheduler.max_num_batched_tokens
    if config.max_model_len is None:
        return min(longest, budget, pooler.max_tokens or longest)
    if longest > budget:
        raise ConfigError(
            f"max_model_len is {longest} and max_num_batched_tokens is {budget}: a pooling model "
            "reads a text in one step, so set --max-num-batched-tokens to as many or more"
        )
    return longest


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
