"""From the name of a model (folder, GGUF file, Hugging Face id, demo) to a local folder."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import tqdm as HubBar

from config.checkpoint.demo import NAMES, fetch_demo
from config.checkpoint.gguf import converted
from config.errors import ConfigError
from config.loading.env import cache_home
from config.progress import Report, unreported

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$", re.ASCII)
_INCLUDED = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.tiktoken"]
_EXCLUDED = ["original/*", "onnx/*", "consolidated*"]


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    progress: bool = True,
    dtype: str = "bfloat16",
    keep_blocks: bool = False,
    report: Report = unreported,
) -> str:
    """A local folder with config.json, *.safetensors and tokenizer files.

    `model` is the demo model's name, a folder, a `.gguf` file (converted once into `cache_dir`, its
    matrices rounded to `dtype`; float32 is exact) or a hub id, downloaded at `revision`. With
    `keep_blocks` the folder of a GGUF file also has its quantized weights. `dtype` auto means
    bfloat16. `progress` shows bars, `report` is called with the same progress. ConfigError says
    what is missing or wrong.
    """
    if model in NAMES:
        model = fetch_demo(cache_dir, progress, report)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        cache = Path(cache_dir or cache_home())
        stored = "bfloat16" if dtype == "auto" else dtype
        return str(
            converted(
                path,
                cache,
                dtype=stored,
                keep_blocks=keep_blocks,
                progress=progress,
                report=report,
            )
        )
    if path.exists():
        raise ConfigError(f"{path} is neither a folder nor a .gguf file")
    if _HUB_ID.match(model):
        return _downloaded(model, revision, report)
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


def _downloaded(model: str, revision: str | None, report: Report) -> str:
    report("fetch", 0, 0)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=_INCLUDED,
            ignore_patterns=_EXCLUDED,
            tqdm_class=_reporting(report),
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"{model!r} is no local folder, and the hub could not give it "
            f"({type(error).__name__}: {reason}); give a folder or a GGUF file instead"
        ) from error
    return _checked(Path(folder))


def _reporting(report: Report) -> type[HubBar]:
    """The hub's own bars, which report what is counted in bytes.

    There are two of those (received, written), of which either may stand still; older versions of
    the library have none here, but count files.
    """
    done = total = 0

    class Reporting(HubBar):
        def __init__(self, *args: Any, **look: Any) -> None:
            self._unit_bytes = 1 if look.get("unit") == "B" else 0
            self._done_bytes = 0
            super().__init__(*args, **look)  # type: ignore[no-untyped-call] # untyped there

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done, total
            self._done_bytes += int(n or 0) * self._unit_bytes
            done = max(done, self._done_bytes)
            total = max(total, int(self.total or 0) * self._unit_bytes)
            report("fetch", done, total)
            return super().update(n)

    return Reporting
