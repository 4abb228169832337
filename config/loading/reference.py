"""Generates the lists of configuration.md and models.md, and the tables of hpu-flags.md and
coming-from-vllm.md in docs/: `python -m config.loading.reference`."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill

from config.checkpoint.gguf_families import FAMILIES as GGUF_FAMILIES
from config.loading.flags import FILE_FLAGS, FLAGS, GROUPS, Flag
from config.loading.vendor_variables import REASONS, VendorVariable, vendor_variables
from config.loading.vllm_flags import (
    ABSENT,
    MODEL,
    NUMBER,
    SWITCHES,
    VALUES,
    short_forms,
)
from config.model.architectures import ARCHITECTURES
from config.model.multimodal.text_part import WHOLE_MODELS

DOCS = Path(__file__).parents[2] / "docs"
_PARSERS = ("tool-call-parser", "reasoning-parser")
"""Flags whose kinds are listed in tools.md."""
_LIMITS = ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT")
_VENDOR_LIMIT = re.compile(rf"(VLLM_\w+_BUCKET)_({'|'.join(_LIMITS)})")
_LIMIT = re.compile(r"([\w-]+-bucket)-(min|step|max|pad-max|pad-percent)")
_TABLES = re.compile(r"(<!-- Tables .*? -->\n\n).*(<!-- End)", re.DOTALL)


def settings() -> str:
    """The lists of configuration.md. Settings of a group with the same values and help share an
    item."""
    groups: dict[str, dict[str, list[str]]] = {group: {} for group in GROUPS}
    for flag in FLAGS:
        if not _LIMIT.fullmatch(flag.key):
            names, text = _setting(flag)
            groups[flag.setting.group].setdefault(text, []).append(names)
    for names, text in _ranges():
        groups["Buckets"].setdefault(text, []).append(names)
    groups["Files"] = {f": {text}": [f"`--{name} FILE`"] for name, text in FILE_FLAGS.items()}
    lists = {
        group: "".join(f"* {', '.join(names)}{text}\n" for text, names in items.items())
        for group, items in groups.items()
    }
    return "".join(f"## {group}\n\n{items}\n" for group, items in lists.items())


def _setting(flag: Flag) -> tuple[str, str]:
    """The names of a flag; its default, other values and help."""
    setting = flag.setting
    names = [f"--{name}" for name in (flag.key, *setting.aliases)]
    names[1:1] = short_forms([f"--{name}" for name in flag.names])
    others = [value for value in setting.choices if value != flag.shown_default]
    is_absent = flag.shown_default in ("", "none", "off", "auto") and not others
    values = "" if is_absent else f"`{flag.shown_default}`"
    if others and flag.key not in _PARSERS:
        values += f"; {listed(others)}"
    text = setting.help
    if flag.key in _PARSERS:
        text += "; [names](tools.md#parsers)"
    if setting.switches:
        text += f"; switch {listed(f'--{name}' for name in setting.switches)}"
    if others := [name for name in setting.variables if name not in _vendor_names()]:
        text += f"; variable {listed(others)}"
    return listed(names), f"{f' ({values})' if values else ''}: {text}"


def _ranges() -> Iterator[tuple[str, str]]:
    """For each bucket range the flags of its limits, and their help. The default is auto."""
    limits: dict[str, list[Flag]] = {}
    for flag in FLAGS:
        if found := _LIMIT.fullmatch(flag.key):
            limits.setdefault(found[1], []).append(flag)
    for stem, flags in limits.items():
        smallest = flags[0]
        text = smallest.setting.help.removeprefix("Smallest ").partition(";")[0].capitalize()
        if len(smallest.names) > 1:
            text += f"; also `--{smallest.names[1]}` and so on"
        endings = [f"`-{flag.key.removeprefix(f'{stem}-')}`" for flag in flags[1:]]
        names = ", ".join([f"`--{smallest.key}`", *endings])
        yield names, f": {text}"


def _vendor_names() -> set[str]:
    return {variable.name for variable in vendor_variables()}


def variables() -> str:
    """The lists and the table of hpu-flags.md."""
    read = [
        f"`{variable.name}`{_default(variable)}: {_flag_of(*variable.flag)}"
        for variable in vendor_variables()
        if variable.flag and not _VENDOR_LIMIT.fullmatch(variable.name)
    ]
    parts = [
        f"## Variables that set a flag\n\nvLLM's default is in brackets, unless it is off.\n\n"
        f"{list_of(read)}\n",
        f"## Variables of bucket ranges\n\nThe cells are vLLM's defaults.\n\n{_vendor_ranges()}\n",
        "## Variables without a flag\n\n",
    ]
    for word in REASONS:
        names: dict[str, list[str]] = {}
        for variable in vendor_variables():
            kind, _, text = variable.reason.partition(": ")
            if kind == word:
                names.setdefault(text, []).append(variable.name)
        unread = [f"{listed(equal)}: {text}" for text, equal in names.items()]
        parts.append(f"### {word.capitalize()}\n\n{list_of(unread)}\n")
    return "".join(parts)


def _default(variable: VendorVariable) -> str:
    return "" if variable.default in ("false", "0", "unset") else f" ({variable.default})"


def _flag_of(flag: Flag, name: str) -> str:
    return f"`--{name}`" + ("" if name == flag.key else f" (`--{flag.key}`)")


def _vendor_ranges() -> str:
    """Table of the limits of bucket ranges; each variable sets the flag of the same name."""
    heads = ("variable", *(ending.lower().replace("_", " ") for ending in _LIMITS))
    ranges: dict[str, list[str]] = {}
    for variable in vendor_variables():
        if found := _VENDOR_LIMIT.fullmatch(variable.name):
            ranges.setdefault(found[1], []).append(f"`{variable.default}`")
    return table_of(heads, [(f"`{stem}_*`", *defaults) for stem, defaults in ranges.items()])


def vllm_flags() -> str:
    """The lists of flags of coming-from-vllm.md. The reasons are in a log line and in errors."""
    accepted: dict[str, list[str]] = {}
    for names, values, _ in (*VALUES, *SWITCHES):
        shown = " or ".join(map(_value, filter(None, values))) or "any"
        accepted.setdefault(shown, []).append(_flags(names))
    rows = [(shown, ", ".join(flags)) for shown, flags in accepted.items()]
    absent = ", ".join(_flags(names) for names, _ in ABSENT)
    return (
        f"### Accepted without effect\n\n{table_of(('value', 'flags'), rows)}\n"
        f"### Not in this version\n\n{fill(absent, 110, break_on_hyphens=False)}.\n\n"
    )


def models() -> str:
    """The lists of models.md."""
    in_gguf = {
        name: stored for stored, gguf in GGUF_FAMILIES.items() for name in (gguf.name, *gguf.others)
    }
    dense: list[str] = []
    experts: list[str] = []
    for name, family in ARCHITECTURES.items():
        names = f"`{name}`, `{in_gguf[name]}`" if name in in_gguf else f"`{name}`"
        limits = f"; {family.limits}" if family.limits else ""
        lines = experts if family.moe else dense
        lines.append(f"* {family.models}: {names}{limits}\n")
    whole = fill(listed(sorted(WHOLE_MODELS)), 110, break_on_hyphens=False)
    return (
        f"### Dense models\n\n{_by_model(dense)}\n"
        f"### Mixtures of experts\n\n{_by_model(experts)}\n"
        f"### Models with images or audio\n\nAt least the text model of these architectures is "
        f"served; [vision models](vision-models.md) says which\ntake images.\n\n{whole}.\n\n"
    )


def _by_model(lines: Iterable[str]) -> str:
    """The lines in alphabetical order of the models' names."""
    return "".join(sorted(lines, key=str.lower))


def _flags(names: str) -> str:
    return listed(f"--{name}" for name in names.split())


def _value(word: str) -> str:
    return word if word in (MODEL, NUMBER) else f"`{word}`"


def listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def table_of(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |\n" for line in (heads, *rows))
    return "".join((head, f"|{'---|' * len(heads)}\n", *lines))


def list_of(lines: Iterable[str]) -> str:
    return "".join(f"* {line}\n" for line in lines)


def with_text(page: str, text: str) -> str:
    """`page` with `text` between the comments that mark its tables."""
    return _TABLES.sub(lambda marks: marks[1] + text + marks[2], page)


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": settings,
    "hpu-flags.md": variables,
    "coming-from-vllm.md": vllm_flags,
    "models.md": models,
}


def with_tables(name: str) -> str:
    """The page with its tables regenerated."""
    return with_text((DOCS / name).read_text(encoding="utf-8"), PAGES[name]())


def main() -> int:
    """Write the tables."""
    for name in PAGES:
        (DOCS / name).write_text(with_tables(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
