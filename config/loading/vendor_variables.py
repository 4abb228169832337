"""Environment variables of vLLM and of its Gaudi plug-in (vendor_variables.yaml), and the flags
that read them."""

import fnmatch
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from config.loading.env import is_service_link, variable_table
from config.loading.flags import FLAGS, Flag

DATA = Path(__file__).with_suffix(".yaml")
REASONS = ("not built", "not needed", "instead")


@dataclass(frozen=True, slots=True)
class VendorVariable:
    """One environment variable of vLLM."""

    group: str
    name: str
    """A trailing * matches any ending."""
    default: str
    """vLLM's, as written there."""
    meaning: str
    reason: str = ""
    """One of REASONS and its text; empty where a flag of ours reads the variable."""

    @property
    def flag(self) -> tuple[Flag, str] | None:
        """The flag that reads this variable, and the switch of it that the variable sets."""
        for flag in FLAGS:
            switch = flag.setting.switch_variables.get(self.name)
            if switch is not None or self.name in flag.setting.variables:
                return flag, switch or flag.key
        return None


@functools.cache
def vendor_variables() -> tuple[VendorVariable, ...]:
    """All of them, in the order of docs/hpu-flags.md."""
    groups = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return tuple(
        VendorVariable(
            group,
            name,
            facts["default"],
            facts["meaning"],
            next((f"{word}: {facts[word]}" for word in REASONS if word in facts), ""),
        )
        for group, variables in groups.items()
        for name, facts in variables.items()
    )


def ignored_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """vLLM's variables that are set and have no effect here -> why."""
    read = variable_table()
    unread = [
        name
        for name, word in sorted(environ.items())
        if word and name not in read and not is_service_link(name, word)
    ]
    reasons = {
        name: variable.reason
        for variable in vendor_variables()
        if variable.reason
        for name in fnmatch.filter(unread, variable.name)
    }
    unknown = [name for name in unread if name.startswith("VLLM_") and name not in reasons]
    return {**reasons, **dict.fromkeys(unknown, "not known here")}
