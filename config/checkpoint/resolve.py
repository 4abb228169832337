"""Resolves a model's name (folder, GGUF file, Hugging Face id, demo) to a local folder."""

import os
from collections.abc import Callable
from pathlib import Path

from config.checkpoint.demo import NAMES, SAMPLING, fetch_demo
from config.checkpoint.gguf import NO_SAMPLING, converted
from config.checkpoint.hf_overrides import parse_overrides, with_overrides
from config.checkpoint.hub import download_model
from config.checkpoint.model_name import is_hub_id, no_such_model
from config.checkpoint.safetensors_files import incomplete
from config.engine import DUMMY, EngineConfig
from config.errors import ConfigError, checkpoint_errors
from config.loading.env import cache_home
from config.model.read_config import read_model_config
from config.progress import Report, unreported


@checkpoint_errors()
def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    download_dir: str | None = None,
    progress: bool = True,
    dtype: str = "bfloat16",
    keep_blocks: bool = False,
    has_weights: bool = True,
    hf_overrides: str = "",
    report: Report = unreported,
    check: Callable[[str], object] = read_model_config,
) -> str:
    """A local folder with config.json, *.safetensors and the tokenizer files of the model, if any.

    `model` is the demo model's name, a folder, a `.gguf` file (converted once into `cache_dir`, its
    matrices rounded to `dtype`; float32 is exact) or a hub id, downloaded at `revision` into
    `download_dir` after `check` of its other files (config/checkpoint/hub.py). With `keep_blocks`
    the folder of a GGUF file also has its quantized weights. `dtype` auto means bfloat16. Without
    `has_weights` a folder may lack *.safetensors, and no *.safetensors are downloaded.
    `hf_overrides`: JSON object with fields that override config.json. `progress` shows progress
    bars on a terminal; `report` is called with the same progress. Raises CheckpointError;
    SettingError if a setting such as `hf_overrides` is wrong.
    """
    parse_overrides(hf_overrides)

    def checked(folder: str) -> None:
        check(with_overrides(folder, hf_overrides, cache_dir))

    sampling = NO_SAMPLING
    if model in NAMES:
        model, sampling = fetch_demo(cache_dir, progress, report), SAMPLING
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        folder = _checked(path, has_weights, checked)
    elif path.suffix.lower() == ".gguf" and path.is_file():
        folder = converted(
            path,
            Path(cache_dir or cache_home()),
            dtype="bfloat16" if dtype == "auto" else dtype,
            keep_blocks=keep_blocks,
            sampling=sampling,
            progress=progress,
            report=report,
            # A folder with overridden fields would have links to the unfinished folder.
            check=read_model_config if hf_overrides else check,
        )
    elif path.exists():
        raise ConfigError(f"{path} is neither a folder nor a .gguf file")
    elif is_hub_id(model):
        folder = download_model(
            model,
            revision,
            download_dir,
            check=checked,
            has_weights=has_weights,
            progress=progress,
            report=report,
        )
    else:
        raise no_such_model(model)
    return with_overrides(str(folder), hf_overrides, cache_dir)


def engine_folder(
    engine: EngineConfig, *, check: Callable[[str], object], report: Report, progress: bool = True
) -> str:
    """The folder that `resolve` returns for the model and the settings of `engine`."""
    return resolve(
        engine.model,
        revision=engine.revision,
        cache_dir=engine.cache_dir,
        download_dir=engine.download_dir,
        progress=progress,
        dtype=engine.dtype,
        keep_blocks=engine.quantization == "gguf",
        has_weights=engine.load_format != DUMMY,
        hf_overrides=engine.hf_overrides,
        report=report,
        check=check,
    )


def _checked(folder: Path, has_weights: bool, check: Callable[[str], object]) -> Path:
    names = sorted(path.name for path in folder.iterdir())
    has_files = not has_weights or any(name.endswith(".safetensors") for name in names)
    if "config.json" in names and not has_files:
        # An unsupported model is reported before its missing weights.
        check(str(folder))
    if "config.json" not in names or not has_files:
        raise incomplete(str(folder), names, folder / "config.json")
    return folder
