"""The demo model, for tests that want a real one: kept in the user's cache, fetched if need be."""

import functools
from typing import Any

import gguf
import pytest
from gguf import GGUFReader

from config.checkpoint.demo import fetch_demo
from config.checkpoint.resolve import resolve
from config.errors import ConfigError


@functools.cache
def demo_gguf() -> str:
    """The demo model's GGUF file; the test is skipped when it cannot be had."""
    try:
        return fetch_demo(progress=False)
    except ConfigError as error:
        pytest.skip(f"no demo model: {error}")


@functools.cache
def demo_folder(dtype: str = "bfloat16") -> str:
    """The demo model as a Hugging Face folder, converted to `dtype`."""
    return resolve(demo_gguf(), dtype=dtype, progress=False)


@functools.cache
def demo_reader() -> GGUFReader:
    """The demo model's GGUF file, read: seconds, for its 49,152 tokens."""
    return GGUFReader(demo_gguf())


def read_demo_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the demo model's file anew, as transformers does at each turn, gets
    `demo_reader`'s."""

    def read(path: Any) -> GGUFReader:
        return demo_reader() if str(path) == demo_gguf() else GGUFReader(path)

    monkeypatch.setattr(gguf, "GGUFReader", read)
