"""From what a user calls a model to a local folder: a folder, a GGUF file, a hub id, the demo."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from config.demo import NAMES, fetch_demo
from config.env import cache_home
from config.errors import ConfigError
from config.gguf import converted

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$", re.ASCII)
_WANTED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.tiktoken"]
_UNWANTED = ["original/*", "onnx/*", "consolidated*"]


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    progress: bool = True,
    dtype: str = "bfloat16",
) -> str:
    """A local folder with config.json, *.safetensors and tokenizer files.

    `model` is the demo model's name, a folder, a `.gguf` file (converted once into `cache_dir`, its
    matrices rounded to `dtype`; float32 is exact) or a hub id, downloaded at `revision`.
    `dtype` may be the engine's: auto means bfloat16. ConfigError says what is missing or wrong.
    """
    if model in NAMES:
        model = fetch_demo(cache_dir, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        cache = Path(cache_dir or cache_home())
        stored = "bfloat16" if dtype == "auto" else dtype
        return str(converted(path, cache, dtype=stored, progress=progress))
    if path.exists():
        raise ConfigError(f"{path} is neither a folder nor a .gguf file")
    if _HUB_ID.match(model):
        return _downloaded(model, revision)
    raise ConfigError(
        f"there is no folder or GGUF file {model!r}, and it is no hub id (like org/name); "
        f"the demo model is called {NAMES[0]!r}"
    )


def _checked(folder: Path) -> str:
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"{folder} has no {' and no '.join(missing)}")
    return str(folder)


def _downloaded(model: str, revision: str | None) -> str:
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"{model!r} is no local folder, and the hub could not give it "
            f"({type(error).__name__}: {reason}); give a folder or a GGUF file instead"
        ) from error
    return _checked(Path(folder))
