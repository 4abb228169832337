"""JSON in settings and files of the operator."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value. ValueError for anything else, values that are nested too deeply included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
