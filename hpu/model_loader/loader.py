"""Weights from safetensors into a model's parameters, one tensor at a time, never from pickles."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from config.checkpoint.safetensors_files import weight_files
from config.checkpoint.weight_map import WeightMap, WeightSpec
from config.errors import ConfigError
from hpu.distributed.process_groups import SINGLE, ProcessGroup

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_NAMES_IN_ERROR = 5


class Loadable(Protocol):
    """A model, or several that share a checkpoint."""

    @property
    def weight_map(self) -> WeightMap:
        """The tensors that the checkpoint must hold."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by the paths that `weight_map` names."""
        ...


def load_weights(
    model: Loadable,
    path: str,
    *,
    on_progress: Callable[[int, int], None],
    group: ProcessGroup = SINGLE,
) -> None:
    """Fill `model` from the safetensors in folder `path`, converting dtypes on the way; of sharded
    parameters the shard of this rank of the tensor-parallel `group`.

    Files are memory-mapped, one tensor at a time. `on_progress(loaded, total)` counts tensors.
    ConfigError names the tensors that are missing, unexpected or of another shape.
    """
    weight_map = model.weight_map
    specs = {spec.name: spec for spec in weight_map.entries()}
    parameters = dict(model.named_parameters())
    folder = Path(path)
    loaded: set[str] = set()
    with _progress_bar(len(specs)) as bar:
        for file in weight_files(folder):
            for stored_name, tensor in _tensors(file):
                name = weight_map.map_name(stored_name)
                spec = specs.get(name)
                if spec is None:
                    if weight_map.ignores(name):
                        continue
                    raise ConfigError(f"{file} holds {name}, which this model has no place for")
                if name in loaded:
                    raise ConfigError(f"{name} is in more than one file of {folder}")
                _check(spec, tensor, file)
                _fill(parameters[spec.parameter], spec, tensor, group)
                loaded.add(name)
                bar.update()
                on_progress(len(loaded), len(specs))
    missing = [name for name in specs if name not in loaded]
    if missing:
        shown = ", ".join(
            f"{name} {_format_shape(specs[name].shape)}" for name in missing[:MAX_NAMES_IN_ERROR]
        )
        more = len(missing) - MAX_NAMES_IN_ERROR
        raise ConfigError(
            f"{folder} holds {len(loaded)} of {len(specs)} tensors, missing are {shown}"
            + (f" and {more} more" if more > 0 else "")
        )


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Each name and tensor of a file."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            names: list[str] = list(opened.keys())
            for name in names:
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}") from error


def _check(spec: WeightSpec, tensor: Tensor, file: Path) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ConfigError(
            f"{spec.name} in {file} is {_format_shape(tuple(tensor.shape))}, the model needs "
            f"{_format_shape(spec.shape)}"
        )
    if tensor.dtype not in FLOATS:
        raise ConfigError(
            f"{spec.name} in {file} is {tensor.dtype}, it must be a float of 16 or 32 bits: "
            "quantised weights are not supported yet"
        )


def _fill(parameter: Tensor, spec: WeightSpec, tensor: Tensor, group: ProcessGroup) -> None:
    """Copy this rank's shard of `tensor` into the outputs of `parameter` that it holds."""
    with torch.no_grad():
        if spec.repeats is not None:
            tensor = tensor.expand(spec.repeats, *tensor.shape)
        if not spec.output_sizes:
            parameter.copy_(_shard(tensor, spec.shard_dim, group.size, group))
            return
        # A tensor with several outputs is cut at their full sizes first, then each one is sharded.
        sizes = [spec.output_sizes[output] for output in spec.outputs]
        num_shards = [spec.num_shards(i, group.size) for i in range(len(spec.output_sizes))]
        targets = parameter.split_with_sizes(
            [size // count for size, count in zip(spec.output_sizes, num_shards, strict=True)]
        )
        for output, part in zip(spec.outputs, tensor.split_with_sizes(sizes), strict=True):
            targets[output].copy_(_shard(part, spec.shard_dim, num_shards[output], group))


def _shard(tensor: Tensor, dim: int | None, num_shards: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of `tensor` along `dim`. Of fewer shards than ranks, adjacent ranks have
    the same."""
    if dim is None:
        return tensor
    return tensor.chunk(num_shards, dim)[group.rank * num_shards // group.size]


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


@contextmanager
def _progress_bar(total: int) -> Iterator[Any]:
    with tqdm(
        total=total, desc="Loading weights", unit="tensor", disable=not sys.stderr.isatty()
    ) as bar:
        yield bar
