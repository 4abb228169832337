"""Writes the tables of four pages of docs/: `python -m config.loading.reference`."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import fill

from config.checkpoint.gguf_families import FAMILIES as GGUF_FAMILIES
from config.loading.flags import FILE_FLAGS, FLAGS, GROUPS, Flag, variable_of
from config.loading.vendor_variables import VendorVariable, vendor_variables
from config.loading.vllm_flags import ABSENT, MODEL, NUMBER, SHORT_FORMS, SWITCHES, VALUES
from config.model.architectures import ARCHITECTURES
from config.model.multimodal.text_part import WHOLE_MODELS

DOCS = Path(__file__).parents[2] / "docs"
_TABLES = re.compile(r"(<!-- Tables .*? -->\n\n).*(<!-- End)", re.DOTALL)


def settings() -> str:
    """The tables of configuration.md."""
    heads = ("flag", "default", "what it does", "variables")
    groups = {
        group: [_setting(flag) for flag in FLAGS if flag.setting.group == group] for group in GROUPS
    }
    groups["Files"] = [
        (f"`--{name} FILE`", "none", text, f"`{variable_of(name)}`")
        for name, text in FILE_FLAGS.items()
    ]
    return "".join(f"## {group}\n\n{_table(heads, rows)}\n" for group, rows in groups.items())


def _setting(flag: Flag) -> tuple[str, ...]:
    setting = flag.setting
    text = setting.help
    if setting.choices:
        text += f": {_listed(setting.choices)}"
    if len(flag.names) > 1:
        text += f"; also {_listed(f'--{name}' for name in flag.names[1:])}"
    names = (flag.variable, *setting.variables, *setting.switch_variables)
    return f"`--{flag.key}`", f"`{flag.shown_default}`", text, _listed(names)


def variables() -> str:
    """The tables of hpu-flags.md."""
    heads = ("variable", "default there", "here", "our default", "meaning")
    groups: dict[str, list[tuple[str, ...]]] = {}
    for variable in vendor_variables():
        groups.setdefault(variable.group, []).append(_variable(variable))
    return "".join(f"## {group}\n\n{_table(heads, rows)}\n" for group, rows in groups.items())


def _variable(variable: VendorVariable) -> tuple[str, ...]:
    ours, default = variable.reason, ""
    if variable.flag is not None:
        flag, name = variable.flag
        ours = f"`--{name}`" + ("" if name == flag.key else f" (`--{flag.key}`)")
        default = f"`{flag.shown_default}`"
    return f"`{variable.name}`", f"`{variable.default}`", ours, default, variable.meaning


def vllm_flags() -> str:
    """The tables of coming-from-vllm.md."""
    accepted = [
        (_flags(names), " or ".join(map(_value, filter(None, values))) or "any", why)
        for names, values, why in (*VALUES, *SWITCHES)
    ]
    absent = [(_flags(names), reason) for names, reason in ABSENT]
    short = ", ".join(f"`{short}` for `{name}`" for short, name in SHORT_FORMS.items())
    return (
        f"### Accepted without effect\n\n{_table(('flag', 'value', 'why'), accepted)}\n"
        f"### Not in this version\n\n{_table(('flag', 'why, and what to use'), absent)}\n"
        f"### Short forms\n\n{fill(short, 100, break_on_hyphens=False)}.\n\n"
    )


def models() -> str:
    """The table and the list of models.md."""
    heads = ("architecture", "models", "feed-forward", "in GGUF", "limits")
    in_gguf = {
        name: stored for stored, gguf in GGUF_FAMILIES.items() for name in (gguf.name, *gguf.others)
    }
    rows = [
        (
            f"`{name}`",
            family.models,
            "dense" if family.moe is None else "experts",
            f"`{in_gguf[name]}`" if name in in_gguf else "",
            family.limits,
        )
        for name, family in ARCHITECTURES.items()
    ]
    whole = fill(_listed(sorted(WHOLE_MODELS)), 110, break_on_hyphens=False)
    return (
        f"{_table(heads, rows)}\n"
        f"The table has {len(rows)} architectures. {len(WHOLE_MODELS)} more have images or audio, "
        f"{len(rows) + len(WHOLE_MODELS)} in all: at least their text model\nis served, and the "
        f"paragraphs below say which take images.\n\n{whole}.\n\n"
    )


def _flags(names: str) -> str:
    return _listed(f"--{name}" for name in names.split())


def _value(word: str) -> str:
    return word if word in (MODEL, NUMBER) else f"`{word}`"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": settings,
    "hpu-flags.md": variables,
    "coming-from-vllm.md": vllm_flags,
    "models.md": models,
}


def with_tables(name: str) -> str:
    """The page with its tables regenerated."""
    page = (DOCS / name).read_text(encoding="utf-8")
    return _TABLES.sub(lambda marks: marks[1] + PAGES[name]() + marks[2], page)


def main() -> int:
    """Write the tables."""
    for name in PAGES:
        (DOCS / name).write_text(with_tables(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
