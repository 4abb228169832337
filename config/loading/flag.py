"""Flag: what is known of one setting, and the part of the configuration that it fills.

Knows no sources, and no table: config/loading/flags.py holds that.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import UnionType

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig
from config.engine import SchedulerConfig as Schedule
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.server import ServerConfig

PARTS: Mapping[str, type] = {
    "engine": EngineConfig,
    "cache": CacheConfig,
    "scheduler": Schedule,
    "buckets": BucketConfig,
    "execution": ExecutionConfig,
    "warmup": WarmupConfig,
    "emulator": EmulatorSettings,
    "server": ServerConfig,
}
NOTHING = ("auto", "none", "null")
"""Words that ask for the default of a setting which may be left open."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `part` and `field` say where its value goes."""

    part: str
    field: str
    group: str
    help: str
    name: str = ""
    """Without dashes in front; empty: the field's own name."""
    aliases: tuple[str, ...] = ()
    switches: Mapping[str, tuple[object, object]] = dataclasses.field(default_factory=dict)
    """Names that take no value: what they set, and what their `no-` form sets."""
    variables: tuple[str, ...] = ()
    """Variables read beside GAUDISERVE_<NAME>, after it."""
    variables_of_switches: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables that stand for one of `switches`; they win over `variables`."""
    choices: tuple[str, ...] = ()
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other words for a choice, or for a switch's true and false."""
    is_secret: bool = False

    @property
    def key(self) -> str:
        """The canonical name, as a flag has it: max-model-len."""
        return self.name or self.field.replace("_", "-").replace(".", "-")

    @property
    def variable(self) -> str:
        """GAUDISERVE_MAX_MODEL_LEN."""
        return f"GAUDISERVE_{self.key.replace('-', '_').upper()}"

    @property
    def kind(self) -> type:
        """bool, int, float, str or tuple (of str)."""
        return _kind(self.part, self.field)[0]

    @property
    def may_be_open(self) -> bool:
        """Whether None is a value, asking for what the device or the checkpoint has."""
        return _kind(self.part, self.field)[1]

    @property
    def default(self) -> object:
        """The field's own default; None if it has none."""
        if "." in self.field:
            return None
        found = next(f for f in fields(PARTS[self.part]) if f.name == self.field)
        return None if found.default is MISSING else found.default

    @property
    def all_switches(self) -> Mapping[str, tuple[object, object]]:
        """`switches`, and the flag's own name if it is a bool."""
        own = (self.key, *self.aliases) if self.kind is bool else ()
        return {**dict.fromkeys(own, (True, False)), **self.switches}

    @property
    def names(self) -> tuple[str, ...]:
        """Every name this setting is known by, the canonical one first."""
        return (self.key, *self.aliases, *self.switches)


def _kind(part: str, field_name: str) -> tuple[type, bool]:
    owner, _, last = field_name.rpartition(".")
    hint = typing.get_type_hints(Range if owner else PARTS[part])[last]
    if isinstance(hint, UnionType):
        (hint,) = (one for one in hint.__args__ if one is not type(None))
        return hint, True
    return typing.get_origin(hint) or hint, False
