"""Conversion of FP8 checkpoints to the range of a Gaudi 2, whose FP8 ends at 240: weights are
halved and their scales doubled. Follows the vendor's converter (calibration/ in
vllm-project/vllm-gaudi)."""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from config.checkpoint.safetensors_files import read_header, weight_files
from config.errors import CheckpointError, ConfigError
from config.model.quantization.base import WeightScheme
from config.model.read_config import read_model_config
from hpu.quantization.stored.fp8 import halved

WEIGHT = ".weight"
MULTIPLIED = ("scales", "input_scale")
"""Roles of the tensors that are doubled."""
POWERS_OF_TWO = (torch.uint8, torch.float8_e8m0fnu)
MAX_EXPONENT = 254
"""Largest byte of a finite e8m0 scale."""


def convert(folder: str, output: Path) -> None:
    """Write the checkpoint in `folder` with converted weights to `output`. Raises ConfigError or
    CheckpointError if the checkpoint cannot be converted."""
    model_config = read_model_config(folder)
    schemes = model_config.quantization.schemes if model_config.quantization else ()
    floats = [scheme for scheme in schemes if scheme.is_float]
    if not floats:
        raise ConfigError(
            f"--to fp8-gaudi2 converts FP8 weights, and {model_config.fields.file} says that the "
            "weights are not in FP8: quantize them with --to fp8 first"
        )
    files = weight_files(Path(folder))
    types = {stored.name: stored.dtype for file in files for stored in read_header(file)}
    weights = {name for name, dtype in types.items() if dtype == "F8_E4M3"}
    doubled = {name for weight in weights for name in _scales_of(weight, floats, types)}
    output.mkdir(parents=True, exist_ok=True)
    for file in files:
        save_file(_converted(file, weights, doubled), output / file.name, {"format": "pt"})
    for path in Path(folder).iterdir():
        if path.is_file() and not (output / path.name).exists():
            shutil.copy(path, output / path.name)


def _scales_of(weight: str, schemes: list[WeightScheme], types: dict[str, str]) -> list[str]:
    """Names of the stored scales of an FP8 `weight`. Scales of stacked experts follow the name of
    the weight without a dot."""
    module = weight.removesuffix(WEIGHT)
    separator = "." if module != weight else ""
    parts = {part.suffix for scheme in schemes for part in scheme.parts if part.role in MULTIPLIED}
    names = [f"{module}{separator}{suffix}" for suffix in sorted(parts)]
    found = [name for name in names if name in types]
    if not found:
        raise CheckpointError(
            f"{weight} is in FP8 and has no scale: {' or '.join(names)} is missing"
        )
    return found


def _converted(file: Path, weights: set[str], doubled: set[str]) -> dict[str, Tensor]:
    with safe_open(str(file), framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if name in weights:
            tensors[name] = halved(tensor)
        elif name in doubled:
            tensors[name] = _twice(name, tensor)
    return tensors


def _twice(name: str, scales: Tensor) -> Tensor:
    """The scales `name` times 2; for powers of two (e8m0, in bytes) the exponents plus 1. Raises
    CheckpointError if a doubled scale is NaN, infinite or negative, and for other dtypes."""
    if scales.dtype in POWERS_OF_TWO:
        doubled = (scales.view(torch.uint8) + 1).view(scales.dtype)
        is_usable = scales.view(torch.uint8) < MAX_EXPONENT
    elif scales.dtype.is_floating_point and scales.dtype.itemsize > 1:
        doubled = scales * 2
        is_usable = doubled.isfinite() & (doubled >= 0)
    else:
        raise CheckpointError(
            f"{name} has scales of type {scales.dtype}, which is not supported for FP8"
        )
    if not is_usable.all():
        raise CheckpointError(
            f"{name} has {scales.numel()} scales, and {int((~is_usable).sum())} of them are NaN, "
            "negative or infinite when they are doubled"
        )
    return doubled
