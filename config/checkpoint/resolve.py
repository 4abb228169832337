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
    engine: EngineConfig,
    *,
    check: Callable[[str], object] = read_model_config,
    report: Report = unreported,
    progress: bool = True,
) -> str:
    """A local folder with config.json, *.safetensors and the tokenizer files of the model of
    `engine`, if any.

    The model is the demo model's name, a folder, a `.gguf` file (converted once into `cache_dir`,
    its matrices rounded to `dtype`; float32 is exact) or a hub id, downloaded at `revision` into
    `download_dir` after `check` of its other files (config/checkpoint/hub.py). With the
    quantization gguf the folder of a GGUF file also has its quantized weights. `dtype` auto means
    bfloat16. With random weights a folder may lack *.safetensors, and no *.safetensors are
    downloaded. `progress` shows progress bars on a terminal; `report` is called with the same
    progress. Raises CheckpointError; SettingError if a setting such as `hf_overrides` is wrong.
    """
    model, dtype, cache_dir = engine.model, engine.dtype, engine.cache_dir
    hf_overrides, has_weights = engine.hf_overrides, engine.load_format != DUMMY
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
            keep_blocks=engine.quantization == "gguf",
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
            engine.revision,
            engine.download_dir,
            check=checked,
            has_weights=has_weights,
            progress=progress,
            report=report,
        )
    else:
        raise no_such_model(model)
    return with_overrides(str(folder), hf_overrides, cache_dir)


def _checked(folder: Path, has_weights: bool, check: Callable[[str], object]) -> Path:
    names = sorted(path.name for path in folder.iterdir())
    has_files = not has_weights or any(name.endswith(".safetensors") for name in names)
    if "config.json" in names and not has_files:
        # An unsupported model is reported before its missing weights.
        check(str(folder))
    if "config.json" not in names or not has_files:
        raise incomplete(str(folder), names, folder / "config.json")
    return folder
