"""Writes to views in the code of transformers, as operations that write to no view: a captured
graph may not change a tensor through a view of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    Tensor.add_: torch.add,
    Tensor.sub_: torch.sub,
    Tensor.mul_: torch.mul,
    Tensor.div_: torch.div,
}
"""What torch makes of `+=`, `-=`, `*=` and `/=`."""


class WithoutViewWrites(TorchFunctionMode):
    """Runs `x += y` as `x = x + y`, and `x[a:b] = y` as a write to all of x."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _IN_PLACE and not kwargs:
            target, other = args
            return _IN_PLACE[func](target, other).to(target.dtype)
        if func is Tensor.__setitem__ and _names_rows(args[1]):
            _set_rows(*args)
            return None
        return func(*args, **(kwargs or {}))


class ViewWriteTrial(TorchFunctionMode):
    """Finds out in a forward pass on the meta device whether its code writes to views, and whether
    WithoutViewWrites leaves its results as they are."""

    has_view_writes = False
    reads_old_tensors = False
    """Whether a tensor that `x += y` changes is read under another name than x."""

    def __init__(self) -> None:
        super().__init__()
        # Kept, so that no other tensor gets their memory.
        self._old: dict[int, Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether WithoutViewWrites is, and may be, used."""
        return self.has_view_writes and not self.reads_old_tensors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__setitem__ and _names_rows(args[1]):
            self.has_view_writes = True
            self._forget(args[0], args[1])
        for one in _pytree.tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata in self._old:
                self.reads_old_tensors = True
        if func in _IN_PLACE and not kwargs:
            target, other = args
            self.has_view_writes |= target._is_view()
            self._old[target.untyped_storage()._cdata] = target
            return _IN_PLACE[func](target, other).to(target.dtype)
        return func(*args, **(kwargs or {}))

    def _forget(self, target: Tensor, rows: slice) -> None:
        """`target[rows] += y` also assigns the result to these rows, so that `target` is right."""
        storage, view = target.untyped_storage()._cdata, target[rows]
        old = self._old.get(storage)
        if old is not None and (old.storage_offset(), old.shape) == (
            view.storage_offset(),
            view.shape,
        ):
            del self._old[storage]


def _names_rows(index: object) -> bool:
    return isinstance(index, slice) and index.step is None


def _set_rows(target: Tensor, rows: slice, value: Tensor) -> None:
    """target[rows] = value."""
    start, stop, _ = rows.indices(target.shape[0])
    indices = torch.arange(start, stop, device=target.device)
    target.index_copy_(0, indices, value.expand_as(target[start:stop]).to(target.dtype))
