"""Reasoning as an opaque text that clients send back: signatures of the Messages API and encrypted
content of the Responses API. Base64 is sufficient, because the reasoning is not secret."""

from base64 import b64decode, b64encode

_PREFIX = "gaudiserve."


def hide_reasoning(reasoning: str) -> str:
    """`reasoning` in the form that `hidden_reasoning` reads; empty for an empty text."""
    return _PREFIX + b64encode(reasoning.encode()).decode() if reasoning else ""


def hidden_reasoning(given: object) -> str:
    """The reasoning in a text made by `hide_reasoning`; empty for the text of another server."""
    if not isinstance(given, str) or not given.startswith(_PREFIX):
        return ""
    try:
        return b64decode(given.removeprefix(_PREFIX), validate=True).decode("utf-8")
    except ValueError:
        return ""
