"""What of a JSON schema the grammar library would not keep, or would be kept busy by: bounds of
numbers, and too many properties. Pure."""

from typing import Any

from config.errors import UserError
from engine.structured_output.bounds import VALUE_KEYWORDS

MAX_PROPERTIES = 2_000
"""Of one object: what the library does with them grows with their square."""


def check_bounds(schema: Any) -> None:
    """Raise UserError for an exclusive bound that is a whole number, with the other bound less than
    1 away: the library (1.9) lets the bound itself through. And for too many properties."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            _check(part)
            left += [value for name, value in part.items() if name not in VALUE_KEYWORDS]


def _check(part: dict[str, Any]) -> None:
    count = len(part["properties"]) if isinstance(part.get("properties"), dict) else 0
    if count > MAX_PROPERTIES:
        raise UserError(
            f"the json cannot be compiled: an object has {count} properties, at most "
            f"{MAX_PROPERTIES} are taken",
            param="structured_outputs",
        )
    lows = [_number(part, name) for name in ("minimum", "exclusiveMinimum")]
    highs = [_number(part, name) for name in ("maximum", "exclusiveMaximum")]
    low = max((value for value in lows if value is not None), default=None)
    high = min((value for value in highs if value is not None), default=None)
    if low is None or high is None or high - low >= 1 or part.get("type") == "integer":
        return
    for name, bound in (("exclusiveMinimum", lows[1]), ("exclusiveMaximum", highs[1])):
        if bound is not None and float(bound).is_integer():
            raise UserError(
                f"the json cannot be compiled: {name} {bound} cannot be enforced on numbers "
                f"between {low} and {high}, as these are less than 1 apart",
                param="structured_outputs",
            )


def _number(part: dict[str, Any], name: str) -> float | None:
    value = part.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < 2**53 else None
