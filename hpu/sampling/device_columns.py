"""DeviceColumns: inputs of launches, uploaded with a single copy and kept for each batch width."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.sampling.params import Params, TableRows

T = TypeVar("T")


class ByWidth(dict[int, T], Generic[T]):
    """Objects by batch width, each created on first use, in its own recipe."""

    def __init__(self, backend: Backend, make: Callable[[int], T]) -> None:
        super().__init__()
        self._backend = backend
        self._make = make

    def __missing__(self, width: int) -> T:
        with self._backend.recipe:
            made = self[width] = self._make(width)
        return made


class DeviceColumns:
    """A (count, width) device buffer that is uploaded with a single copy."""

    def __init__(
        self, backend: Backend, count: int, width: int, dtype: torch.dtype, num_sets: int = 2
    ) -> None:
        """`num_sets`: number of launches in flight."""
        self._backend = backend
        self._shape = (count, width)
        self._sets = list(backend.input_tensors(count * width, dtype, num_sets))
        self._columns = [torch.split(column_set, width) for column_set in self._sets]
        self._host = self._sets[0]

    @property
    def device(self) -> Tensor:
        """(count * width,): device tensor of the last upload."""
        return self._sets[-1]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Columns (width,) of `device`."""
        return self._columns[-1]

    def host(self) -> npt.NDArray[Any]:
        """(count, width) host memory to fill before `upload`."""
        self._host = self._backend.host_for(self._sets[0])
        return self._host.numpy().reshape(self._shape)

    def upload(self, pinned: list[Tensor]) -> None:
        """Copy to the device, and append the host tensor of the copy to `pinned`."""
        self._sets.append(self._sets.pop(0))
        self._columns.append(self._columns.pop(0))
        self._backend.upload(self.device, self._host)
        pinned.append(self._host)


class LaunchColumns:
    """Parameters and table rows of a launch of `width` requests."""

    def __init__(self, backend: Backend, width: int, num_sets: int) -> None:
        """`num_sets`: number of launches in flight."""
        self.params = DeviceColumns(backend, len(Params._fields), width, torch.float32, num_sets)
        self.rows = DeviceColumns(
            backend, len(TableRows._fields), width, backend.index_dtype, num_sets
        )

    @property
    def table_rows(self) -> TableRows:
        """Columns (B,) of the index type."""
        return TableRows(*self.rows.columns)
