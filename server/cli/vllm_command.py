"""`gaudiserve vllm-command`: writes a command `vllm` that runs gaudiserve, for scripts that call
`vllm serve` or `python3 -m vllm.entrypoints.openai.api_server`.

The command never hides an installed vLLM: it is not written if vLLM is installed, and it runs a
vLLM that is installed later.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from config.errors import ConfigError
from config.loading.env import environment, is_installed
from config.loading.parser import FlagParser
from config.version import VERSION
from server.cli import main as gaudiserve
from server.cli.vllm_modules import FILE, LINE

NAME = "vllm"
SCRIPT = """\
#!{python}
# Written by `gaudiserve vllm-command`.
import sys

from server.cli.vllm_command import run

sys.exit(run())
"""
MARK = SCRIPT.splitlines()[1]
MAX_SCRIPT_BYTES = 2**10


def main(argv: list[str]) -> int:
    """Write the command, and the line of vllm_modules.py, into this environment, unless vLLM is
    installed. Raises ConfigError on failure."""
    parser = FlagParser(
        prog="gaudiserve vllm-command",
        usage="gaudiserve vllm-command",
        description="Write a command `vllm` that runs gaudiserve, next to the command "
        "`gaudiserve`, unless vLLM is installed. `python3 -m vllm.entrypoints.openai.api_server` "
        "then runs this command.",
    )
    parser.examples = ("gaudiserve vllm-command",)
    parser.parse_all(argv)
    path = Path(sysconfig.get_path("scripts")) / NAME
    if found := installed(path):
        print(f"{found} is installed: nothing is written")
        return 0
    _write(path, SCRIPT.format(python=sys.executable))
    _write(Path(sysconfig.get_path("purelib")) / FILE, LINE)
    path.chmod(0o755)
    print(f"{path} is gaudiserve {VERSION}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def run() -> int:
    """Entry point of the written command: runs vLLM if it was installed later, otherwise
    gaudiserve."""
    for path in _commands():
        os.execv(path, [str(path), *sys.argv[1:]])
    print(
        f"vllm: this is gaudiserve {VERSION}, which takes the command line of vLLM",
        file=sys.stderr,
    )
    return gaudiserve.main()


def installed(path: Path) -> str:
    """The vLLM installation that a command at `path` would hide; empty if vLLM is not installed."""
    if is_installed(NAME):
        return "the package vllm"
    other = next(_commands(), path if path.exists() and not _is_ours(path) else None)
    return "" if other is None else str(other)


def _commands() -> Iterator[Path]:
    for folder in os.get_exec_path(dict(environment())):
        path = Path(folder) / NAME
        if path.is_file() and os.access(path, os.X_OK) and not _is_ours(path):
            yield path


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(MAX_SCRIPT_BYTES)
    except OSError:
        return False
