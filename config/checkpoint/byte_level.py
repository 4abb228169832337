"""Byte-level vocabularies: the characters of bytes, and the split rule of Llama 3."""

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Rule that splits a text before merges, in Llama 3, in GLM-4 and in other families."""


def byte_alphabet() -> list[str]:
    """The character of each byte in a byte-level vocabulary: its own if it is printable, else the
    next one from U+0100 on (as in GPT-2)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 0x100 + hidden.index(byte)) for byte in range(256)]
