"""The demo model, for tests that want a real one: kept in the user's cache, fetched if need be."""

import functools

import pytest

from config.checkpoint import resolve
from config.demo import fetch_demo
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
