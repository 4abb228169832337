"""Chooses the build of torch that pip installs: without an NVIDIA GPU the CPU build, which avoids a
download of gigabytes of CUDA. Prints arguments for pip, and on stderr one line with the reason.

Imports only the standard library: it runs before anything is installed.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 60.0
"""Time limit for the index. It is long, because without an answer the choice fails."""
PIP_TIMEOUT_S = 120.0
"""Time limit for pip. It is long, because pip takes tens of seconds on a busy machine, and no
answer means that there is no CPU build."""
GPU_TIMEOUT_S = 10.0
AS_PIP_FINDS = ("", "none")


class NoCpuBuild(Exception):
    """No index has a CPU build, and the user selected no index."""


def choose(
    version: str,
    *,
    index: str | None,
    installed: str | None,
    has_gpu: Callable[[], bool],
    offered: Callable[[], list[str]],
    problem: Callable[[str], str],
) -> tuple[list[str], str]:
    """(arguments for pip, reason) for torch `version`.

    `index`: the user's index (None: not given; empty or `none`: the build that pip finds);
    `installed`: the installed version; `offered`: returns the versions that pip finds; `problem`:
    returns the reason why an index cannot be used (empty: it can be used). The functions are called
    only if needed.
    The CPU build is requested by its full version: otherwise, pip would take the CUDA build from
    its own index if the other index fails later. Raises NoCpuBuild.
    """
    if installed is not None and installed.partition("+")[0] == version:
        return [], f"torch {installed} is installed already; for another build: make clean"
    if index is not None:
        if index.strip().lower() in AS_PIP_FINDS:
            return [], f"torch {version} as pip finds it, by TORCH_INDEX"
        return _from(index), f"torch {version} from {index}, by TORCH_INDEX"
    if has_gpu():
        return [], f"torch {version} with CUDA, as pip finds it: there is an NVIDIA GPU"
    build = f"{version}+cpu"
    if any(found.startswith(build) for found in offered()):
        return [f"torch=={build}"], f"torch {build}, as pip finds it: there is no NVIDIA GPU"
    refusal = problem(CPU_INDEX)
    if not refusal:
        reason = f"torch {build} from {CPU_INDEX}: there is no NVIDIA GPU"
        return [*_from(CPU_INDEX), f"torch=={build}"], reason
    raise NoCpuBuild(
        f"no CPU build of torch {version}: pip finds none, and {CPU_INDEX} cannot be used: "
        f"{refusal}; try again, name another index by TORCH_INDEX=URL, or take the "
        "build that pip finds, on Linux one with gigabytes of CUDA, by TORCH_INDEX=none"
    )


def _from(index: str) -> list[str]:
    return ["--extra-index-url", index]


def pinned(pyproject: str) -> str:
    """Version of torch in the text of pyproject.toml (Python 3.10 has no TOML reader)."""
    found = re.search(r'^cpu = \["torch==([\d.]+)"\]', pyproject, re.MULTILINE)
    assert found is not None, "pyproject.toml pins no torch in its extra `cpu`"
    return found[1]


def has_nvidia_gpu(
    devices: Path = Path("/dev"), command: tuple[str, ...] = ("nvidia-smi", "-L")
) -> bool:
    """Whether there is an NVIDIA GPU: a device of the driver or, in WSL, which has none, a line of
    nvidia-smi."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def offered_versions() -> list[str]:
    """Versions of torch that pip finds with its own settings; empty if pip fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "0", "index", "versions", "torch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"\d[^\s,()]*", done.stdout)


def index_problem(index: str, timeout_s: float = INDEX_TIMEOUT_S) -> str:
    """Reason why a package index cannot be used for torch; empty if it has torch and answers in
    time."""
    found: list[str] = []

    def ask() -> None:
        request = urllib.request.Request(f"{index}/torch/", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s):
                found.append("")
        except (OSError, HTTPException) as error:
            # Statuses other than 2xx, failed name look-ups and network errors. Timeouts are
            # reported below.
            reason = getattr(error, "reason", error)
            if not isinstance(reason, TimeoutError):
                found.append(str(error) or type(error).__name__)

    # Use a thread, because the timeout of urlopen does not cover name look-ups and redirects.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return found[0] if found else f"it gave no answer within {timeout_s:g} s"


def installed_version() -> str | None:
    """Version of torch in this environment; None without torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: list[str]) -> None:
    """Print the arguments for pip."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--index", help="URL of the index for torch; empty or none: the build that pip finds"
    )
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    try:
        words, reason = choose(
            pinned(pyproject.read_text(encoding="utf-8")),
            index=parser.parse_args(arguments).index,
            installed=installed_version(),
            has_gpu=has_nvidia_gpu,
            offered=offered_versions,
            problem=index_problem,
        )
    except NoCpuBuild as error:
        sys.exit(str(error))
    print(reason, file=sys.stderr)
    print(*words)


if __name__ == "__main__":
    main(sys.argv[1:])
