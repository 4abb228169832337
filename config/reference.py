"""docs/configuration.md, made from the table of flags: `python -m config.reference` writes it.

Knows Markdown, and nothing of how settings are read.
"""

import sys
from pathlib import Path

from config.arguments import shown_default
from config.flag import Flag
from config.flags import ACCEPTED, FILE_FLAGS, FLAGS

PATH = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Made by `python -m config.reference`; a test holds it equal to the code. -->

Every setting is a flag of `gaudiserve serve`, a variable, a key of the YAML file given by
`--config`, and a keyword of `LLM(...)`. A flag wins over a variable, a variable over the file, the
file over the default. An unknown name or a value out of range is an error that says where it came
from, and `gaudiserve config` prints every value with its source.

```yaml
# serve.yaml: keys are the flags' names, with - or _
model: ./my-model
max-model-len: 8K        # K, M, G count in 1024s, k, m, g in thousands
enable-prefix-caching: false
allowed-origins: ["https://chat.example.com"]
```

Underscores may stand for dashes (`--max_model_len`), and `auto` takes back a number that a file or
a variable gave. An empty variable counts as not set, but an empty key is an error. Where a switch
is on by default, `--no-NAME` switches it off. Secrets are never printed.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        rows = [_row(flag) for flag in FLAGS if flag.group == group]
        parts.append(_table(group, ["flag", "default", "what it does", "variables"], rows))
    files = [
        [f"`--{name} FILE`", "none", text, _variable(name)] for name, text in FILE_FLAGS.items()
    ]
    parts.append(_table("Files", ["flag", "default", "what it does", "variables"], files))
    accepted = [[f"`--{name}`", f"`{value}`", why] for name, (value, why) in ACCEPTED.items()]
    parts.append(
        "## Accepted from other servers' scripts\n\n"
        "These change nothing. The one value that is true here is accepted, any other is an "
        "error.\n\n" + _rows(["flag", "value", "why"], accepted)
    )
    return "\n".join(parts)


def _row(flag: Flag) -> list[str]:
    others = (*flag.aliases, *flag.switches)
    text = flag.help
    if flag.choices:
        text += ": " + ", ".join(f"`{choice}`" for choice in flag.choices)
    if others:
        text += "; also " + ", ".join(f"`--{name}`" for name in others)
    theirs = (*flag.variables, *flag.variables_of_switches)
    variables = [f"`{flag.variable}`", *(f"`{name}`" for name in theirs)]
    return [f"`--{flag.key}`", f"`{shown_default(flag)}`", text, ", ".join(variables)]


def _variable(name: str) -> str:
    return f"`GAUDISERVE_{name.replace('-', '_').upper()}`"


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    return f"## {title}\n\n{_rows(heads, rows)}"


def _rows(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell for cell in line) + " |\n" for line in lines)


def main() -> int:
    """Write the page where it belongs."""
    PATH.write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
