"""Batch files in OpenAI's format: requests and responses, one JSON object per line. The id of a
response contains the line number of its request, so that an interrupted batch resumes with the
lines that have no response."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from config.errors import ConfigError, value_text
from config.json_text import Json, json_problem, parse_json
from server.cli.http_client import HttpResponse

PREFIX = "batch_req_"
_BEGINNING = f'{{"id":"{PREFIX}'.encode()
"""First bytes of each output line."""
POOLING_PATHS = ("/score", "/rerank", "/v2/rerank", "/v2/embed", "/classify", "/pooling")
"""Paths outside /v1/ that a batch may use."""
MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of an input line without its line break, the default of --max-body-bytes."""
MAX_SKIPPED_BYTES = 2**30
"""Maximum length of an input line that is skipped: a device or a pipe may have no line end."""


class BatchLine(NamedTuple):
    """A request on an input line."""

    number: int
    """Line number in the file, from 1."""
    custom_id: str
    url: str
    body: Json
    num_bytes: int


class InvalidLine(NamedTuple):
    """An input line that is not a valid request, or that repeats a custom_id."""

    number: int
    custom_id: str | None
    error: str


def open_input(path: Path) -> IO[bytes]:
    """The input, open for `read_lines`. Raises ConfigError if it cannot be opened."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"--input-file {path} cannot be read: {error.strerror}") from error


def read_lines(file: IO[bytes]) -> Iterator[BatchLine | InvalidLine]:
    """The non-empty lines of the input. Raises ConfigError if the file cannot be read, or if a line
    has more than MAX_SKIPPED_BYTES."""
    seen: set[str] = set()
    number = 0
    try:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                num_bytes = len(raw)
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                    num_bytes += len(raw)
                    if num_bytes > MAX_SKIPPED_BYTES:
                        raise ConfigError(
                            f"line {number} of --input-file {file.name} has at least {num_bytes} "
                            f"bytes, a line may have at most {MAX_LINE_BYTES}"
                        )
                yield InvalidLine(number, None, f"it is longer than {MAX_LINE_BYTES} bytes")
                continue
            if not raw.strip():
                continue
            line = _parsed(number, raw)
            if line.custom_id is not None:
                if line.custom_id in seen:
                    line = InvalidLine(
                        number, line.custom_id, f"custom_id {line.custom_id!r} was used before"
                    )
                seen.add(line.custom_id or "")
            yield line
    except OSError as error:
        raise ConfigError(f"{file.name}: {error.strerror}") from error


def _parsed(number: int, raw: bytes) -> BatchLine | InvalidLine:
    try:
        line = parse_json(raw, is_finite=True)
    except ValueError as error:
        return InvalidLine(number, None, f"it is not JSON: {json_problem(error)}")
    if not isinstance(line, dict):
        return InvalidLine(number, None, f"it is {value_text(line)}, it must be an object")
    try:
        msgspec.json.encode(line)
    except UnicodeEncodeError:
        return InvalidLine(number, None, "it has a lone surrogate, it must be valid Unicode text")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        given = f"is {value_text(custom_id)}" if "custom_id" in line else "is missing"
        return InvalidLine(number, None, f"custom_id {given}, it must be a string")
    body, url = line.get("body"), line.get("url")
    if line.get("method", "POST") != "POST":
        problem = f"method is {value_text(line['method'])}, it must be POST"
    elif not isinstance(url, str) or not _is_path(url):
        paths = ", ".join(POOLING_PATHS)
        given = f"is {value_text(url)}" if "url" in line else "is missing"
        problem = f"url {given}, it must be a path, such as /v1/chat/completions, or {paths}"
    elif " " in url:
        problem = f"url is {value_text(url)}, it must have no whitespace"
    elif not isinstance(body, dict):
        given = f"is {value_text(body)}" if "body" in line else "is missing"
        problem = f"body {given}, it must be an object"
    elif body.get("stream"):
        problem = "stream is true, it must be false in a batch"
    else:
        return BatchLine(number, custom_id, url, body, len(raw))
    return InvalidLine(number, custom_id, problem)


def _is_path(url: str) -> bool:
    return url in POOLING_PATHS or (url.startswith("/v1/") and url.isprintable())


class BatchOutput:
    """Output file of a batch, open for appending and locked against other processes."""

    def __init__(self, path: Path) -> None:
        """Reads existing responses, and removes an incomplete last line that a killed process left.
        Raises ConfigError."""
        self._path = path
        self._answered: dict[int, str | None] = {}
        """Line number -> custom_id of each answered line."""
        self.num_errors = 0
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path}: it must be a regular file")
        try:
            self._file: IO[bytes] = path.open("ab+")
        except OSError as error:
            raise ConfigError(
                f"--output-file {path} cannot be written: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"{path}: another batch is writing to this file") from error
        except ConfigError:
            self._file.close()
            raise

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, *error: object) -> None:
        # On a full disk the flush fails again, after the error has been raised.
        with contextlib.suppress(OSError):
            self._file.close()

    @property
    def num_answered(self) -> int:
        return len(self._answered)

    def has(self, line: BatchLine | InvalidLine) -> bool:
        """Whether `line` has a response. Raises ConfigError if the response has another
        custom_id."""
        if line.number not in self._answered:
            return False
        answered = self._answered[line.number]
        if answered != line.custom_id:
            raise ConfigError(
                f"{self._path} has the answer to {answered!r} for line {line.number}, which is "
                f"{line.custom_id!r} in the input: it belongs to another batch"
            )
        return True

    def write(self, line: BatchLine, answer: HttpResponse) -> None:
        """Append the server's response, with any status."""
        try:
            # Re-encode the body on a single line.
            body = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(answer.content)))
        except (msgspec.DecodeError, RecursionError):
            body = msgspec.Raw(msgspec.json.encode(answer.content.decode(errors="replace")))
        self._append(
            line,
            {
                "status_code": answer.status,
                "request_id": answer.fields.get("x-request-id", ""),
                "body": body,
            },
            None,
        )
        self.num_errors += answer.status != 200

    def write_error(self, line: InvalidLine) -> None:
        """Append the error of a line that was not sent."""
        message = f"line {line.number}: {line.error}"
        self._append(line, None, {"code": "invalid_line", "message": message})
        self.num_errors += 1

    def _append(
        self,
        line: BatchLine | InvalidLine,
        response: Json | None,
        error: dict[str, str] | None,
    ) -> None:
        record = {
            "id": f"{PREFIX}{line.number}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self._path}: {error.strerror}; run the same command again to continue"
            ) from error
        self._answered[line.number] = line.custom_id

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                # Do not truncate another file of the user that lacks a final line break.
                if raw[: len(_BEGINNING)] != _BEGINNING[: len(raw)]:
                    raise _no_answer(self._path, raw)
                break
            end += len(raw)
            if raw.strip():
                self._take(raw)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def _take(self, raw: bytes) -> None:
        try:
            record = msgspec.json.decode(raw)
            number = _number_of(record["id"])
            response = record["response"]
            self.num_errors += response is None or response["status_code"] != 200
            self._answered[number] = record["custom_id"]
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_answer(self._path, raw) from error


def _number_of(answer_id: str) -> int:
    """Line number in the id of a response. Raises ValueError, or AttributeError
    for an id that is not a string."""
    digits = answer_id.removeprefix(PREFIX)
    # int() also accepts "7 ", "+7", "007", "1_0" and digits of other scripts.
    if not digits.isdecimal() or answer_id != f"{PREFIX}{int(digits)}":
        raise ValueError(f"the id is {answer_id[:80]!r}, it must be {PREFIX} and a number")
    return int(digits)


def _no_answer(path: Path, raw: bytes) -> ConfigError:
    return ConfigError(
        f"{path} has a line that is not an answer of a batch: {raw[:80]!r}; name another "
        "file with -o"
    )
