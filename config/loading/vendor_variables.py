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
# Every start reads the file, and the pure-Python loader takes ten times as long as libyaml's.
SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
RUNTIME = "runtime"
"""Reason for variables that the vendor's runtime reads, which do have an effect."""
REASONS = ("not supported", "not needed", "instead", RUNTIME)


@dataclass(frozen=True, slots=True)
class VendorVariable:
    """An environment variable of vLLM or of its Gaudi plug-in."""

    name: str
    """Name of the variable. A trailing * matches any ending."""
    default: str = ""
    """vLLM's default, in vLLM's notation; empty if no flag reads the variable."""
    reason: str = ""
    """A word of REASONS, followed by text; empty if a flag reads the variable."""

    @property
    def flag(self) -> tuple[Flag, str] | None:
        """(flag that reads this variable, name of the switch that the variable sets, otherwise the
        flag's key); None if no flag reads the variable."""
        for flag in FLAGS:
            switch = flag.setting.switch_variables.get(self.name)
            if switch is not None or self.name in flag.setting.variables:
                return flag, switch or flag.key
        return None


@functools.cache
def vendor_variables() -> tuple[VendorVariable, ...]:
    """All variables, in the order of vendor_variables.yaml."""
    groups = yaml.load(DATA.read_text(encoding="utf-8"), Loader=SafeLoader)
    return tuple(
        VendorVariable(
            name,
            facts.get("default", ""),
            next((f"{word}: {facts[word]}" for word in REASONS if word in facts), ""),
        )
        for variables in groups.values()
        for name, facts in variables.items()
    )


def ignored_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of vLLM and its Gaudi plug-in that are set but have no effect here -> reason."""
    read = variable_table()
    unread = [
        name
        for name, word in sorted(environ.items())
        if word and name not in read and not is_service_link(name, word)
    ]
    reasons = {
        name: variable.reason
        for variable in vendor_variables()
        if variable.reason and not variable.reason.startswith(RUNTIME)
        for name in fnmatch.filter(unread, variable.name)
    }
    unknown = [name for name in unread if name.startswith("VLLM_") and name not in reasons]
    return {**reasons, **dict.fromkeys(unknown, "gaudiserve does not know this variable")}
