"""The demo model, for tests that need a real model: cached for the user, downloaded if
necessary."""

import functools
from typing import Any

import gguf
import pytest
from gguf import GGUFReader

from config.checkpoint.demo import fetch_demo
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError


@functools.cache
def demo_gguf() -> str:
    """Path of the demo model's GGUF file; skips the test if the file is not available."""
    try:
        return fetch_demo(progress=False)
    except ConfigError as error:
        pytest.skip(f"no demo model: {error}")


@functools.cache
def demo_folder(dtype: str = "bfloat16") -> str:
    """The demo model as a Hugging Face folder, converted to `dtype`."""
    return resolve(EngineConfig(demo_gguf(), dtype=dtype), progress=False)


@functools.cache
def demo_reader() -> GGUFReader:
    """The demo model's parsed GGUF file; parsing its 49,152 tokens takes seconds."""
    return GGUFReader(demo_gguf())


def read_demo_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers, which parses the demo model's file each time, reuse `demo_reader`."""

    def read(path: Any) -> GGUFReader:
        return demo_reader() if str(path) == demo_gguf() else GGUFReader(path)

    monkeypatch.setattr(gguf, "GGUFReader", read)
