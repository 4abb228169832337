"""HpuTensor: a tensor whose device is `hpu` and whose bytes are a CPU tensor's.

torch has a built-in device type `hpu`, so `torch.device("hpu")` needs no renaming of the
private-use back end (which cannot be undone and would need C++ kernels). An HpuTensor is a wrapper
subclass with that device; every op on an HpuTensor arrives in `__torch_dispatch__` of this file,
and factories given the device arrive in a fallback registered for the HPU dispatch key by
`install`. So reads by the host are visible ops on every thread, and CPU tensors cost nothing extra.
`install` patches the functions that resolve a device without an index in C++ (`Tensor.to`,
`torch.tensor`, `torch.as_tensor`).
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from hpu.emulator.card.memory import Allocation

DEVICE = torch.device("hpu", 0)


class Lifetime(Protocol):
    """Validity of a graph's tensor. `kind` and `text` describe the misuse that a later read
    reports."""

    kind: str
    text: str

    def has_ended(self) -> bool: ...

    def renew(self) -> None:
        """Called when the whole tensor was overwritten and may be read again."""
        ...


class Owner(Protocol):
    """The device that runs the ops of its tensors."""

    uids: "count[int]"

    def is_lazy(self) -> bool: ...

    def runs_eagerly(self) -> bool: ...

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any: ...


class HpuTensor(Tensor):
    """`host` holds the bytes, `allocation` their device memory; `uid` is never reused."""

    host: Tensor
    owner: Owner
    allocation: Allocation
    lifetime: Lifetime | None
    uid: int
    is_view: bool
    kinds: tuple[str, ...]
    """How the view was made: its operators in order; empty for a whole tensor."""

    # Torch declares a method here; assigning the disabled form switches it off.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, inner: Tensor, owner: Owner, allocation: Allocation, lifetime: Lifetime | None = None
    ) -> "HpuTensor":
        tensor: HpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        tensor.host = inner
        tensor.owner = owner
        tensor.allocation = allocation
        tensor.lifetime = lifetime
        tensor.uid = next(owner.uids)
        tensor.is_view = False
        tensor.kinds = ()
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the op first
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        first = next(tensor for tensor in given if isinstance(tensor, HpuTensor))
        return first.owner.run(func, args, kwargs, given)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        # Torch's own copy, and its pickling, read a storage that a wrapper does not have.
        copied: Tensor = self.clone()
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return to_card, (self.cpu(),)

    @property
    def data(self) -> Tensor:
        return torch.ops.aten.detach.default(self)  # type: ignore[no-any-return]  # an op's result

    @data.setter
    def data(self, value: Tensor) -> None:
        """Raises RuntimeError: the bridge swaps the storage (HbLazyTensor::ShallowCopyTo), and the
        effect on captured graphs is not documented."""
        raise RuntimeError("the emulator does not follow an assignment to the data of a tensor")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __invert__(self) -> Tensor:
        return torch.bitwise_not(self)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        out: Tensor = torch.ops.aten.copy_.default(self, src, non_blocking)
        return out

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Tensor:
        if self.is_contiguous(memory_format=memory_format):
            return self
        out: Tensor = torch.ops.aten.clone.default(self, memory_format=memory_format)
        return out

    def __getitem__(self, key: Any) -> Tensor:
        return get_item(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if torch._C._is_torch_function_mode_enabled():
            # torch does this for its own tensors: a function mode may replace the operation.
            handle: Any = torch.overrides.handle_torch_function
            handle(Tensor.__setitem__, (self,), self, key, value)
            return
        set_item(self, key, value)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # untyped there
        return repr(self.cpu()).replace("tensor(", "tensor(device='hpu:0', ", 1)

    def data_ptr(self) -> int:
        return self.host.data_ptr()


def to_card(host: Tensor) -> Tensor:
    """A copy of a CPU tensor on the card."""
    return host.to(DEVICE)


def device_tensors(value: Any) -> list[HpuTensor]:
    """HpuTensors in nested lists, tuples and dicts, in order."""
    return [found for found in tensors_in(value) if isinstance(found, HpuTensor)]


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors of any kind in nested lists, tuples and dicts, in order."""
    found: list[Tensor] = []
    _collect_tensors((value,), found)
    return found


CONSTANTS = frozenset((int, float, bool, type(None), torch.dtype))
"""Types of arguments that hold no tensor and name no device. They are most of an op's arguments;
inspecting them took a third of the emulator's time."""


def _collect_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if type(value) in CONSTANTS:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect_tensors(value, found)
        elif isinstance(value, dict):
            _collect_tensors(value.values(), found)


def storage_of(tensor: Tensor) -> int:
    """Identity of a CPU tensor's storage; equal for its views."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def map_leaves(change: Callable[[Any], Any], value: object) -> Any:
    """`value` with `change` applied to everything in nested lists, tuples and dicts except
    CONSTANTS."""
    if type(value) in CONSTANTS:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [map_leaves(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def is_hpu(device: object) -> bool:
    """Whether a device or a string is of type `hpu`; False for other values."""
    if isinstance(device, torch.device):
        return device.type == "hpu"
    return isinstance(device, str) and device.partition(":")[0] == "hpu"


def with_index(value: Any) -> Any:
    """The device `hpu` with its index; other values unchanged. Raises RuntimeError for another
    index: a process has a single card (the bridge's HPUGuardImpl.h)."""
    if not is_hpu(value):
        return value
    index = torch.device(value).index
    if index:
        raise RuntimeError(f"habana active device: {index} != 0")
    return DEVICE


# Indexing as views and index ops: torch's own indexing fails if the index is a list.


def get_item(tensor: Tensor, key: Any) -> Tensor:
    """`tensor[key]`; the host reads a 0-dimensional index tensor, as torch does. In eager mode, an
    index tensor on the host stays there."""
    is_eager = isinstance(tensor, HpuTensor) and tensor.owner.runs_eagerly()
    view, indices = _view(tensor, key, uploads=not is_eager)
    if not indices:
        return view if view is not tensor else torch.ops.aten.alias(tensor)
    out: Tensor = torch.ops.aten.index.Tensor(view, indices)
    return out


def set_item(tensor: Tensor, key: Any, value: Any) -> None:
    """`tensor[key] = value`."""
    view, indices = _view(tensor, key)
    if indices:
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        elif isinstance(tensor, HpuTensor) and not tensor.owner.is_lazy():
            # In lazy mode the card refuses a value on the host.
            value = value.to(tensor.device)
        torch.ops.aten.index_put_.default(view, indices, value)
    elif isinstance(value, Tensor):
        _copy_into(view, value)
    else:
        view.fill_(value)


def _copy_into(view: Tensor, value: Tensor) -> None:
    """Copy as torch's index assignment does: a 0-dimensional host tensor fills the view, other
    values are expanded first."""
    if value.shape == view.shape:
        view.copy_(value)
    elif not value.dim() and value.device.type == "cpu":
        view.fill_(value)
    else:
        while value.dim() > view.dim() and value.shape[0] == 1:
            value = value.squeeze(0)
        view.copy_(value.expand(view.shape))


def _view(tensor: Tensor, key: Any, *, uploads: bool = True) -> tuple[Tensor, list[Tensor | None]]:
    """Split `key` into basic and advanced indexing: the view by integers, slices and None, and the
    list of index tensors, with None for a dimension without one. Index tensors are moved to the
    card if `uploads`; a list always becomes a tensor on the card."""
    parts = list(key) if isinstance(key, tuple) else [key]
    width = sum(_width(part) for part in parts)
    if width > tensor.dim():
        raise IndexError(f"too many indices: {width} for a tensor of {tensor.dim()} dimensions")
    dim = 0
    # A mask covers several dimensions, and has one place in the list.
    place = 0
    indices: dict[int, Tensor] = {}
    for number, part in enumerate(parts):
        if part is Ellipsis:
            skipped = tensor.dim() - sum(map(_width, parts[number + 1 :])) - dim
            dim, place = dim + skipped, place + skipped
        elif part is None:
            tensor, dim, place = tensor.unsqueeze(dim), dim + 1, place + 1
        elif isinstance(part, slice):
            if part != slice(None):
                bounds = part.start, part.stop, part.step or 1
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, *bounds)
            dim, place = dim + 1, place + 1
        elif isinstance(part, (Tensor, list)) and not _is_number(part):
            index = part if isinstance(part, Tensor) else torch.tensor(part)
            if uploads or not isinstance(part, Tensor):
                index = index.to(tensor.device)
            indices[place] = index
            dim += index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
            place += 1
        else:
            tensor = tensor.select(dim, int(part))
    if not indices:
        return tensor, []
    return tensor, [indices.get(at) for at in range(max(indices) + 1)]


def _width(part: object) -> int:
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def _is_number(part: object) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0
