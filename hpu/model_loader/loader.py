"""Weights from safetensors into a model's parameters, one tensor at a time. Knows no architectures,
and no pickle."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from config.checkpoint.safetensors_files import weight_files
from config.errors import ConfigError

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES_SHOWN = 5


class Place(Protocol):
    """Where a tensor goes, and the shape it must have (it may be repeated into the target)."""

    @property
    def target(self) -> Tensor: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Loadable(Protocol):
    """A model that says which tensors it needs."""

    def places(self) -> Iterator[tuple[str, Place]]:
        """Each name with its Place."""
        ...

    def own_name(self, name: str) -> str:
        """What `places` calls the tensor that a checkpoint calls `name`."""
        ...

    def may_skip(self, name: str) -> bool: ...


def load_weights(model: Loadable, path: str, *, on_progress: Callable[[int, int], None]) -> None:
    """Fill `model` from the safetensors in folder `path`, converting dtypes on the way.

    Files are memory-mapped and one tensor is in flight at a time. `on_progress(done, total)` counts
    tensors. ConfigError names every tensor that is missing, unexpected or of another shape.
    """
    places: dict[str, Place] = dict(model.places())
    folder = Path(path)
    files = weight_files(folder)
    done: set[str] = set()
    with _bar(len(places)) as bar:
        for file in files:
            for stored, tensor in _tensors(file):
                name = model.own_name(stored)
                place = places.get(name)
                if place is None:
                    if model.may_skip(name):
                        continue
                    raise ConfigError(f"{file} holds {name}, which this model has no place for")
                if name in done:
                    raise ConfigError(f"{name} is in more than one file of {folder}")
                _fill(name, place, tensor, file)
                done.add(name)
                bar.update()
                on_progress(len(done), len(places))
    missing = [name for name in places if name not in done]
    if missing:
        shown = ", ".join(f"{name} {_shape(places[name].shape)}" for name in missing[:NAMES_SHOWN])
        more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
        raise ConfigError(
            f"{folder} holds {len(done)} of {len(places)} tensors, missing are {shown}{more}"
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


def _fill(name: str, place: Place, tensor: Tensor, file: Path) -> None:
    if tuple(tensor.shape) != tuple(place.shape):
        raise ConfigError(
            f"{name} in {file} is {_shape(tuple(tensor.shape))}, the model needs "
            f"{_shape(place.shape)}"
        )
    if tensor.dtype not in FLOATS:
        raise ConfigError(
            f"{name} in {file} is {tensor.dtype}, it must be a float of 16 or 32 bits: quantised "
            "weights are not supported yet"
        )
    with torch.no_grad():
        place.target.copy_(tensor)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    with tqdm(
        total=total, desc="Loading weights", unit="tensor", disable=not sys.stderr.isatty()
    ) as bar:
        yield bar
