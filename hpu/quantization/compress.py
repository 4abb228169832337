"""Creates quantized checkpoints with llmcompressor. Runs in a separate process, in an environment
in which llmcompressor is installed."""

import re
import shutil
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import llmcompressor
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from config.errors import ConfigError
from config.model.quantization.base import NEVER_QUANTIZED, expressions

MAX_GROUP = 128
CONFIG, WEIGHTS = "config.json", (".safetensors", ".safetensors.index.json")


def compress(
    folder: str,
    output: Path,
    scheme_name: str,
    modifier: str,
    samples: Sequence[str | list[dict[str, Any]]],
    *,
    group_size: int | None,
    max_length: int,
    ignored: Sequence[str] = (),
    keeps_activations: bool = False,
    keeps_last_layer: bool = False,
) -> None:
    """Quantize the checkpoint in `folder` and write it to `output`.

    `scheme_name`: name of a compressed-tensors scheme; `modifier`: a class below
    llmcompressor.modifiers; `samples`: calibration texts and conversations, empty for a modifier
    without calibration; `group_size`: None selects a size that divides all layers; `ignored`: paths
    of layers that are not quantized, or `re:` and a regular expression; `keeps_activations`: do not
    quantize the scheme's activations; `keeps_last_layer`: do not quantize the last decoder layer.
    Raises ConfigError.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear" and name != NEVER_QUANTIZED[0]
    }
    _check_ignored(ignored, list(linears))
    scheme = preset_name_to_scheme(scheme_name, ["Linear"])
    if keeps_activations:
        scheme.input_activations = None
    if scheme.weights.group_size:
        sizes = {name: module.in_features for name, module in linears.items()}
        scheme.weights.group_size = group_size or _common_group(sizes.values())
        _check_groups(scheme.weights.group_size, sizes)
    module, _, name = modifier.rpartition(".")
    kind = getattr(import_module(f"llmcompressor.modifiers.{module}"), name)
    kept = [*NEVER_QUANTIZED, *ignored, *(last_layer(linears) if keeps_last_layer else ())]
    recipe = kind(config_groups={"weights": scheme}, ignore=kept)
    if samples:
        if not torch.accelerator.is_available():
            # llmcompressor 0.14 pins memory even without an accelerator.
            IntermediatesCache.pin_memory = lambda *_: None
        tokens = [_tokens(tokenizer, sample, max_length) for sample in samples]
        data = datasets.Dataset.from_dict({"input_ids": [token for token in tokens if token]})
        llmcompressor.oneshot(
            model=model,
            recipe=recipe,
            dataset=data,
            max_seq_length=max_length,
            num_calibration_samples=len(data),
        )
    else:
        llmcompressor.oneshot(model=model, recipe=recipe)
    # save_pretrained rejects some published generation configs; the original file is copied below.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # theirs
    model.save_pretrained(output, save_compressed=True)
    _copy_other_files(Path(folder), output)


def last_layer(names: Iterable[str]) -> list[str]:
    """Entry of `ignored` for the last decoder layer of the linear layers `names`, which loses the
    most accuracy in FP8. Empty for a model with a single layer, which would otherwise not be
    quantized."""
    found = {match[0]: match for name in names if (match := re.match(r"(.*?\.)(\d+)\.", name))}
    last = max(found.values(), key=lambda match: int(match[2]), default=None)
    if last is None or int(last[2]) == 0:
        return []
    return ["re:" + re.escape(last[0]) + ".*"]


def _tokens(tokenizer: Any, sample: str | list[dict[str, Any]], max_length: int) -> list[int]:
    if isinstance(sample, str):
        return list(tokenizer(sample, truncation=True, max_length=max_length)["input_ids"])
    found = tokenizer.apply_chat_template(sample, tokenize=True, return_dict=True)["input_ids"]
    return list(found)[:max_length]


def _common_group(sizes: Any) -> int:
    group = MAX_GROUP
    while any(size % group for size in sizes):
        group //= 2
    return group


def _check_groups(group_size: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % group_size:
            raise ConfigError(
                f"--group-size {group_size} does not divide the {size} inputs of {name}"
            )


def _check_ignored(ignored: Sequence[str], names: list[str]) -> None:
    for key in ignored:
        matched = expressions((key,), f"--ignore {key}")
        if key not in names and not any(matched.first(name) is not None for name in names):
            raise ConfigError(
                f"--ignore {key} is not one of the {len(names)} linear layers, such as {names[0]}"
            )


def _copy_other_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and other files unchanged."""
    for file in source.iterdir():
        if file.is_file() and file.name != CONFIG and not file.name.endswith(WEIGHTS):
            shutil.copy(file, target / file.name)
