"""The flags of a server, derived from the settings on the config dataclass fields."""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from types import UnionType

from config.buckets import BucketConfig, Range
from config.data_parallel import DataParallelConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.parallel import ParallelConfig
from config.params.lora import LoRAConfig
from config.params.offload import OffloadConfig
from config.params.speculation import SpeculationConfig
from config.server import ServerConfig
from config.setting import Setting, settings_of

PARTS: Mapping[str, tuple[type, str]] = {
    "engine": (EngineConfig, "Model"),
    "data_parallel": (DataParallelConfig, "Parallelism"),
    "cache": (CacheConfig, "KV cache"),
    "offload": (OffloadConfig, "Offloading"),
    "parallel": (ParallelConfig, "Parallelism"),
    "scheduler": (SchedulerConfig, "Scheduling"),
    "speculation": (SpeculationConfig, "Speculation"),
    "buckets": (BucketConfig, "Buckets"),
    "execution": (ExecutionConfig, "Execution on HPU"),
    "warmup": (WarmupConfig, "Warm-up"),
    "emulator": (EmulatorSettings, "Emulator"),
    "lora": (LoRAConfig, "LoRA"),
    "server": (ServerConfig, "HTTP"),
}
"""Part of the configuration -> its dataclass, and the help group of its settings."""
GROUPS = (
    *(
        "Model",
        "Device",
        "Parallelism",
        "KV cache",
        "Offloading",
        "Scheduling",
        "Speculation",
        "Buckets",
    ),
    *("Execution on HPU", "Warm-up", "Diagnostics", "Emulator", "LoRA", "HTTP", "TLS", "Text"),
    *("Images", "Logs"),
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A config field exposed as a flag."""

    part: str
    field: str
    """Name of the field; `dimension.limit` for a limit of a Range."""
    setting: Setting
    kind: type
    """Type of the value: bool, int, float, str or tuple (of str)."""
    is_optional: bool
    """Whether None is allowed (auto or none in the help)."""
    default: object
    """Default value; also None if the field has no default."""

    @property
    def key(self) -> str:
        """Canonical flag name, such as max-model-len."""
        return self.setting.name or self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable, such as GAUDISERVE_MAX_MODEL_LEN."""
        return variable_of(self.key)

    @property
    def all_switches(self) -> Mapping[str, tuple[object, object]]:
        """The setting's switches, and for a bool also the flag's own names."""
        names = (self.key, *self.setting.aliases) if self.kind is bool else ()
        return {**dict.fromkeys(names, (True, False)), **self.setting.switches}

    @property
    def names(self) -> tuple[str, ...]:
        """All names of this setting, the canonical name first."""
        return (self.key, *self.setting.aliases, *self.setting.switches)

    def shown(self, value: object) -> str:
        """`value` as the help shows it and a flag accepts it."""
        if value is None:
            return "none" if self.kind is str else "auto"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ", ".join(map(str, value)) or "none"
        if isinstance(value, float):
            return f"{value:g}"
        return str(value)

    @property
    def shown_default(self) -> str:
        """The default for the help: large sizes have a unit (64M). Empty if the default is an empty
        string."""
        if self.field == "model":
            return "the demo model"
        if self.kind is int and isinstance(self.default, int):
            return _with_unit(self.default)
        return self.shown(self.default)


def _with_unit(count: int) -> str:
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= 2**16 and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def variable_of(name: str) -> str:
    """The environment variable of a flag, such as GAUDISERVE_MAX_MODEL_LEN."""
    return f"GAUDISERVE_{name.replace('-', '_').upper()}"


def _flags() -> Iterator[Flag]:
    for part, (owner, group) in PARTS.items():
        hints = typing.get_type_hints(owner)
        defaults = {field.name: field.default for field in fields(owner)}
        for name, setting in settings_of(owner).items():
            setting = replace(setting, group=setting.group or group)
            if hints[name] is Range:
                yield from _range_flags(part, name, setting)
                continue
            kind, is_optional = hints[name], False
            if isinstance(kind, UnionType):
                (kind,) = (member for member in kind.__args__ if member is not type(None))
                is_optional = True
            default = None if defaults[name] is MISSING else defaults[name]
            yield Flag(part, name, setting, typing.get_origin(kind) or kind, is_optional, default)


_LIMITS = {
    "min": "Smallest number of",
    "step": "Step of the number of",
    "max": "Largest number of",
    "pad_max": "padding-aware: largest padding of",
    "pad_percent": "padding-aware: largest padding, in percent of the bucket, of",
}


def _range_flags(part: str, field: str, setting: Setting) -> Iterator[Flag]:
    """The five flags of a Range, and vLLM's variables for them."""
    for limit, words in _LIMITS.items():
        end = f"-bucket-{limit.replace('_', '-')}"
        aliases = tuple(f"{name}{end}" for name in setting.aliases)
        bound = Setting(
            f"{words} {setting.help}; auto: the strategy's default",
            group=setting.group,
            name=f"{setting.name}{end}",
            aliases=aliases,
            variables=tuple(
                f"VLLM_{name}".replace("-", "_").upper()
                for name in (f"{setting.name}{end}", *aliases)
            ),
        )
        yield Flag(part, f"{field}.{limit}", bound, int, True, None)


FLAGS: tuple[Flag, ...] = tuple(sorted(_flags(), key=lambda flag: GROUPS.index(flag.setting.group)))

FILE_FLAGS: Mapping[str, str] = {
    "config": "YAML file with any of these settings; flags and variables take precedence",
}
"""Flags that name a file to read; they are not config fields."""
