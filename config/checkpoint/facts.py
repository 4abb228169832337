"""The facts of a model without its weights, for `gaudiserve plan`."""

from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from config.checkpoint.demo import NAMES, fetch_demo
from config.checkpoint.gguf import check_facts
from config.checkpoint.gguf_config import model_config
from config.checkpoint.gguf_metadata import open_gguf
from config.checkpoint.safetensors_files import folder_shapes
from config.checkpoint.shapes import check_shapes
from config.errors import ConfigError
from config.model.model_config import ModelConfig, check_limits, read_model_config

_FILE = "config.json"


def model_facts(
    model: str, *, revision: str | None = None, cache_dir: str | None = None
) -> ModelConfig:
    """The facts of `model`: a folder, a config.json, a .gguf file, the demo, or a Hugging Face id,
    of which only config.json is fetched. `path` of the result is `model`. Raises ConfigError."""
    path = Path(fetch_demo(cache_dir) if model in NAMES else model).expanduser()
    if path.name == _FILE:
        facts = read_model_config(str(path.parent))
    elif path.is_dir():
        facts = read_model_config(str(path))
    elif path.suffix.lower() == ".gguf":
        facts = _of_gguf(path)
    elif path.exists():
        raise ConfigError(f"{path} is neither a folder nor a {_FILE} nor a .gguf file")
    elif model.count("/") == 1:
        facts = read_model_config(_fetched(model, revision))
    else:
        raise ConfigError(f"there is no folder {model!r}, and it is no hub id (like org/name)")
    if path.is_dir() and any(path.glob("*.safetensors")):
        check_shapes(facts, folder_shapes(path), path / _FILE)
    else:
        check_limits(facts)
    return replace(facts, path=model)


def _of_gguf(path: Path) -> ModelConfig:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    file = open_gguf(path)
    return check_facts(file, model_config(file, "bfloat16"), {})


def _fetched(model: str, revision: str | None) -> str:
    try:
        return snapshot_download(model, revision=revision, allow_patterns=[_FILE])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{model!r} is no folder here, and the hub could not give its {_FILE} "
            f"({type(error).__name__}); give a folder or a {_FILE}"
        ) from error
