"""The emulated `hccl` backend over gloo, which detects ranks that run different collectives."""

import functools
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hpu.emulator.card.device import POINT_TO_POINT, EmulatedDevice
from hpu.emulator.card.tensor import device_tensors, tensors_in

RANK_VARIABLES = {
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
}
"""Rank variables, and the MPI variables that override them if MPI sets all three and a rank
variable is missing."""


REDUCTIONS = (
    *("allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    "reduce_scatter_single",
)
"""ProcessGroup methods with a ReduceOp in their options. Later torch releases call the methods
whose names end with `_single`."""
KINDS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
"""ReduceOps of the vendor's library. Its C API rejects others, such as PRODUCT, which the bridge
passes on."""
REFUSED: dict[str, tuple[bool | None, str]] = {
    "scatter": (True, "scatter is currently not supported with HCCL"),
    "allgather_coalesced": (False, "ProcessGroupHcclBase does not support allgather_coalesced"),
    "recv_anysource": (None, "ProcessGroupHcclBase does not support recv"),
}
"""Methods of torch's ProcessGroup that the bridge rejects: whether it rejects the method with
(True) or without (False) lazy collectives, or always (None), and the text of its error
(process_group_lazy_hccl.cpp, process_group_hccl_base.cpp)."""
CARRIERS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base"),
    *("allgather_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base"),
    *("alltoall", "alltoall_base", "send", "recv"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""ProcessGroup methods that reject host tensors in an hccl group."""
MOVERS = (
    *("broadcast", "allgather", "_allgather_base", "all_gather_single", "gather", "send", "recv"),
)
"""ProcessGroup methods that move numbers without a conversion to float32."""


def with_known_kinds(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap a method in REDUCTIONS: raises RuntimeError for device tensors with a ReduceOp outside
    KINDS."""

    @functools.wraps(original)
    def reduce(*args: object, **kwargs: object) -> object:
        for given in (*args, *kwargs.values()):
            kind = getattr(given, "reduceOp", None)
            if kind and kind.op not in KINDS and device_tensors((args, kwargs)):
                raise RuntimeError("Unsupported ReduceOp for HCCL process group")
        return original(*args, **kwargs)

    return reduce


def without_short(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap a method in MOVERS: raises RuntimeError for int16 on the card, which the bridge cannot
    name to its library (hcclDataType in hccl_kernels.cpp)."""

    @functools.wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        if any(given.dtype == torch.int16 for given in device_tensors((args, kwargs))):
            raise RuntimeError(
                "Input tensor data type is not supported for HCCL process group: Short"
            )
        return original(*args, **kwargs)

    return run


def with_known_types(
    name: str, original: Callable[..., object], has_lazy_collectives: Callable[[], bool]
) -> Callable[..., object]:
    """Wrap a method in TYPED: raises RuntimeError for the device tensors that the bridge or its
    library rejects."""

    @functools.wraps(original)
    def run(group: dist.ProcessGroup, out: Tensor, given: Tensor, *args: object) -> object:
        if device_tensors((out, given)):
            TYPED[name](out, given, has_lazy_collectives(), *args)
        return original(group, out, given, *args)

    return run


def _check_gathered(out: Tensor, given: Tensor, has_lazy: bool, *_: object) -> None:
    """Raise RuntimeError for an odd number of bytes and a result of several dimensions: the bridge
    pads bytes to pairs, and cannot remove the padding from such a result (restoreTensorsize in
    process_group_lazy_hccl.cpp and process_group_hccl_base.cpp)."""
    if given.element_size() == 1 and given.numel() % 2 and out.dim() != 1:
        raise RuntimeError(f"only support 1D tensor, got {tuple(out.shape)} {out.dtype}")


def _check_scattered(out: Tensor, given: Tensor, has_lazy: bool, *_: object) -> None:
    """Raise RuntimeError for types that the library rejects (RETURN_ON_INVALID_DATA_TYPE of
    HabanaAI/HCL) and that the bridge does not cast first: it casts bytes to float32 only without
    lazy collectives (_reduce_scatter_base)."""
    is_refused = given.element_size() == 1 if has_lazy else given.dtype == torch.int64
    if is_refused:
        raise RuntimeError(f"Collective call returned error: unsupported data type {given.dtype}")


def _check_pieces(
    out: Tensor,
    given: Tensor,
    has_lazy: bool,
    received: Sequence[int] = (),
    sent: Sequence[int] = (),
    *_: object,
) -> None:
    """Raise RuntimeError for lazy collectives that receive pieces of other sizes than they send:
    the bridge receives pieces of the sizes `sent` (HcclAllToAllOutOperator in its
    hccl_kernels.cpp)."""
    if has_lazy and list(received) != list(sent):
        raise RuntimeError(
            f"a lazy all_to_all receives pieces of the sizes {list(sent)} that it sends, not "
            f"{list(received)}"
        )


TYPED: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _check_gathered),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _check_scattered),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _check_pieces),
}
"""Check of the arguments of a method of torch's ProcessGroup, by the method's name."""


def refused(
    name: str, original: Callable[..., object], has_lazy_collectives: Callable[[], bool]
) -> Callable[..., object]:
    """Wrap a method in REFUSED: raises RuntimeError for device tensors if the bridge rejects the
    method in the current mode of collectives."""
    with_lazy, text = REFUSED[name]

    @functools.wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        if device_tensors((args, kwargs)) and with_lazy in (None, has_lazy_collectives()):
            raise RuntimeError(text)
        return original(*args, **kwargs)

    return run


def without_host_tensors(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap a method in CARRIERS: raises RuntimeError for host tensors in an hccl group, because the
    bridge registers its back end for cards only (its hccl module)."""

    @functools.wraps(original)
    def run(group: dist.ProcessGroup, *args: object, **kwargs: object) -> object:
        given = tensors_in((args, kwargs))
        if len(device_tensors(given)) < len(given) and dist.get_backend(group) == "hccl":
            raise RuntimeError("No backend type associated with device type cpu")
        return original(group, *args, **kwargs)

    return run


class CollectiveCheck:
    """Compares the collectives of all ranks of a group before they run, separately for each group.

    The real card waits forever if a rank runs another bucket; here every rank raises an error that
    names both collectives. A rank that never arrives causes a gloo timeout.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RuntimeError (in strict mode, Misuse) on every rank of the group in the arguments
        of operator `name` if the ranks disagree on the operator, its tensors' shapes and dtypes, or
        its numbers (the root, for example). The kind of reduction is not compared: torch does not
        expose it. Sends and receives are not compared: they concern two ranks, and differ by
        design."""
        if name in POINT_TO_POINT:
            return
        group = _group_of(args, kwargs)
        shapes = [(tuple(given.shape), str(given.dtype)) for given in tensors_in((args, kwargs))]
        numbers = [value for value in args if type(value) is int]
        text = f"{name} of {shapes}, {numbers}".encode()
        checks = self._gather(group, torch.tensor([zlib.crc32(text), len(text)]))
        if len({tuple(check.tolist()) for check in checks}) == 1:
            return
        size = max(int(check[1]) for check in checks)
        own = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        texts = [bytes(found.tolist()).decode().rstrip() for found in self._gather(group, own)]
        ranks = dist.get_process_group_ranks(group)
        own_text = texts[group.rank()]
        differing = [
            (rank, found) for rank, found in zip(ranks, texts, strict=True) if found != own_text
        ]
        message = ", ".join(
            f"rank {rank} runs {found}" for rank, found in [(dist.get_rank(), own_text), *differing]
        )
        self._device.counters.misuse("ranks_disagree", message, name)
        raise RuntimeError(f"deadlock: {message}")

    def _gather(self, group: Any, own: Tensor) -> list[Tensor]:
        gathered = [torch.zeros_like(own) for _ in range(group.size())]
        backend = group._get_backend(torch.device("cpu"))
        backend.allgather([gathered], [own]).wait()
        return gathered


def _group_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.ScriptObject) and "ProcessGroup" in str(given._type()):
            return dist.ProcessGroup.unbox(given)
    raise RuntimeError("the collective has no process group")


def register(current: str) -> None:
    """Register `hccl` with torch.distributed, once per process. Registration cannot be undone, so
    the backend looks up the installed card in torch's module `current` when a group is created."""
    if "HCCL" in dist.Backend._plugins:
        return

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        device: EmulatedDevice = getattr(torch, current).emulated
        if size > 1 and device.acquisition.is_acquired and device.world_size == 1:
            raise RuntimeError("hccl must be initialised before the first use of the device")
        timeout = min(timeout, timedelta(seconds=device.config.collective_timeout_s))
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
        device.world_size = max(device.world_size, size)
        if size > 1:
            device.before_collective = CollectiveCheck(device).check
        return group

    dist.Backend.register_backend("hccl", make, devices=["cpu", "hpu"])


def _take_mpi_ranks(environment: MutableMapping[str, str]) -> None:
    """If a rank variable is missing, set the rank variables from MPI's variables (if MPI sets all
    of them), and default values for the address of rank 0."""
    if all(name in environment for name in RANK_VARIABLES):
        return
    if all(name in environment for name in RANK_VARIABLES.values()):
        for name, of_mpi in RANK_VARIABLES.items():
            environment[name] = environment[of_mpi]
    environment.setdefault("MASTER_ADDR", "localhost")
    environment.setdefault("MASTER_PORT", "12345")


def make_module(device: EmulatedDevice) -> ModuleType:
    """`habana_frameworks.torch.distributed.hccl`."""
    module = ModuleType("habana_frameworks.torch.distributed.hccl")

    environment = device.variables.environment

    def initialize_distributed_hpu(
        world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
    ) -> tuple[int, int, int]:
        """(world size, rank, local rank). With several ranks and a local rank, sets this process's
        module id if it is not set. The arguments apply only if all three are given; otherwise the
        environment variables apply."""
        if device.acquisition.is_acquired:
            raise RuntimeError("hccl must be initialised before the first use of the device")
        given = (world_size, rank, local_rank)
        if None not in given:
            environment.update(zip(RANK_VARIABLES, map(str, given), strict=True))
        else:
            _take_mpi_ranks(environment)
        size, own, local = (
            int(environment.get(name, missing))
            for name, missing in zip(RANK_VARIABLES, (1, -1, -1), strict=True)
        )
        if size > 1 and local >= 0 and "HLS_MODULE_ID" not in environment:
            modules = device.variables.modules()
            if local >= len(modules):
                raise AssertionError(
                    f"There is not enough devices available for training: local rank {local} of "
                    f"{len(modules)} visible modules. Please verify if HABANA_VISIBLE_MODULES is "
                    "set correctly."
                )
            environment["HLS_MODULE_ID"] = str(modules[local])
        if own != -1:
            environment["ID"] = str(own)
        return size, own, local

    vars(module).update(initialize_distributed_hpu=initialize_distributed_hpu)
    return module
