"""A panic of a native extension, caused by hostile input."""

from typing import NoReturn

from hostile_files import CATASTROPHE
from tokenizers import Regex, pre_tokenizers

EVIL = "a" * 200 + "!"
"""A text for which matching the pattern exceeds the library's limit."""


def panic() -> NoReturn:
    """Raise the BaseException of a Rust extension that panicked."""
    pre_tokenizers.Split(Regex(CATASTROPHE), "isolated").pre_tokenize_str(EVIL)
    raise AssertionError("the library did not panic")
