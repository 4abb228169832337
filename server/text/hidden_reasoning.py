"""Reasoning as opaque text that clients send back: signatures of the Messages API, and encrypted
content of the Responses API. Base64 is enough, because the reasoning is not secret."""

from base64 import b64decode, b64encode

_PREFIX = "gaudiserve."


def hide_reasoning(reasoning: str) -> str:
    """Encode `reasoning` for `hidden_reasoning`; empty for an empty text."""
    return _PREFIX + b64encode(reasoning.encode()).decode() if reasoning else ""


def hidden_reasoning(given: object) -> str:
    """Decode the reasoning in a text from `hide_reasoning`; empty for any other value."""
    if not isinstance(given, str) or not given.startswith(_PREFIX):
        return ""
    try:
        return b64decode(given.removeprefix(_PREFIX), validate=True).decode("utf-8")
    except ValueError:
        return ""
