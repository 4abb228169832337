"""Reads the instructions of a Dockerfile."""

import re


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, value) of each instruction, without comments and with continuation lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, value = line.partition(" ")
            assert word.isupper(), f"not an instruction: {line}"
            found.append((word, value.strip()))
    return found
