"""The page in the system's Chromium; these tests need `make test-page`."""

import re
from pathlib import Path

import pytest

SELECTS_PAGE = re.compile(r"(?<!not )\bpage\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip these files by default: they import playwright, which only the page extra installs."""
    is_selected = SELECTS_PAGE.search(config.option.markexpr) is not None
    return None if is_selected or collection_path == Path(__file__).parent else True
