"""PeftConfig: the adapter_config.json of a LoRA adapter. Unsupported settings that would change the
output are rejected."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from config.errors import ConfigError
from config.expressions import FULL, MAX_EXPRESSIONS, Expressions, Unsupported
from config.json_text import Json
from config.lora.adapter_folder import CONFIG_FILE, AdapterFolder
from config.model.json_fields import MAX_COUNT, shown

logger = logging.getLogger(__name__)

Value = TypeVar("Value", int, float)

MAX_TARGETS = 65_536
"""Maximum number of names in target_modules and in target_parameters."""
ALL_LINEAR = "all-linear"

RANK_MAJOR, GROUPED = "rank_major", "grouped_by_expert"
"""Column orders of lora_B for stacked experts: by rank and then by expert, as PEFT reads them, or a
block of columns per expert."""
STACKED_PARAMETERS = ("gate_up_proj", "down_proj")
_LAYOUT, _LAYOUTS = "lora_B_layout", "unsloth_fused_expert_lora"
"""Unsloth's fields for the column order: for all parameters, and for each parameter."""

# Accepted fields; other fields must be empty.
_ACCEPTED = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "runtime_config", "target_modules", "r"),
        *("lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "peft_type"),
        # The LoRA matrices of Conv1D and linear layers have the same layout.
        "fan_in_fan_out",
        *("exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("target_parameters", "ensure_weight_tying", _LAYOUT, _LAYOUTS),
        # Learning rates, and ms-swift's training dtype.
        *("lorap_lr_ratio", "lorap_emb_lr", "lora_dtype"),
    )
)
# Initialization methods that leave the base weights unchanged when PEFT loads the adapter.
_PLAIN_INITS = (True, False, None, "true", "false", "gaussian", "orthogonal", "eva", "mica")


class Pattern(Generic[Value]):
    """Values per module, selected by regular expressions that match the end of the module path. The
    first match applies, as in get_pattern_key of peft.utils.other."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        """Raises Unsupported and ConfigError."""
        self._values: tuple[Value, ...] = tuple(values.values())
        self._expressions = Expressions(tuple(values), where, FULL, prefix=r"(?:.*\.)?")

    def value_of(self, module: str, default: Value) -> Value:
        index = self._expressions.first(module)
        return default if index is None else self._values[index]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Fields of adapter_config.json that determine how the weights are applied."""

    file: str
    """Name of the file, for errors."""
    rank: int
    alpha: float
    uses_rslora: bool
    targets: frozenset[str] | Expressions | None
    """Module names or path suffixes, or a regular expression for whole paths. None: all modules
    that the adapter has weights for."""
    ranks: Pattern[int] | None
    """Rank per module; None: the weights' shapes give the ranks, because RE2 does not support an
    expression."""
    alphas: Pattern[float]
    parameters: frozenset[str] = frozenset()
    """Names or path suffixes in target_parameters."""
    grouped: frozenset[str] = frozenset()
    """Stacked-expert parameters whose lora_B columns are GROUPED."""
    ties_weights: bool = False
    """Whether the tied output head may have weights without being in target_modules."""

    @classmethod
    def read(cls, folder: AdapterFolder) -> "PeftConfig":
        """Read the config of the adapter in `folder`. Raises ConfigError, which names the file."""
        return cls.of(folder.read_config()[1], folder.file(CONFIG_FILE))

    @classmethod
    def of(cls, fields: Json, file: str) -> "PeftConfig":
        """The config in the JSON object `fields` of `file`. Raises ConfigError like `read`."""
        _check(file, fields)
        parameters = _parameters(file, fields.get("target_parameters"))
        targets = (
            frozenset[str]()
            if parameters and fields.get("target_modules") in (None, [])
            else _targets(file, fields.get("target_modules"))
        )
        ranks = _numbers(file, "rank_pattern", fields.get("rank_pattern"), int)
        alphas = _numbers(file, "alpha_pattern", fields.get("alpha_pattern"), float)
        return cls(
            file,
            _number(file, "r", fields.get("r"), int),
            _number(file, "lora_alpha", fields.get("lora_alpha", 8), float),
            fields.get("use_rslora") is True,
            targets,
            _rank_pattern(ranks, f"rank_pattern of {file}"),
            Pattern(alphas, f"alpha_pattern of {file}"),
            parameters,
            _grouped(file, fields),
            fields.get("ensure_weight_tying") is True,
        )

    def rank_of(self, module: str, stored: int) -> int:
        """LoRA rank of `module`, a path in the base model. `stored`: rank of its weights in the
        file."""
        return stored if self.ranks is None else self.ranks.value_of(module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """LoRA scale: alpha / r, or with use_rslora alpha / sqrt(r) (arXiv 2312.03732)."""
        alpha = self.alphas.value_of(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    def selects(self, module: str) -> bool:
        """Whether `target_modules` names `module`."""
        if self.targets is None:
            return True
        if isinstance(self.targets, Expressions):
            return self.targets.first(module) is not None
        return not self.targets.isdisjoint(path_ends(module))

    def selects_parameter(self, parameter: str) -> bool:
        """Whether `target_parameters` names `parameter`."""
        return not self.parameters.isdisjoint(path_ends(parameter))


def path_ends(module: str) -> list[str]:
    """`module` and all its path suffixes: a.b.c, b.c, c."""
    parts = module.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _check(file: str, fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file} has peft_type {shown(kind)}, only LORA is supported")
    if fields.get("use_dora"):
        raise ConfigError(
            f"{file} has use_dora, which is not supported: merge the adapter into the base model "
            "(merge_and_unload) and serve the merged model"
        )
    if fields.get("bias", "none") != "none":
        raise ConfigError(f"{file} has bias {shown(fields['bias'])}, only 'none' is supported")
    if fields.get("modules_to_save"):
        raise ConfigError(
            f"{file} has modules_to_save {shown(fields['modules_to_save'])}, which is not "
            "supported: merge the adapter into the base model"
        )
    init = fields.get("init_lora_weights", True)
    init = init.lower() if isinstance(init, str) else init
    if isinstance(init, list | dict) or init not in _PLAIN_INITS:
        raise ConfigError(
            f"{file} has init_lora_weights {shown(init)}, which changes the weights of the base: "
            "save the adapter for the original base (path_initial_model_for_weight_conversion)"
        )
    for name, value in fields.items():
        if name not in _ACCEPTED and value not in (None, False, {}, [], ""):
            raise ConfigError(
                f"{file} has {shown(name)[1:-1]} {shown(value)}, which is not supported"
            )


def _number(file: str, name: str, value: object, kind: type[Value]) -> Value:
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        noun = "an integer" if kind is int else "a number"
        raise ConfigError(f"{file} has {name} {shown(value)}, it must be {noun}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{file} has {name} {shown(value)}, it must be a finite number")
    if kind is int and not 1 <= value <= MAX_COUNT:
        limit = "at least 1" if value < 1 else f"at most {MAX_COUNT}"
        raise ConfigError(f"{file} has {name} {shown(value)}, it must be {limit}")
    return kind(value)


def _targets(file: str, value: object) -> frozenset[str] | Expressions | None:
    if isinstance(value, str) and value:
        if value.lower() == ALL_LINEAR:
            return None
        try:
            return Expressions((value,), f"target_modules of {file}", FULL)
        except Unsupported as error:
            # PEFT stores weights only for targeted modules.
            logger.warning("%s; the modules are taken from the adapter's weights", error)
            return None
    if isinstance(value, list) and value:
        return _names(file, "target_modules", value)
    raise ConfigError(
        f"{file} has target_modules {shown(value)}, it must be a string or a list of strings"
    )


def _parameters(file: str, value: Any) -> frozenset[str]:
    return frozenset() if value is None else _names(file, "target_parameters", value)


def _grouped(file: str, fields: Json) -> frozenset[str]:
    """PeftConfig.grouped. Unsloth before release 2026.9.6 groups columns without a field that says
    so."""
    mapping = fields.get("auto_mapping")
    mapping = mapping if isinstance(mapping, dict) else {}
    for source in (fields, mapping):
        detail = source.get(_LAYOUTS)
        parameters = detail.get("parameters") if isinstance(detail, dict) else None
        if isinstance(parameters, dict):
            layouts = {
                name: entry.get(_LAYOUT) if isinstance(entry, dict) else entry
                for name, entry in parameters.items()
            }
        elif source.get(_LAYOUT) is not None:
            layouts = dict.fromkeys(STACKED_PARAMETERS, source[_LAYOUT])
        else:
            continue
        for name, layout in layouts.items():
            if layout not in (RANK_MAJOR, GROUPED):
                raise ConfigError(
                    f"{file} has {_LAYOUT} {shown(layout)} of {shown(name)[1:-1]}, it must be "
                    f"{RANK_MAJOR} or {GROUPED}"
                )
        return frozenset(name for name, layout in layouts.items() if layout == GROUPED)
    is_unmarked = fields.get("target_parameters") and mapping.get("unsloth_fixed")
    return frozenset(STACKED_PARAMETERS if is_unmarked else ())


def _names(file: str, field: str, value: object) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{file} has {field} {shown(value)}, it must be a list of strings")
    if len(value) > MAX_TARGETS:
        raise ConfigError(f"{file} has {len(value)} {field}, at most {MAX_TARGETS} are allowed")
    return frozenset(value)


def _numbers(file: str, name: str, value: Any, kind: type[Value]) -> dict[str, Value]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file} has {name} {shown(value)}, it must be an object")
    if len(value) > MAX_EXPRESSIONS:
        raise ConfigError(
            f"{file} has {name} for {len(value)} modules, at most {MAX_EXPRESSIONS} are allowed"
        )
    return {
        key: _number(file, f"{name} of {shown(key)[1:-1]}", value, kind)
        for key, value in value.items()
    }


def _rank_pattern(ranks: Mapping[str, int], where: str) -> Pattern[int] | None:
    try:
        return Pattern(ranks, where)
    except Unsupported as error:
        logger.warning("%s; the ranks are taken from the shapes of its weights", error)
        return None
