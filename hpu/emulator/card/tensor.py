"""HpuTensor: a tensor whose device is `hpu` and whose bytes are a CPU tensor's.

How the device string is carried, and why so: torch knows the device type `hpu` by itself, so
`torch.device("hpu")` needs no renaming of the private-use back end (which cannot be undone and
would need C++ kernels). An HpuTensor is a wrapper subclass with that device; every op on one
arrives in `__torch_dispatch__` of this file, and factories given the device arrive in a fallback
registered for the HPU dispatch key by `install`. Reads by the host are thus real, visible ops, on
every thread, and CPU tensors cost nothing extra. Only what resolves a device without an index in
C++ (`Tensor.to`, `torch.tensor`, `torch.as_tensor`) is patched, by `install`.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from hpu.emulator.card import indexing
from hpu.emulator.card.memory import Block

DEVICE = torch.device("hpu", 0)


class Lease(Protocol):
    """The time during which a tensor of a graph may be read; `kind` and `text` name the misuse
    of reading it later."""

    kind: str
    text: str

    def is_over(self) -> bool: ...

    def renew(self) -> None:
        """The tensor was overwritten as a whole: it may be read again."""
        ...


class Owner(Protocol):
    """The device that runs the ops of its tensors."""

    uids: "count[int]"

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class HpuTensor(Tensor):
    """`host` holds the bytes, `block` their place in the books; `uid` is never reused; `is_view`
    says that another tensor's memory was given to it."""

    host: Tensor
    owner: Owner
    block: Block
    lease: Lease | None
    uid: int
    is_view: bool

    # Torch's own type of this attribute is a method; the disabled form is how it is switched off.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, inner: Tensor, owner: Owner, block: Block, lease: Lease | None = None
    ) -> "HpuTensor":
        made: HpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.host = inner
        made.owner = owner
        made.block = block
        made.lease = lease
        made.uid = next(owner.uids)
        made.is_view = False
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the op first
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next(device_tensors((args, kwargs)))
        return first.owner.run(func, args, kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    # The methods of torch below want a device guard, which comes with a driver; the ops do not.

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

    def __getitem__(self, key: Any) -> Tensor:
        return indexing.read(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        indexing.write(self, key, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped there
        return repr(self.cpu()).replace("tensor(", "tensor(device='hpu:0', ", 1)

    def data_ptr(self) -> int:
        return self.host.data_ptr()


def device_tensors(value: Any) -> Iterator[HpuTensor]:
    """HpuTensors in nested lists, tuples and dicts, in order."""
    return (found for found in tensors_in(value) if isinstance(found, HpuTensor))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors of any kind in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storage_of(tensor: Tensor) -> int:
    """Identity of a CPU tensor's storage; equal for its views."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `change` applied to whatever is no list, tuple or dict."""
    if isinstance(value, dict):
        return {key: map_leaves(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(change, item) for item in value))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(map_leaves(change, item) for item in value)
    return change(value)


def is_hpu(device: Any) -> bool:
    """Whether a device, string, or None names the card."""
    if isinstance(device, torch.device):
        return device.type == "hpu"
    return isinstance(device, str) and device.partition(":")[0] == "hpu"


def with_index(value: Any) -> Any:
    """The device `hpu` with its index, anything else as it is."""
    return DEVICE if is_hpu(value) else value
