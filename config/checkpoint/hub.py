"""Downloads a model from the Hugging Face hub. The configuration is checked before the weights are
downloaded."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The library imports its modules lazily: most processes of a server import this file and download
# nothing.
import huggingface_hub
import msgspec
from safetensors import SafetensorError, safe_open

from config.checkpoint.safetensors_files import incomplete
from config.checkpoint.tokenizer_bounds import MAX_TOKENIZER_BYTES
from config.errors import ConfigError
from config.progress import DOWNLOADING, Report, bar_size, unreported

if TYPE_CHECKING:
    import huggingface_hub.errors

logger = logging.getLogger(__name__)

_FACTS = ("*.json", "tokenizer.model", "*.jinja", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
_EXCLUDED = ("original/*", "onnx/*", "consolidated*")

_DISK_ERRORS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.EIO),
    )
)
"""OS errors for a folder to which nothing can be written."""


def download_model(
    model: str,
    revision: str | None,
    folder: str | None,
    *,
    check: Callable[[str], object],
    has_weights: bool = True,
    progress: bool = True,
    report: Report = unreported,
) -> Path:
    """The local folder of a model on the hub, below `folder` (None: the hub's own cache). `check`
    is called with the folder before the weights are downloaded; it raises ConfigError for a model
    that cannot be served. Raises ConfigError also if the hub does not have the model, or if its
    weights are not in safetensors. Without `has_weights` no weights are downloaded."""
    report(DOWNLOADING, 0, 0)
    path = download_files(model, revision, folder, _FACTS, report, progress)
    if (path / "config.json").is_file():
        try:
            check(str(path))
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), model)) from error
        if not has_weights:
            return path
        path = download_files(model, revision, folder, (*_FACTS, *_WEIGHTS), report, progress)
        if any(path.glob("*.safetensors")):
            return path
    names: list[str] = []
    with suppress(*_errors()):
        names = huggingface_hub.HfApi().list_repo_files(model, revision=revision)
    raise incomplete(model, sorted(names), path / "config.json")


def download_files(
    model: str,
    revision: str | None,
    folder: str | None,
    patterns: Sequence[str],
    report: Report = unreported,
    progress: bool = True,
) -> Path:
    """The local folder with the files of a model that match `patterns`. Without a network, files of
    an earlier download are used. Damaged files are downloaded again: the hub library keeps a file
    of an earlier download as it is. `progress` shows progress bars on a terminal. Raises
    ConfigError."""
    cache_dir = None if folder is None else os.path.expanduser(folder)
    download = partial(
        huggingface_hub.snapshot_download,
        model,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=list(patterns),
        ignore_patterns=list(_EXCLUDED),
    )
    earlier: set[Path] = set()
    with suppress(*_errors()):
        earlier = {file.resolve() for file in _files(Path(download(local_files_only=True)))}
    try:
        path = Path(download(tqdm_class=_reporting(report, progress)))
        for name in _damaged(path, earlier):
            logger.warning("%s of %s is damaged, and is downloaded again", name, model)
            # Without a network, the reader of the damaged file reports it.
            with suppress(*_errors()):
                huggingface_hub.hf_hub_download(
                    model, name, revision=revision, cache_dir=cache_dir, force_download=True
                )
        return path
    except _errors() as error:
        raise ConfigError(_reason(error, model, revision, folder)) from error


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def _damaged(folder: Path, earlier: Container[Path]) -> list[str]:
    """Relative paths of the files of `earlier` downloads that are not whole: a full disk may have
    truncated them."""
    files = [file for file in _files(folder) if file.resolve() in earlier]
    return [str(file.relative_to(folder)) for file in files if not _is_whole(file)]


def _is_whole(file: Path) -> bool:
    """False for an invalid safetensors file, and for a truncated JSON file of at most
    MAX_TOKENIZER_BYTES. Reads no weights."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="np"):
                return True
        if file.suffix == ".json" and file.stat().st_size <= MAX_TOKENIZER_BYTES:
            msgspec.json.decode(file.read_bytes(), type=msgspec.Raw)
    except SafetensorError:
        return False
    except msgspec.DecodeError as error:
        return "truncated" not in str(error)
    except (RecursionError, UnicodeDecodeError, OSError):
        # Errors of other kinds are reported where the file is used.
        return True
    return True


def _errors() -> tuple[type[Exception], ...]:
    """Exceptions that a download may raise. The HTTP client of the hub library, and so the base
    class of its errors, differs between releases."""
    import_module("huggingface_hub.errors")
    errors = huggingface_hub.errors
    bases = (base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception))
    return (*bases, errors.HFValidationError, OSError)


def _reason(error: Exception, model: str, revision: str | None, folder: str | None) -> str:
    errors, constants = huggingface_hub.errors, huggingface_hub.constants
    hub = constants.ENDPOINT
    if isinstance(error, errors.HFValidationError):
        return f"{model!r} is not the name of a model on {hub}: {error}"
    # The library wraps request errors if the cache cannot replace the response.
    cause = error.__cause__ or error if isinstance(error, errors.LocalEntryNotFoundError) else error
    if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
        return (
            f"{model!r} cannot be written to {folder or constants.HF_HUB_CACHE} "
            f"({cause.strerror}); set --download-dir or HF_HOME to another folder, in a container "
            "to a mounted volume"
        )
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return (
            f"{model!r} is not a local folder and was not downloaded before, and HF_HUB_OFFLINE "
            "forbids downloads: unset it, or use a local folder"
        )
    # Before version 1.0, an entry that is not in the cache raises an HTTP error without a response.
    if not isinstance(cause, errors.HfHubHTTPError) or cause.response is None:
        return (
            f"{model!r} is not a local folder and could not be downloaded from {hub} "
            f"({type(cause).__name__}: {_first_line(cause)}); without a network use a folder or a "
            "GGUF file, behind a proxy set HTTPS_PROXY, for a mirror set HF_ENDPOINT"
        )
    status = cause.response.status_code
    if status in (401, 403):
        is_known = status == 403 or isinstance(cause, errors.GatedRepoError)
        unknown = "" if is_known else ", or there is no such model"
        return (
            f"{model!r} is gated or private: set HF_TOKEN to a token of an account that may read "
            f"it, see {hub}/{model} (the hub answered {status}{unknown})"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{model!r} on {hub} has no revision {revision or constants.DEFAULT_REVISION!r}"
    if status == 404:
        return f"{model!r} is not a local folder, and {hub} has no model of that name"
    return (
        f"{model!r} could not be downloaded, {hub} answered {status} ({_first_line(cause)}); try "
        "again later, or use a folder"
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")


def _reporting(report: Report, progress: bool) -> type:
    """A progress bar class for the hub library that reports byte counts, and draws bars only on a
    terminal. The library creates two byte bars (received, written), and either may not
    advance; older versions create no byte bars here and only count files."""
    done = total = 0
    is_terminal = sys.stderr.isatty()

    bar = import_module("huggingface_hub.utils.tqdm").tqdm

    class Reporting(bar):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **look: Any) -> None:
            self._unit_bytes = 1 if look.get("unit") == "B" else 0
            self._done_bytes = 0
            self._total_bytes = int(look.get("total") or 0)
            look["disable"] = look.get("disable") or not (progress and is_terminal)
            super().__init__(*args, **{**bar_size(), **look})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done, total
            self._done_bytes += int(n or 0) * self._unit_bytes
            done = max(done, self._done_bytes)
            total = max(total, int(self.total or 0) * self._unit_bytes)
            report(DOWNLOADING, done, total)
            is_shown: bool | None = super().update(n)
            return is_shown

    return Reporting
