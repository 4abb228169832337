"""Exception tree of server, engine, hpu and config, without the subclasses in other modules.

    GaudiserveError
    |-- UserError          the request is wrong; 4xx over HTTP
    |   |-- PromptTooLong  prompt and output do not fit the context
    |   `-- NotFound       a model, adapter or response that does not exist; 404
    |-- Overloaded         the server cannot take the request now; 503
    |-- EngineDied         an engine is gone and not restarted; 503
    |-- DeadlineExceeded   the timeout of the request has passed; 504
    |-- RequestFailed      this request failed in the engine; 500, other requests continue
    |-- CommandFailed      a command failed; exit status 1
    |-- ReasonPrinted      a child process of the command has printed the reason; its exit status
    `-- ConfigError        a flag, variable, file or checkpoint that cannot be used; exit status 2
        |-- SettingError       a flag that this model or its files do not allow; exit status 2
        |-- ProfileWritten     a finished run of --profile-prompt or --profile-decode; status 0
        `-- CheckpointError    a model that cannot be served; exit status 1 instead of 2

Messages about values should contain the value and what is allowed, or both conflicting values.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class GaudiserveError(Exception):
    """Base class of the exceptions in the tree above."""


class UserError(GaudiserveError):
    """The request is wrong. `param`: the field, with its path in messages, input, tools and
    response_format; `code`: an error code that clients check."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class PromptTooLong(UserError):
    """The prompt (`num_prompt_tokens`, or more with `at_least`) and its output (`max_tokens`, if
    set) do not fit `max_model_len`."""

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        max_model_len: int,
        *,
        param: str = "messages",
        limit: str = "max_tokens",
        at_least: bool = False,
        item: str = "",
    ) -> None:
        """`param`: the field of the prompt; `limit`: the field of `max_tokens`, reported instead if
        the prompt alone fits. `item`: name of the prompt that is too long, for requests with
        several inputs and no output."""
        more = "at least " if at_least else ""
        requested = f"{more}{num_prompt_tokens} tokens in the prompt"
        if max_tokens is not None:
            requested = (
                f"{more}{num_prompt_tokens + max_tokens} tokens "
                f"({num_prompt_tokens} in the prompt, {max_tokens} for the output)"
            )
        remedy = "shorten the prompt"
        if max_tokens is not None and num_prompt_tokens < max_model_len and not at_least:
            param = limit
            remedy = f"ask for at most {max_model_len - num_prompt_tokens} tokens, or {remedy}"
        if item:
            requested, remedy = f"{more}{num_prompt_tokens} tokens in {item}", "shorten it"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. "
            f"However, you requested {requested}. Please {remedy}.",
            param=param,
            code="context_length_exceeded",
        )


class NotFound(UserError):
    """The request names a model, adapter, response or item that does not exist; 404."""


class Overloaded(GaudiserveError):
    """The server cannot take the request now; the client may retry after `retry_after_s` seconds
    (None: unknown)."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int | None = 1,
        type: str = "server_overloaded",
        is_slow: bool = False,
    ) -> None:
        """`is_slow`: whether --max-ttft is the reason."""
        super().__init__(message)
        self.is_slow = is_slow
        self.message = message
        self.retry_after_s = retry_after_s
        self.type = type


class DeadlineExceeded(GaudiserveError):
    """The request's timeout has passed; 504."""

    def __init__(self, message: str, *, has_started: bool = False) -> None:
        super().__init__(message)
        self.has_started = has_started
        """Whether an engine had started the request."""


class EngineDied(GaudiserveError):
    """An engine, a worker or a private server is gone or was closed; this process does not restart
    it."""

    is_logged = False
    """Whether the failed process has already logged the cause."""

    def __init__(self, message: str | None = None, *, is_external: bool = False) -> None:
        """`is_external`: the cause is outside of the engine, for example the OOM killer."""
        super().__init__(message)
        self.is_external = is_external


class RequestFailed(GaudiserveError):
    """A single request failed in the engine, for example with NaN logits; other requests
    continue."""


class CommandFailed(GaudiserveError):
    """A command failed, for example because no server answers."""


class ReasonPrinted(GaudiserveError):
    """A child process of this command ended with `status`, after it printed the reason."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a process that printed the reason exited with code {status}")
        self.status = status


class ConfigError(GaudiserveError):
    """A setting, file or checkpoint that cannot be used."""


class SettingError(ConfigError):
    """A setting that is invalid, or that this model does not support. The message names the flag to
    change; with another value the model can be served."""


class ProfileWritten(ConfigError):
    """Ends the start-up after the profile of --profile-prompt or --profile-decode is written. The
    message has its path."""


class CheckpointError(ConfigError):
    """A model that cannot be served."""


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Turn a ConfigError in the block into a CheckpointError, because the model is the cause. A
    SettingError is not changed."""
    try:
        yield
    except (CheckpointError, SettingError):
        raise
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SMALLEST_SHARE = 0.1
"""A size below this fraction of a unit is shown in the next smaller unit."""


def bytes_text(num_bytes: float) -> str:
    """`num_bytes` in a readable unit: 1.50 GiB, 17.00 MiB, 0.50 KiB, 17 bytes."""
    for unit, size in _UNITS:
        if num_bytes >= _SMALLEST_SHARE * size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def counted(count: int, noun: str) -> str:
    """`count` with `noun` in the singular or plural: 1 card, 2 cards."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def capitalized(text: str) -> str:
    """`text` with an upper-case first letter, for log lines."""
    return text[:1].upper() + text[1:]


MAX_SHOWN_CHARACTERS = 40
_MAX_SHOWN_BITS = 128


def value_text(value: object) -> str:
    """A request value for an error message: 3, true, null, 'text'; containers without their
    contents (`a list`, `an empty object`). Long values are shortened."""
    if isinstance(value, (bool, type(None))):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.17g}"
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN_CHARACTERS]) + "..." * (len(value) > MAX_SHOWN_CHARACTERS)
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if isinstance(value, Mapping):
        return "an object" if value else "an empty object"
    return f"{value!r:.{MAX_SHOWN_CHARACTERS}}"


def error_at_path(message: str) -> UserError:
    """UserError with `message`. Its first word, the path of the invalid field such as
    messages[0].role, becomes `param`."""
    return UserError(message, param=message.partition(" ")[0])


def wrong_field(parent: Mapping[str, object], field: str, where: str, wanted: str) -> str:
    """The message for a field of the object at `where` that is missing or invalid."""
    found = f"is {value_text(parent[field])}" if field in parent else "is missing"
    return f"{where}.{field} {found}, it must be {wanted}"
