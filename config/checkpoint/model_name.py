"""Model names: paths, Hugging Face ids, and the demo model. Imports neither torch, transformers nor
the hub library, so that a command can reject a wrong name before its slow imports."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from config.cache_folder import in_container
from config.checkpoint.demo import NAMES
from config.errors import ConfigError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form of a hub id (org/name) and not of a GGUF file name: a mistyped
    path must not be sent to the hub."""
    return _ID.fullmatch(model) is not None and not model.lower().endswith(".gguf")


def check_model_name(model: str) -> None:
    """Raise ConfigError for a name that is neither the demo model, a local path nor a hub id."""
    exists = Path(os.path.expanduser(model)).exists()
    if not (model in NAMES or exists or is_hub_id(model)):
        raise no_such_model(model)


def no_such_model(model: str) -> ConfigError:
    """The error for a name that is neither the demo model, a local path nor a hub id."""
    if model.startswith((".", "/", "~")) or model.lower().endswith(".gguf"):
        is_mount = model.startswith("/") and in_container()
        mount = "; mount it into this container, with docker by -v" if is_mount else ""
        return ConfigError(f"no such file or folder: {model}{mount}")
    return ConfigError(
        f"no such file or folder: {model}; a Hugging Face id has the form org/name, the demo "
        f"model is {NAMES[0]!r}"
    )


def default_names(model: str, adapters: Collection[str] = ()) -> tuple[str, ...]:
    """Names of `model` in the API without --served-model-name. An existing path has two names: the
    path itself, as in vLLM, and its last component, unless an adapter has this name."""
    if model in NAMES:
        return NAMES
    path = os.path.expanduser(model)
    if not os.path.exists(path):
        return (model,)
    last = os.path.basename(os.path.abspath(path))
    return (model,) if not last or last == model or last in adapters else (model, last)
