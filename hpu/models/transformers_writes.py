"""Replaces in-place writes to views in transformers' code: a captured graph may not change a
tensor through a view."""

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
"""torch functions behind `+=`, `-=`, `*=` and `/=`."""


class WithoutViewWrites(TorchFunctionMode):
    """Runs `x += y` as `x = x + y`, and `x[a:b] = y` as an index_copy_ into x itself."""

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
    """Detects in a forward pass on the meta device whether code writes to views, and whether
    WithoutViewWrites keeps its results unchanged."""

    has_view_writes = False
    reads_old_tensors = False
    """Whether a tensor changed by `x += y` is later read under a name other than x."""

    def __init__(self) -> None:
        super().__init__()
        # Keep the tensors, so that no other tensor gets the same memory.
        self._old: dict[int, Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether WithoutViewWrites is needed and safe."""
        return self.has_view_writes and not self.reads_old_tensors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__setitem__ and _names_rows(args[1]):
            self.has_view_writes = True
            self._forget(args[0], args[1])
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._old:
                self.reads_old_tensors = True
        if func in _IN_PLACE and not kwargs:
            target, other = args
            self.has_view_writes |= target._is_view()
            self._old[target.untyped_storage()._cdata] = target
            return _IN_PLACE[func](target, other).to(target.dtype)
        return func(*args, **(kwargs or {}))

    def _forget(self, target: Tensor, rows: slice) -> None:
        """Forget the old tensor of `target[rows] += y`: the statement also assigns the result to
        these rows, so `target` is correct."""
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
    start, stop, _ = rows.indices(target.shape[0])
    indices = torch.arange(start, stop, device=target.device)
    target.index_copy_(0, indices, value.expand_as(target[start:stop]).to(target.dtype))
