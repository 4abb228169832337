"""PT_COMPILE_ONLY_MODE: recipes are compiled and not launched, so no op changes memory. Copies from
the host are not recipes, and are executed."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from hpu.emulator.card.tensor import HpuTensor
from hpu.emulator.card.work_queue import fill_with_garbage


class CompileOnly:
    """Undoes the writes of ops inside the mode.

    Ops compute their values there, because later ops need shapes and valid indices. `end` undoes
    the writes to older tensors, and fills tensors that ops have created with garbage.
    """

    def __init__(self) -> None:
        self.is_on = False
        """Whether ops are compiled and not executed."""
        self._older: dict[int, tuple[Tensor, Tensor]] = {}
        """Storage -> (its bytes, a copy of them before the first write)."""
        self._created: set[int] = set()
        self._alive: weakref.WeakValueDictionary[int, HpuTensor] = weakref.WeakValueDictionary()
        """Tensors that ops have created, by id: a set would compare tensors, element by element,
        when hashes collide."""

    def before_write(self, targets: Iterable[HpuTensor]) -> None:
        """Save the contents of older tensors before an op changes them."""
        for target in targets:
            number = _storage(target)
            if number not in self._created and number not in self._older:
                raw = _bytes_of(target)
                self._older[number] = raw, raw.clone()

    def created(self, outs: Iterable[HpuTensor], given: Iterable[HpuTensor]) -> None:
        """Record the results `outs` of an op that share no memory with older tensors among its
        arguments `given`."""
        shared = {_storage(argument) for argument in given} - self._created
        for out in outs:
            if _storage(out) not in shared:
                self._created.add(_storage(out))
                self._alive[id(out)] = out

    def uploaded(self, target: HpuTensor) -> None:
        """Record a copy from the host, whose bytes `end` keeps."""
        self._older.pop(_storage(target), None)
        self._created.discard(_storage(target))

    def end(self) -> None:
        """End the mode: restore older tensors, except the targets of copies from the host, and fill
        tensors that ops have created with garbage."""
        for raw, before in self._older.values():
            raw.copy_(before)
        for created in self._alive.values():
            if _storage(created) in self._created:
                fill_with_garbage(created.host)
        self.is_on = False
        self._older.clear()
        self._created.clear()
        self._alive.clear()


def _storage(tensor: HpuTensor) -> int:
    return tensor.host.untyped_storage().data_ptr()


def _bytes_of(tensor: HpuTensor) -> Tensor:
    """All bytes of the tensor's storage, as a tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.host.untyped_storage())
