"""JSON in settings and files of the operator."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parsed value of `text`. Raises ValueError for invalid JSON and for values that are nested too
    deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
