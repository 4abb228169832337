"""A panic of a native extension, as hostile input causes it."""

from typing import NoReturn

from hostile_files import CATASTROPHE
from tokenizers import Regex, pre_tokenizers

EVIL = "a" * 200 + "!"
"""A text that the pattern does not match within the library's limit."""


def panic() -> NoReturn:
    """Raise the BaseException of a Rust extension that panicked."""
    pre_tokenizers.Split(Regex(CATASTROPHE), "isolated").pre_tokenize_str(EVIL)
    raise AssertionError("the library did not panic")
