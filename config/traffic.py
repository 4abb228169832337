"""Reads prompt and output lengths of real requests from JSON lines, a /metrics page or a request
log."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from config.errors import ConfigError, value_text
from config.json_text import parse_json
from config.setting import MAX_DIGITS
from config.whole_files import read_limited

MAX_TOKENS = 10_000_000
MAX_TRAFFIC_BYTES = 256 * 2**20
"""Size limit of a traffic file: about three million lines."""
_EXAMPLE = '{"prompt_tokens": 812, "output_tokens": 95}'
_LOG_LINE = re.compile(r"\bprompt_tokens=(\d+) output_tokens=(\d+)\b")
_BUCKET = re.compile(
    r'^vllm:request_(prompt|generation)_tokens_bucket\{.*\ble="([^"]+)".*\} (\S+)', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of a request, or of `weight` equal requests."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, minimum in (("prompt_tokens", 1), ("output_tokens", 0), ("cached_tokens", 0)):
            value = getattr(self, name)
            if not minimum <= value <= MAX_TOKENS:
                raise ConfigError(
                    f"{name} is {value_text(value)}, it must be {minimum} to {MAX_TOKENS}"
                )
        if self.cached_tokens >= self.prompt_tokens:
            raise ConfigError(
                f"cached_tokens is {self.cached_tokens}, it must be below prompt_tokens, which is "
                f"{self.prompt_tokens}"
            )


def read_traffic(path: str) -> list[Lengths]:
    """Read the requests in a file: JSON lines, a /metrics page, or a log with a line per request.

    The format is detected from the content. Raises ConfigError.
    """
    try:
        text = read_limited(path, MAX_TRAFFIC_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the traffic file {path} cannot be read: {reason}") from None
    return parse_traffic(text, path)


def parse_traffic(text: str, name: str = "traffic") -> list[Lengths]:
    """Like `read_traffic`, for a text."""
    if _BUCKET.search(text):
        found = _from_metrics(text, name)
    elif _LOG_LINE.search(text) and not text.lstrip().startswith("{"):
        found = list(_from_log(text, name))
    else:
        found = list(_from_json_lines(text, name))
    if not found:
        raise ConfigError(f"{name} has 0 requests, it must have at least 1")
    return found


def _from_log(text: str, name: str) -> Iterator[Lengths]:
    for found in _LOG_LINE.finditer(text):
        num_digits = max(map(len, found.groups()))
        try:
            if num_digits > MAX_DIGITS:
                raise ConfigError(
                    f"it has a number of {num_digits} digits, it must be at most {MAX_TOKENS}"
                )
            prompt, output = map(int, found.groups())
            # Requests that ended before their prompt was tokenized have 0 prompt tokens.
            if prompt:
                yield Lengths(prompt, output)
        except ConfigError as error:
            number = text.count("\n", 0, found.start()) + 1
            raise ConfigError(f"{name}, line {number}: {found[0][:80]!r}: {error}") from None


def _from_json_lines(text: str, name: str) -> Iterator[Lengths]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            if not isinstance(entry, dict):
                raise ConfigError(f"it is not a JSON object; a line is {_EXAMPLE}")
            yield Lengths(
                _whole(entry, "prompt_tokens"),
                _whole(entry, "output_tokens"),
                _whole(entry, "cached_tokens", 0),
            )
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{name}, line {number}: {line[:80]!r}: {error}") from None


def _whole(entry: dict[str, object], key: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if value is None and key not in entry:
        raise ConfigError(f"it has no {key}; a line is {_EXAMPLE}")
    if type(value) is not int:
        raise ConfigError(f"{key} is {value_text(value)}, it must be a whole number")
    return value


def _from_metrics(text: str, name: str) -> list[Lengths]:
    """Every pair of prompt bucket and output bucket. The page has separate histograms, so the two
    lengths are assumed to be independent."""
    prompts, outputs = (_histogram(text, kind, name) for kind in ("prompt", "generation"))
    total = sum(prompts.values())
    return [
        Lengths(max(1, prompt), output, 0, count * share / total)
        for prompt, count in prompts.items()
        for output, share in outputs.items()
    ]


def _histogram(text: str, kind: str, name: str) -> dict[int, float]:
    """Tokens (middle of the bucket) -> number of requests, summed over labels."""
    below: dict[float, float] = {}
    for found, le, value in _BUCKET.findall(text):
        if found == kind:
            end = _number(le, "le", kind, name)
            below[end] = below.get(end, 0.0) + _number(value, "value", kind, name)
    counts: dict[int, float] = {}
    start = before = 0.0
    for end in sorted(below):
        if below[end] > before:
            # The last bucket is unbounded: use its lower end.
            middle = start if math.isinf(end) else (start + 1 + end) / 2
            counts[int(middle)] = below[end] - before
        start, before = end, max(before, below[end])
    if not counts:
        raise ConfigError(f"{name} counts 0 requests in vllm:request_{kind}_tokens")
    return counts


def _number(word: str, what: str, kind: str, name: str) -> float:
    """The number `word` of a bucket; only its end (le) may be infinite. Raises ConfigError."""
    with suppress(ValueError):
        number = float(word)
        if math.isfinite(number) or (what == "le" and number > 0):
            return number
    raise ConfigError(
        f"{name} has a bucket of vllm:request_{kind}_tokens whose {what} is {word[:80]!r}, it must "
        "be a number"
    )
