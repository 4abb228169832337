"""Signatures of thinking blocks: they hold reasoning that the answer does not show."""

from base64 import b64decode, b64encode

_PREFIX = "gaudiserve."


def signature_of(reasoning: str) -> str:
    """The signature of a block that does not show `reasoning`; empty for an empty text."""
    return _PREFIX + b64encode(reasoning.encode()).decode() if reasoning else ""


def reasoning_of(signature: object) -> str:
    """The reasoning in a signature of this server; empty for anything else."""
    if not isinstance(signature, str) or not signature.startswith(_PREFIX):
        return ""
    try:
        return b64decode(signature.removeprefix(_PREFIX), validate=True).decode("utf-8")
    except ValueError:
        return ""
