"""Writes docs/configuration.md from the flags: `python -m config.loading.reference`."""

import sys
from pathlib import Path

from config.loading.flags import FILE_FLAGS, FLAGS, GROUPS, Flag, variable_of

PATH = Path(__file__).parents[2] / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Made by `python -m config.loading.reference`; a test holds it equal to the code. -->

Every setting is a flag of `gaudiserve serve`, a variable, a key of the YAML file given by
`--config`, and a keyword of `LLM(...)`. A flag wins over a variable, a variable over the file, the
file over the default. An unknown name or a value out of range is an error with its source, and
`gaudiserve config` prints every value with its source.

```yaml
# serve.yaml: keys are the flags' names, with - or _
model: ./my-model
max-model-len: 8K        # K, M, G are powers of 1024; k, m, g of 1000
enable-prefix-caching: false
allowed-origins: ["https://chat.example.com"]
```

Underscores may replace dashes (`--max_model_len`), and `auto` resets a number that a file or a
variable set. An empty variable counts as not set, but an empty API key is an error. If a switch is
on by default, `--no-NAME` turns it off. Secrets are never printed. [Coming from
vLLM](coming-from-vllm.md) has the flags of vLLM that are no settings here.
"""

KEYS = """\
## What API keys share

Each `--api-key` is one user; without keys all clients are one user. A response that `/v1/responses`
keeps can be read, continued, cancelled and deleted only with the key that created it. The server
keeps the SHA-256 digest of the key with it, not the key.

The prefix cache is shared by all keys by default: a prompt that begins like another client's prompt
is answered sooner, and `cached_tokens` in its `usage` says how many tokens were found. So a client
can find out whether another one has recently sent a prompt with a given beginning: it sends that
beginning itself and looks at the time to the first token, or at `cached_tokens`. It has to guess
whole blocks of tokens (`--block-size`), one after the other. Two settings prevent that:

* `--cache-salt-per-key`: blocks are shared only among requests of one key. A system prompt that
  several keys have in common is then computed and stored once for each of them.
* `cache_salt` in a request: blocks are shared only among requests with the same salt. With
  `--cache-salt-per-key` both must be the same.

These stay shared, and hold no text of other clients:

* the queue and the batch: the load of other clients shows in the latency;
* compiled grammars: a form that another client has used before is ready sooner;
* `/metrics` (open without a key), `/load`, and the figures of the last 100 requests on
  [the page](page.md);
* the bounds of the kept responses (`--responses-store-max-count` and `-max-bytes`): the oldest one
  is evicted first, whatever its key;
* the routes of `--enable-dev-endpoints`, which any key may call.
"""


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for group in GROUPS:
        rows = [_row(flag) for flag in FLAGS if flag.setting.group == group]
        parts.append(_table(group, ["flag", "default", "what it does", "variables"], rows))
    files = [
        [f"`--{name} FILE`", "none", text, f"`{variable_of(name)}`"]
        for name, text in FILE_FLAGS.items()
    ]
    parts.append(_table("Files", ["flag", "default", "what it does", "variables"], files))
    parts.append(KEYS)
    return "\n".join(parts)


def _row(flag: Flag) -> list[str]:
    setting = flag.setting
    others = (*setting.aliases, *setting.switches)
    text = setting.help
    if setting.choices:
        text += ": " + ", ".join(f"`{choice}`" for choice in setting.choices)
    if others:
        text += "; also " + ", ".join(f"`--{name}`" for name in others)
    names = (flag.variable, *setting.variables, *setting.switch_variables)
    return [
        f"`--{flag.key}`",
        f"`{flag.shown_default}`",
        text,
        ", ".join(f"`{name}`" for name in names),
    ]


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    return f"## {title}\n\n{_rows(heads, rows)}"


def _rows(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell for cell in line) + " |\n" for line in lines)


def main() -> int:
    """Write the page."""
    PATH.write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
