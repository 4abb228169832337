"""Replacements of torch's functions: as in the vendor's package (the bridge's
core/torch_overwrites.py), or with an error for calls that the emulator does not model."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.tensor import DEVICE, HpuTensor, is_hpu

Function = Callable[..., Any]

HOST = "cpu"


class Overwrites:
    """Replacements that depend on the emulated card `device`."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def _is_lazy(self) -> bool:
        variables = self._device.variables
        return variables.mode_is_read() and variables.lazy()

    def save(self, original: Function) -> Function:
        """torch.save, which in lazy mode saves copies of tensors on the host, in plain containers:
        saved tensors share no memory, and parameters become plain tensors."""

        def save(obj: object, *args: object, **kwargs: object) -> None:
            original(_for_pickle(obj) if self._is_lazy() else obj, *args, **kwargs)

        return save

    def load(self, original: Function) -> Function:
        """torch.load. If `map_location` is on the card, and always in lazy mode, it reads tensors
        to the host and then moves them to `map_location`, if given. In lazy mode `weights_only` is
        False by default."""

        def load(
            f: object,
            map_location: Any = None,
            pickle_module: ModuleType = pickle,
            *args: object,
            **kwargs: object,
        ) -> object:
            if not self._is_lazy():
                if not is_hpu(map_location):
                    return original(f, map_location, pickle_module, *args, **kwargs)
                found = original(f, HOST, pickle_module, *args, **kwargs)
                return _moved(found, {})
            weights_only = kwargs.setdefault("weights_only", False)
            pickled_by = None if weights_only is True else pickle_module
            found = original(f, HOST, pickled_by, *args, **kwargs)
            if isinstance(map_location, dict):
                map_location = map_location.get(HOST)
            return found if map_location in (None, HOST) else _placed(found, map_location)

        return load

    def fork_rng(self, original: Function) -> Function:
        """torch.random.fork_rng, which restores the card's generator by default. Without `devices`
        torch reads the generators of all cards of the machine; it raises RuntimeError on a machine
        with several cards, because only the first card has a generator."""

        def fork_rng(
            devices: object = None,
            enabled: bool = True,
            _caller: str = "fork_rng",
            _devices_kw: str = "devices",
            device_type: str = "",
        ) -> object:
            return original(devices, enabled, _caller, _devices_kw, device_type or DEVICE.type)

        return fork_rng

    def seed(self, original: Function) -> Function:
        """A function that seeds the host, and afterwards the card with the same seed."""

        def seed(*args: object) -> object:
            found = original(*args)
            self._device.generator.manual_seed(torch.initial_seed())
            return found

        return seed


def record_stream(original: Function) -> Function:
    """Tensor.record_stream: a no-op for tensors of the card, as in lazy mode, and by default in
    eager mode (IsRecordStreamEnabled in the bridge's common/lazy/utils.cpp and
    common/eager/utils.cpp)."""

    def record(tensor: Tensor, stream: object) -> None:
        if not isinstance(tensor, HpuTensor):
            original(tensor, stream)

    return record


def object_device(original: Function) -> Function:
    """Wrap the torch function that selects the device for object collectives: the card in an hccl
    group."""

    def find(group: Any = None) -> object:
        return DEVICE.type if dist.get_backend(group) == "hccl" else original(group)

    return find


def set_autocast_enabled(original: Function) -> Function:
    """torch.set_autocast_enabled, which torch.autocast calls. Raises NotImplementedError when
    autocast is enabled for the card: it would change dtypes of results."""

    def change(*args: object) -> None:
        if args[:1] == (DEVICE.type,) and args[1]:
            raise NotImplementedError("autocast of hpu is not modelled by the emulator")
        original(*args)

    return change


def without_card(original: type) -> type:
    """torch.Stream or torch.Event, which raise NotImplementedError for the card: torch would give
    an object without effect. The vendor's objects are torch.hpu.Stream and torch.hpu.Event."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

        def __getattr__(cls, name: str) -> object:
            return getattr(original, name)

        def __call__(cls, *args: Any, **kwargs: Any) -> object:
            if is_hpu(kwargs.get("device", args[0] if args else None)):
                name = original.__name__
                raise NotImplementedError(
                    f"torch.{name} of hpu is not modelled by the emulator: use torch.hpu.{name}"
                )
            return original(*args, **kwargs)

    return Kind(original.__name__, (), {})


def new_group(original: Function) -> Function:
    """torch.distributed.new_group as the bridge replaces it, without torch's newer arguments."""

    def make(
        ranks: object = None,
        timeout: timedelta = default_pg_timeout,
        backend: object = None,
        pg_options: object = None,
    ) -> object:
        return original(ranks, timeout, backend, pg_options)

    return make


def init_process_group(original: Function) -> Function:
    """torch.distributed.init_process_group as the bridge replaces it: `backend` is required, and
    newer arguments such as device_id are missing."""

    def initialize(
        backend: object,
        init_method: object = None,
        timeout: timedelta = default_pg_timeout,
        world_size: int = -1,
        rank: int = -1,
        store: object = None,
        group_name: str = "",
        pg_options: object = None,
    ) -> None:
        original(backend, init_method, timeout, world_size, rank, store, group_name, pg_options)

    return initialize


def _for_pickle(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone().cpu()
    if isinstance(value, dict):
        return {key: _for_pickle(item) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        items = [_for_pickle(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _placed(value: object, place: str | torch.device | Callable[..., object]) -> object:
    """`value` with every tensor in containers moved to `place`, a device or a map_location function
    of torch.load. Modules are not moved."""
    if isinstance(value, Tensor):
        return place(value, value.device) if callable(place) else value.to(place)
    if isinstance(value, dict):
        return {key: _placed(item, place) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_placed(item, place) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _moved(value: object, known: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """`value` with its tensors and modules moved to the card, as torch.load does in eager mode;
    dicts are changed in place. `known`: id of a tensor -> (tensor, its copy on the card), so that a
    tensor that occurs twice is copied once."""
    if isinstance(value, nn.Module):
        return value.to(DEVICE)
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = value, value.to(DEVICE)
        return known[id(value)][1]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, known)
        return value
    if isinstance(value, list):
        return [_moved(item, known) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [_moved(item, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
