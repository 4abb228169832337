"""The settings of vLLM for Gaudi, each with ours or the reason why there is none: for
docs/hpu-flags.md, which `python -m config.vendor_knobs` writes, and for the log at start.

Knows the table of flags; reads no source of settings.
"""

import fnmatch
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from config.loading.flag import Flag
from config.loading.flags import ACCEPTED, FLAGS
from config.loading.parser import shown_default
from config.loading.vendor_buckets import BUCKET_KNOBS
from config.loading.vendor_table import GROUPS, Knob

PATH = Path(__file__).parents[2] / "docs" / "hpu-flags.md"

HEAD = """\
# Settings of vLLM for Gaudi, and ours

<!-- Made by `python -m config.vendor_knobs`; a test holds it equal to the code. -->

Every variable of the vendor's guide and of its plug-in, with its default there. Where a flag of
ours stands beside it, the variable itself is read too, and means that flag; the flag and a variable
of our own win over it ([configuration](configuration.md) has all of ours). Where none does, one
word says why: **not built** is missing in this version, **not needed** has nothing to switch here.
Such a variable is no error: if it is set, the log says at start that it does nothing, and why.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One knob, and the flag of ours that reads its variable."""

    knob: Knob
    flag: Flag | None
    switch: str = ""
    """The switch of the flag that the variable stands for, if it is one."""


def knobs() -> Iterator[Knob]:
    """All of them, in the order of the page."""
    for group in (*GROUPS.values(), BUCKET_KNOBS):
        yield from group


def row_of(knob: Knob) -> Row:
    """The knob with its flag, if any flag reads the variable."""
    for flag in FLAGS:
        switch = flag.variables_of_switches.get(knob.variable)
        if switch is not None or knob.variable in flag.variables:
            return Row(knob, flag, switch or "")
    return Row(knob, None)


def idle_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """(variable, why) of those that are set, belong to the table, and do nothing here."""
    found = []
    for knob in knobs():
        if row_of(knob).flag is None:
            names = fnmatch.filter(environ, knob.variable)
            found += [(name, knob.reason) for name in sorted(names) if environ[name]]
    return found


def page() -> str:
    """docs/hpu-flags.md."""
    parts = [HEAD]
    for title, group in GROUPS.items():
        parts.append(f"## {title}\n\n{_table(group)}")
    parts.append(
        "## Buckets\n\nThe defaults are those of the plug-in's linear strategy, and for the two of "
        "padding those of its padding-aware one; ours are the strategy's own ([buckets]"
        "(buckets.md)). The older `PROMPT_SEQ` is read for `PROMPT_QUERY`.\n\n"
        f"{_table(BUCKET_KNOBS)}"
    )
    accepted = "".join(
        f"| `--{name}` | `{value}` | {why} |\n" for name, (value, why) in ACCEPTED.items()
    )
    parts.append(
        "## Flags of start scripts\n\n`--max-num-prefill-seqs` is `--max-prefill-batch`, "
        "`--async-scheduling` is `--overlap-depth 2`, `--split-qkv` and `--enforce-eager` are ours "
        "too. These are accepted with the one value that is true here:\n\n"
        f"| flag | value | why |\n| --- | --- | --- |\n{accepted}"
    )
    return "\n".join(parts)


def _table(group: tuple[Knob, ...]) -> str:
    lines = ["| variable | default there | here | our default | meaning |\n"]
    lines.append("| --- | --- | --- | --- | --- |\n")
    lines += [_line(row_of(knob)) for knob in group]
    return "".join(lines)


def _line(row: Row) -> str:
    knob, flag = row.knob, row.flag
    if flag is None:
        cells = [knob.reason, ""]
    else:
        name = f"`--{row.switch or flag.key}`"
        if row.switch and row.switch != flag.key:
            name += f" (`--{flag.key}`)"
        cells = [name, f"`{shown_default(flag)}`"]
    cells = [f"`{knob.variable}`", f"`{knob.default}`", *cells, knob.meaning]
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    """Write the page where it belongs."""
    PATH.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
