"""Tests with quantization tools, in their own environment: `make test-quantizers`."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SELECTED = re.compile(r"(?<!not )\bquantizers\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip these files by default: they import packages that only their environment has."""
    is_selected = SELECTED.search(config.option.markexpr) is not None
    return None if is_selected or collection_path == HERE else True
