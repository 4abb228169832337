"""Weights from safetensors into a model's parameters, one tensor at a time, never from pickles."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from config.checkpoint.safetensors_files import weight_files
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.errors import ConfigError
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.model_loader.mxfp4 import dequantize_mxfp4

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
    filler = _Filler(group)
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
                filler.fill(parameters[spec.parameter], spec, tensor)
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
    if spec.mxfp4:
        if tensor.dtype != torch.uint8:
            raise ConfigError(f"{spec.name} in {file} is {tensor.dtype}, MXFP4 is in torch.uint8")
    elif tensor.dtype not in FLOATS:
        raise ConfigError(
            f"{spec.name} in {file} is {tensor.dtype}, it must be a float of 16 or 32 bits: "
            "quantised weights are not supported yet"
        )


class _Filler:
    """Copies this rank's shards of tensors into parameters.

    A parameter that several tensors fill, and that is not in the host's memory, is put together
    there and copied once: on a lazy device each write to a part of it would copy the whole
    parameter.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._unfinished: dict[str, tuple[Tensor, int]] = {}
        """Path of a parameter -> its copy on the host, and how many elements of it are filled."""
        self._halves: dict[str, tuple[WeightSpec, Tensor]] = {}
        """Path of a parameter -> the half of its MXFP4 that came first. It is memory-mapped."""

    def fill(self, parameter: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
        """Copy `tensor` into the part of `parameter` that it holds."""
        with torch.no_grad():
            if spec.mxfp4:
                self._fill_mxfp4(parameter, spec, tensor)
                return
            if spec.repeats is not None:
                tensor = tensor.expand(spec.repeats, *tensor.shape)
            if spec.interleaved_size is not None:
                pairs = tensor.view(-1, spec.interleaved_size // 2, 2, *tensor.shape[1:])
                tensor = pairs.transpose(1, 2).reshape(tensor.shape)
            if spec.transposed:
                tensor = tensor.transpose(-1, -2)
            if parameter.device.type == "cpu":
                self._fill_part(parameter, spec, _parts(spec, tensor))
            elif (spec.output_sizes, spec.expert, spec.num_experts) == ((), None, None):
                # Converted here: on the device that would need memory for both types.
                parameter.copy_(self._shard(spec, tensor).to(parameter.dtype))
            else:
                num_elements = spec.num_elements(self._group.size)
                self._collect(parameter, spec, _parts(spec, tensor), num_elements)

    def _fill_mxfp4(self, parameter: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
        """Once both halves are there, dequantize one expert after the other."""
        if spec.parameter not in self._halves:
            self._halves[spec.parameter] = spec, tensor
            return
        first, half = self._halves.pop(spec.parameter)
        blocks, scales = (tensor, half) if spec.mxfp4 == "blocks" else (half, tensor)
        parts = map(dequantize_mxfp4, blocks, scales)
        if parameter.device.type == "cpu":
            self._fill_part(parameter, spec, parts)
        else:
            num_elements = sum(one.num_elements(self._group.size) for one in (first, spec))
            self._collect(parameter, spec, parts, num_elements)

    def _collect(
        self, parameter: Tensor, spec: WeightSpec, parts: Iterable[Tensor], num_elements: int
    ) -> None:
        if spec.parameter not in self._unfinished:
            self._unfinished[spec.parameter] = (
                torch.empty(parameter.shape, dtype=parameter.dtype),
                0,
            )
        host, filled = self._unfinished[spec.parameter]
        self._fill_part(host, spec, parts)
        filled += num_elements
        self._unfinished[spec.parameter] = host, filled
        if filled == host.numel():
            parameter.copy_(host)
            del self._unfinished[spec.parameter]

    def _fill_part(self, target: Tensor, spec: WeightSpec, parts: Iterable[Tensor]) -> None:
        targets = target if spec.expert is None else target[spec.expert]
        for part, source in zip(_parts(spec, targets), parts, strict=True):
            if spec.output_sizes:
                self._fill_outputs(part, spec, source)
            else:
                part.copy_(self._shard(spec, source))

    def _shard(self, spec: WeightSpec, tensor: Tensor) -> Tensor:
        return _shard(tensor, spec.shard_dim, self._group.size, self._group)

    def _fill_outputs(self, target: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
        # A tensor with several outputs is cut at their full sizes first, then each one is sharded.
        sizes = [spec.output_sizes[output] for output in spec.outputs]
        num_shards = [spec.num_shards(i, self._group.size) for i in range(len(spec.output_sizes))]
        parts = target.split_with_sizes(
            [size // count for size, count in zip(spec.output_sizes, num_shards, strict=True)]
        )
        for output, part in zip(spec.outputs, tensor.split_with_sizes(sizes), strict=True):
            parts[output].copy_(_shard(part, spec.shard_dim, num_shards[output], self._group))


def _parts(spec: WeightSpec, tensor: Tensor) -> Iterable[Tensor]:
    """The tensors of all experts, if `tensor` stacks them; else the whole one."""
    return tensor if spec.num_experts is not None else (tensor,)


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
