"""Environment variables of vLLM for Gaudi (vendor_variables.yaml) and the flags that read them: for
docs/hpu-flags.md, which `python -m config.loading.vendor_variables` writes, and the log at start.
"""

import fnmatch
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from config.loading.env import is_service_link, variable_table
from config.loading.flags import FLAGS, Flag

DATA = Path(__file__).with_suffix(".yaml")
PATH = Path(__file__).parents[2] / "docs" / "hpu-flags.md"
REASONS = ("not built", "not needed", "instead")

HEAD = """\
# Settings of vLLM for Gaudi, and ours

<!-- Made by `python -m config.loading.vendor_variables`; a test holds it equal to the code. -->

Every variable of the vendor's guide and of its plug-in, with its default there, and at the end
those of vLLM itself that start scripts set. If the table has a flag of ours, the variable is read
and sets that flag; the flag and our own variable win over it ([configuration](configuration.md)
lists all of ours). Otherwise the table has the reason: **not built** is missing in this version,
**not needed** has nothing to switch here, **instead** names what to use. Such a variable is no
error: a line of the log at start names all that are set and have no effect, and why.
"""
NOTES = {
    "Buckets": "The defaults are those of the plug-in's linear strategy, and for the padding "
    "limits those of its padding-aware one; ours depend on the strategy ([buckets](buckets.md)). "
    "The older `PROMPT_SEQ` sets `PROMPT_QUERY`.\n\n"
}


@dataclass(frozen=True, slots=True)
class VendorVariable:
    """One environment variable of vLLM for Gaudi."""

    group: str
    name: str
    """A trailing * matches any ending."""
    default: str
    """vLLM's, as written there."""
    meaning: str
    reason: str = ""
    """`not needed: ...` or `not built: ...`; empty where a flag of ours reads the variable."""

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
    """All of them, in the order of the page."""
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


def page() -> str:
    """docs/hpu-flags.md."""
    parts = [HEAD]
    for group in dict.fromkeys(variable.group for variable in vendor_variables()):
        rows = "".join(_row(one) for one in vendor_variables() if one.group == group)
        parts.append(
            f"## {group}\n\n{NOTES.get(group, '')}"
            "| variable | default there | here | our default | meaning |\n"
            f"| --- | --- | --- | --- | --- |\n{rows}"
        )
    parts.append(
        "## Flags of start scripts\n\n`--max-num-prefill-seqs` is `--max-prefill-batch`, "
        "`--async-scheduling` is `--overlap-depth 2`, `--split-qkv` and `--enforce-eager` are ours "
        "too. [Coming from vLLM](coming-from-vllm.md) has all others.\n"
    )
    return "\n".join(parts)


def _row(variable: VendorVariable) -> str:
    if variable.flag is None:
        ours = [variable.reason, ""]
    else:
        flag, name = variable.flag
        alias = "" if name == flag.key else f" (`--{flag.key}`)"
        ours = [f"`--{name}`{alias}", f"`{flag.shown_default}`"]
    cells = [f"`{variable.name}`", f"`{variable.default}`", *ours, variable.meaning]
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    """Write the page."""
    PATH.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
