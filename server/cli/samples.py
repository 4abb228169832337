"""Reads texts and conversations from a file, for commands that run a model on samples."""

from pathlib import Path

from config.errors import ConfigError
from config.json_text import Json, json_problem, parse_json

Sample = str | list[Json]
"""Text or conversation."""


def read_samples(path: Path, most: int) -> list[Sample]:
    """The first `most` samples of the file. Raises ConfigError, which names the line of an invalid
    sample."""
    samples: list[Sample] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line_number, line in enumerate(file, start=1):
                if len(samples) == most:
                    break
                if line.strip():
                    samples.append(_sample(path, line_number, line.rstrip("\n")))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise ConfigError(f"{path}: {reason}") from error
    if not samples:
        raise ConfigError(f"{path} has no samples")
    return samples


def _sample(path: Path, line_number: int, line: str) -> Sample:
    if path.suffix != ".jsonl":
        return line
    where = f"{path}, line {line_number}"
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {json_problem(error)}") from error
    is_conversation = False
    if isinstance(value, dict):
        value = next((value[key] for key in ("messages", "prompt", "text") if key in value), None)
        is_conversation = isinstance(value, list) and all(
            isinstance(message, dict) for message in value
        )
    if not value or not (isinstance(value, str) or is_conversation):
        raise ConfigError(f"{where} must be a string, or an object with prompt, text or messages")
    sample: Sample = value
    return sample
