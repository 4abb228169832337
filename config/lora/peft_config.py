"""PeftConfig: the adapter_config.json of a LoRA adapter. Settings that would change the output and
are not supported are refused."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from config.errors import ConfigError
from config.expressions import FULL, MAX_EXPRESSIONS, Expressions, Unsupported
from config.lora.adapter_folder import CONFIG_FILE, AdapterFolder
from config.model.json_fields import MAX_COUNT, Json, shown

logger = logging.getLogger(__name__)

Value = TypeVar("Value", int, float)

MAX_TARGETS = 65_536
"""Maximum number of names in target_modules and in target_parameters."""
ALL_LINEAR = "all-linear"

RANK_MAJOR, GROUPED = "rank_major", "grouped_by_expert"
"""Orders of the columns of lora_B of stacked experts: by rank and then by expert, as PEFT reads
them, or a block of columns for each expert."""
STACKED_PARAMETERS = ("gate_up_proj", "down_proj")
_LAYOUT, _LAYOUTS = "lora_B_layout", "unsloth_fused_expert_lora"
"""Unsloth's fields for the column order: for all parameters together, and for each parameter."""

# Fields about the training, which have no effect on the weights.
_INFORMATION = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "runtime_config", "target_modules", "r"),
        *("lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "peft_type"),
        # Conv1D layers and linear layers have the same low-rank weights.
        "fan_in_fan_out",
        *("exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("target_parameters", "ensure_weight_tying", _LAYOUT, _LAYOUTS),
        # Learning rates, and ms-swift's training dtype.
        *("lorap_lr_ratio", "lorap_emb_lr", "lora_dtype"),
    )
)
# Initializations that leave the base weights unchanged.
_PLAIN_INITS = (
    *(True, False, None, "true", "false", "gaussian", "orthogonal", "eva", "lora_ga", "mica"),
)


class Pattern(Generic[Value]):
    """Per-module values, selected by regular expressions that match the end of a module's path. The
    first match counts, as in get_pattern_key of peft.utils.other."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        """Raises Unsupported and ConfigError."""
        self._values: tuple[Value, ...] = tuple(values.values())
        self._expressions = Expressions(tuple(values), where, FULL, prefix=r"(?:.*\.)?")

    def value_of(self, module: str, default: Value) -> Value:
        index = self._expressions.first(module)
        return default if index is None else self._values[index]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Fields of adapter_config.json that determine what the weights mean."""

    file: str
    """Name of the file in errors."""
    rank: int
    alpha: float
    uses_rslora: bool
    targets: frozenset[str] | Expressions | None
    """Names of modules or the ends of their paths, or a regular expression for whole paths. None:
    all modules that the adapter has weights for."""
    ranks: Pattern[int] | None
    """Rank per module; None: ranks come from the weights' shapes, since an expression is not
    supported by RE2."""
    alphas: Pattern[float]
    parameters: frozenset[str] = frozenset()
    """Names of parameters that stack experts, or the ends of their paths."""
    grouped: frozenset[str] = frozenset()
    """Parameters that stack experts whose columns of lora_B are GROUPED."""
    ties_weights: bool = False
    """Whether the head gets the weights of the embedding that it is tied to."""

    @classmethod
    def read(cls, folder: AdapterFolder) -> "PeftConfig":
        """Read the config of the adapter in `folder`. Raises ConfigError, with the file, for
        settings that cannot be served."""
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
        """Rank of the adapter of `module`, a path in the base model. `stored`: the rank of its
        weights in the file."""
        return stored if self.ranks is None else self.ranks.value_of(module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Factor of the low-rank product: alpha / r, or alpha / sqrt(r) (arXiv 2312.03732)."""
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
    """The path of a module, and its suffix after each dot."""
    parts = module.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _check(file: str, fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file} says peft_type {shown(kind)}, only LORA is served")
    if fields.get("use_dora"):
        raise ConfigError(
            f"{file} says use_dora: the adapter is DoRA, whose weights depend on those of the "
            "base; merge it into the base (merge_and_unload) and serve that"
        )
    if fields.get("bias", "none") != "none":
        raise ConfigError(f"{file} says bias {shown(fields['bias'])}, only 'none' is served")
    if fields.get("modules_to_save"):
        raise ConfigError(
            f"{file} says modules_to_save {shown(fields['modules_to_save'])}: whole modules are no "
            "low-rank weights; merge the adapter into the base"
        )
    init = fields.get("init_lora_weights", True)
    init = init.lower() if isinstance(init, str) else init
    if isinstance(init, list | dict) or init not in _PLAIN_INITS:
        raise ConfigError(
            f"{file} says init_lora_weights {shown(init)}, which changes the weights of the base: "
            "save the adapter for the original base (path_initial_model_for_weight_conversion)"
        )
    for name, value in fields.items():
        if name not in _INFORMATION and value not in (None, False, {}, [], ""):
            raise ConfigError(
                f"{file} says {shown(name)[1:-1]} {shown(value)}, which is not understood"
            )


def _number(file: str, name: str, value: Any, kind: type[Value]) -> Value:
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ConfigError(f"{file} says {name} {shown(value)}, it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{file} says {name} {shown(value)}, it must be a finite number")
    if kind is int and not 1 <= value <= MAX_COUNT:
        limit = "at least 1" if value < 1 else f"at most {MAX_COUNT}"
        raise ConfigError(f"{file} says {name} {shown(value)}, it must be {limit}")
    return kind(value)


def _targets(file: str, value: Any) -> frozenset[str] | Expressions | None:
    if isinstance(value, str) and value:
        if value.lower() == ALL_LINEAR:
            return None
        try:
            return Expressions((value,), f"target_modules of {file}", FULL)
        except Unsupported as error:
            # PEFT stores weights only for the modules that it names.
            logger.warning("%s; the adapter's weights tell its modules", error)
            return None
    if isinstance(value, list) and value:
        return _names(file, "target_modules", value)
    raise ConfigError(
        f"{file} says target_modules {shown(value)}, it must be a text or a list of texts"
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
                    f"{file} says {_LAYOUT} {shown(layout)} of {shown(name)[1:-1]}, it must be "
                    f"{RANK_MAJOR} or {GROUPED}"
                )
        return frozenset(name for name, layout in layouts.items() if layout == GROUPED)
    is_unmarked = fields.get("target_parameters") and mapping.get("unsloth_fixed")
    return frozenset(STACKED_PARAMETERS if is_unmarked else ())


def _names(file: str, field: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{file} says {field} {shown(value)}, it must be a list of texts")
    if len(value) > MAX_TARGETS:
        raise ConfigError(f"{file} says {len(value)} {field}, at most {MAX_TARGETS} are read")
    return frozenset(value)


def _numbers(file: str, name: str, value: Any, kind: type[Value]) -> dict[str, Value]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file} says {name} {shown(value)}, it must be an object")
    if len(value) > MAX_EXPRESSIONS:
        raise ConfigError(
            f"{file} says {name} of {len(value)} modules, at most {MAX_EXPRESSIONS} are read"
        )
    return {
        key: _number(file, f"{name} of {shown(key)[1:-1]}", value, kind)
        for key, value in value.items()
    }


def _rank_pattern(ranks: Mapping[str, int], where: str) -> Pattern[int] | None:
    try:
        return Pattern(ranks, where)
    except Unsupported as error:
        logger.warning("%s; the shapes of the adapter's weights tell its ranks", error)
        return None
