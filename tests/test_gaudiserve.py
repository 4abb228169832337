"""gaudiserve.py is found from a folder that contains the names of the module and of the
packages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("-m", "gaudiserve", "serve", "--help"), "usage: gaudiserve serve"),
        (("-c", "from gaudiserve import LLM; print(LLM.__module__)"), "server.offline.llm"),
    ],
    ids=["command", "import"],
)
def test_gaudiserve_is_found_from_the_folder_beside_a_clone(
    arguments: tuple[str, ...], shown: str, tmp_path: Path
) -> None:
    # A clone's folder has the name of the module, and users have folders with the names of this
    # project's packages.
    (tmp_path / "gaudiserve").symlink_to(ROOT)
    for name in ("config", "engine", "hpu", "server"):
        (tmp_path / name).mkdir()

    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, f"{done.stderr}\nFor an older environment: make install"
    assert shown in done.stdout
