"""Provides the vLLM modules that manifests run with `python3 -m`, as commands of gaudiserve.

`gaudiserve vllm-command` writes LINE into the environment, and Python runs it at each start. The
modules exist only in processes whose command line names them. An installed vLLM is found first,
even if it is installed later.
"""

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

FILE = "gaudiserve-vllm.pth"
LINE = (
    "import sys; any('vllm.entrypoints.' in word for word in sys.orig_argv)"
    " and __import__('server.cli.vllm_modules').cli.vllm_modules.install()\n"
)
COMMANDS = {
    "vllm.entrypoints.openai.api_server": ["serve"],
    "vllm.entrypoints.openai.mm_api_server": ["serve"],
    "vllm.entrypoints.openai.run_batch": ["run-batch"],
    "vllm.entrypoints.cli.main": [],
}
PACKAGES = frozenset(
    ("vllm", "vllm.entrypoints", "vllm.entrypoints.openai", "vllm.entrypoints.cli")
)
_SOURCE = "from server.cli.vllm_modules import run\nrun({words!r})\n"


def install() -> None:
    """Make the modules importable in this process, with the lowest precedence."""
    sys.meta_path.append(_Modules())


def run(words: list[str]) -> None:
    """Replace this process with the command `vllm`, and put `words` before the arguments. Without
    the replacement, a process that `quantize` spawns would import the module of -m again."""
    command = Path(sysconfig.get_path("scripts")) / "vllm"
    os.execv(sys.executable, [sys.executable, str(command), *words, *sys.argv[1:]])


class _Modules(MetaPathFinder, InspectLoader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PACKAGES and name not in COMMANDS:
            return None
        # If a real vLLM is imported, its missing modules stay missing. A folder named vllm is a
        # namespace package without __file__.
        if getattr(sys.modules.get("vllm"), "__file__", None) is not None:
            return None
        # The earlier finders did not find the module.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        if any(finder.find_spec(name, path) for finder in later):
            return None
        return spec_from_loader(name, self)

    def is_package(self, name: str) -> bool:
        return name in PACKAGES

    def get_source(self, name: str) -> str:
        return _SOURCE.format(words=COMMANDS[name]) if name in COMMANDS else ""
