"""PeftConfig: what the adapter_config.json of a LoRA adapter says. Everything that would change
the output and is not understood is refused."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.model.json_fields import read_json

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"

# What training was like, and what says nothing about the weights.
_INFORMATION = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "runtime_config", "target_modules", "r"),
        *("lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "peft_type"),
        # Of Conv1D layers, whose low-rank weights are those of a linear layer.
        "fan_in_fan_out",
        *("exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    )
)
# Initialisations that leave the weights of the base as they are.
_PLAIN_INITS = (True, False, None, "true", "false", "gaussian", "orthogonal", "eva", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that say what the weights mean."""

    file: Path
    rank: int
    alpha: float
    uses_rslora: bool
    targets: str | tuple[str, ...]
    """Names of modules, or the ends of their paths; or one regular expression for whole paths; or
    ALL_LINEAR."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Raises ConfigError, with the file, for what cannot be served."""
        file = folder / CONFIG_FILE
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not there, an adapter is a folder with {CONFIG_FILE}")
        if not file.is_file():
            raise ConfigError(f"{folder} has no {CONFIG_FILE}, so it is no adapter of PEFT")
        fields = read_json(file)
        _check(file, fields)
        return cls(
            file,
            _number(file, "r", fields.get("r"), int),
            _number(file, "lora_alpha", fields.get("lora_alpha", 8), float),
            fields.get("use_rslora") is True,
            _targets(file, fields.get("target_modules")),
            _pattern(file, "rank_pattern", fields.get("rank_pattern"), int),
            _pattern(file, "alpha_pattern", fields.get("alpha_pattern"), float),
        )

    def rank_of(self, module: str) -> int:
        """Of the adapter of `module`, a path in the base model."""
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What its product is multiplied by: alpha / r, or alpha / sqrt(r) (arXiv 2312.03732)."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.uses_rslora else rank))

    @property
    def max_rank(self) -> int:
        return max((self.rank, *self.rank_pattern.values()))

    def selects(self, module: str) -> bool:
        """Whether `target_modules` names `module`."""
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.targets)


def _check(file: Path, fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file} says peft_type {kind!r}, only LORA is served")
    if fields.get("use_dora"):
        raise ConfigError(
            f"{file} says use_dora: the adapter is DoRA, whose weights depend on those of the "
            "base; merge it into the base (merge_and_unload) and serve that"
        )
    if fields.get("bias", "none") != "none":
        raise ConfigError(f"{file} says bias {fields['bias']!r}, only 'none' is served")
    if fields.get("modules_to_save"):
        raise ConfigError(
            f"{file} says modules_to_save {fields['modules_to_save']}: whole modules are no "
            "low-rank weights; merge the adapter into the base"
        )
    init = fields.get("init_lora_weights", True)
    init = init.lower() if isinstance(init, str) else init
    if init not in _PLAIN_INITS:
        raise ConfigError(
            f"{file} says init_lora_weights {init!r}, which changes the weights of the base: save "
            "the adapter for the original base (path_initial_model_for_weight_conversion)"
        )
    for name, value in fields.items():
        if name not in _INFORMATION and value not in (None, False, {}, [], ""):
            raise ConfigError(f"{file} says {name} {value!r}, which is not understood")


def _number(file: Path, name: str, value: Any, kind: type[int] | type[float]) -> Any:
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        raise ConfigError(f"{file} says {name} {value!r}, it must be a number")
    if kind is int and value < 1:
        raise ConfigError(f"{file} says {name} {value}, it must be at least 1")
    return kind(value)


def _targets(file: Path, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        if value.lower() == ALL_LINEAR:
            return ALL_LINEAR
        _check_expression(file, "target_modules", value)
        return value
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise ConfigError(f"{file} says target_modules {value!r}, it must be a text or a list of texts")


def _pattern(file: Path, name: str, value: Any, kind: type[int] | type[float]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file} says {name} {value!r}, it must be an object")
    for key in value:
        _check_expression(file, name, key)
    return {key: _number(file, f"{name} of {key}", one, kind) for key, one in value.items()}


def _check_expression(file: Path, name: str, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ConfigError(
            f"{file} says {name} {value!r}, which is no regular expression: {error}"
        ) from None


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """As peft.utils.other.get_pattern_key: the first pattern that is the path's end."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
