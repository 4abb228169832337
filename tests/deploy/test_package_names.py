"""deploy/package_names.py finds a distribution that owns one of this project's top-level
packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "package_names.py"


def run(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def distribution(site: Path, name: str, top_level: str | None, file: str) -> None:
    """Write the metadata of an installed distribution."""
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "RECORD").write_text(f"{file},,\n")
    if top_level is not None:
        (folder / "top_level.txt").write_text(top_level)


def test_this_environment_has_no_conflict(tmp_path: Path) -> None:
    done = run(tmp_path)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("top_level", "file"),
    [("engine\nother\n", "engine/__init__.py"), (None, "engine/__init__.py"), (None, "engine.py")],
)
def test_another_owner_of_a_package_is_reported(
    top_level: str | None, file: str, tmp_path: Path
) -> None:
    distribution(tmp_path, "intruder", top_level, file)

    done = run(tmp_path)

    assert done.returncode == 1
    assert done.stderr == (
        "package_names: intruder has a top-level package engine; uninstall intruder\n"
    )


def test_every_package_of_the_wheel_is_guarded(tmp_path: Path) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (include,) = re.findall(r"^include = \[(.*)\]$", pyproject, re.MULTILINE)
    packages = re.findall(r'"(\w+)"', include)

    for name in packages:
        distribution(tmp_path, f"owner_of_{name}", f"{name}\n", f"{name}/__init__.py")
    told = run(tmp_path).stderr.splitlines()

    assert len(packages) == 4
    assert len(told) == 4
    assert all(any(f"package {name};" in line for line in told) for name in packages)


def test_a_package_below_the_top_level_is_no_conflict(tmp_path: Path) -> None:
    distribution(tmp_path, "other", None, "other/engine/__init__.py")

    assert run(tmp_path).returncode == 0
