"""JSON parsing for settings, checkpoints and input files, with error messages for users."""

import json
import math
from typing import Any

Json = dict[str, Any]
"""A JSON object."""

_PROBLEMS = {
    "Expecting value": "a value is missing, or is not written as JSON",
    "Expecting ',' delimiter": "a comma or a closing bracket is missing",
    "Expecting ':' delimiter": "a colon is missing",
    "Expecting property name enclosed in double quotes": "a name in double quotes is missing",
    "Unterminated string starting at": "a string has no closing quote",
    "Invalid control character at": "a string has a control character",
    "Illegal trailing comma before end of object": "there is a comma before the closing bracket",
    "Illegal trailing comma before end of array": "there is a comma before the closing bracket",
    "Extra data": "more text follows the value",
}
"""Messages of Python's JSON decoder -> messages for users who do not know Python."""

_SHOWN = 40


def json_problem(error: ValueError) -> str:
    """Message for the error that `parse_json` raised for a line of text; for invalid JSON, with the
    column."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    # Do not count the line break at the end of a line.
    column = min(error.pos, len(error.doc.rstrip())) + 1
    return f"{_PROBLEMS.get(error.msg, error.msg)}, at column {column}"


def json_setting_problem(error: ValueError, example: str) -> str:
    """End of an error message about the text of a setting: the `error` that `parse_json` raised,
    and an `example` of the setting as a shell takes it."""
    return f"which is not JSON: {json_problem(error)}; write it as '{example}'"


def parse_json(text: str | bytes, *, is_finite: bool = False) -> Any:
    """Parse `text`. Raises ValueError for invalid JSON and for values that are nested too deeply;
    with `is_finite` also for NaN and infinite numbers, which Python reads although they are not
    JSON."""
    number = _finite_number if is_finite else None
    try:
        return json.loads(text, parse_float=number, parse_constant=number)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _finite_number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number")
    return value
