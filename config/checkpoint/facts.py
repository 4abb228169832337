"""Reads the ModelConfig of a model without loading its weights, for commands that load no model."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from config.checkpoint.demo import NAMES, fetch_demo
from config.checkpoint.gguf import read_entries
from config.checkpoint.gguf_config import model_config
from config.checkpoint.gguf_metadata import open_gguf
from config.checkpoint.hf_overrides import merged, parse_overrides, with_overrides
from config.checkpoint.hub import download_files
from config.checkpoint.model_name import is_hub_id, no_such_model
from config.checkpoint.safetensors_files import folder_shapes
from config.checkpoint.shapes import check_shapes, model_shapes
from config.checkpoint.weight_maps.text_part import UNLOADED
from config.engine import EngineConfig
from config.errors import ConfigError, checkpoint_errors
from config.model.model_config import ModelConfig, check_limits
from config.model.read_config import read_model_config

_FILE = "config.json"


@checkpoint_errors()
def model_facts(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    download_dir: str | None = None,
    hf_overrides: str = "",
    complete: Callable[[ModelConfig], ModelConfig] = lambda facts: facts,
) -> ModelConfig:
    """ModelConfig of `model`: a folder, a config.json, a .gguf file, the demo model, or a Hugging
    Face id. For a Hugging Face id, only config.json is downloaded. `hf_overrides`: as in `resolve`.
    `complete` adds values that are not in config.json; it gets a ModelConfig whose `path` is the
    folder of config.json, or the GGUF file. The result has `model` as its `path`. Raises
    CheckpointError; SettingError if a setting such as `hf_overrides` is wrong."""
    path = Path(os.path.expanduser(fetch_demo(cache_dir) if model in NAMES else model))
    if path.name == _FILE:
        folder = with_overrides(str(path.parent), hf_overrides, cache_dir)
        facts = read_model_config(folder, allow_quantized=True)
    elif path.is_dir():
        folder = with_overrides(str(path), hf_overrides, cache_dir)
        facts = read_model_config(folder, allow_quantized=True)
    elif path.suffix.lower() == ".gguf" and path.is_file():
        facts = _of_gguf(path, hf_overrides)
    elif path.exists():
        raise ConfigError(f"{path} is neither a folder nor a {_FILE} nor a .gguf file")
    elif is_hub_id(model):
        found = download_files(model, revision, download_dir, (_FILE,))
        folder = with_overrides(str(found), hf_overrides, cache_dir)
        facts = read_model_config(folder, allow_quantized=True)
    else:
        raise no_such_model(model)
    if path.is_dir() and any(path.glob("*.safetensors")):
        shapes = folder_shapes(path)
        own = model_shapes(facts, shapes)
        loaded = {name: shape for name, shape in shapes.items() if not name.startswith(UNLOADED)}
        count, total = (sum(map(math.prod, group.values())) for group in (own, loaded))
        if facts.vision is not None:
            facts = replace(facts, num_tower_parameters=total - count)
        # Quantized checkpoints store packed values and scales, so the number of elements is not the
        # number of parameters.
        if not facts.is_quantized:
            check_shapes(facts, shapes, path / _FILE)
            facts = replace(facts, num_parameters=count)
        else:
            check_limits(facts)
    else:
        check_limits(facts)
    return replace(complete(facts), path=model)


def engine_facts(
    engine: EngineConfig, complete: Callable[[ModelConfig], ModelConfig] = lambda facts: facts
) -> ModelConfig:
    """The result of `model_facts` for the model and the settings of `engine`."""
    return model_facts(
        engine.model,
        revision=engine.revision,
        cache_dir=engine.cache_dir,
        download_dir=engine.download_dir,
        hf_overrides=engine.hf_overrides,
        complete=complete,
    )


def _of_gguf(path: Path, hf_overrides: str) -> ModelConfig:
    file = open_gguf(path)
    config = merged(model_config(file, "bfloat16"), parse_overrides(hf_overrides))
    facts, _ = read_entries(file, config, {}, "bfloat16")
    return facts
