"""Process groups for tensor, pipeline, expert and data parallelism over torch.distributed.

A group with a single rank needs no torch.distributed: its collectives return their input
(`all_gather_into` and transfers need several ranks).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from socket import create_server
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from config.checkpoint.weight_maps.shard import ShardRank
from hpu.protocol import SINGLE_RANK as SINGLE_RANK
from hpu.protocol import Ranks as Ranks

TCP = "tcp://"


class ProcessGroup:
    """A group of ranks. All ranks must call the same collectives in the same order with the same
    shapes; a rank that differs may hang the group."""

    __slots__ = ("_group", "_mark_step", "_ranks", "_run", "rank", "size")

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        group: Any = None,
        mark_step: Callable[[], None] | None = None,
    ) -> None:
        """`ranks`: global rank of each member; `rank`: this process's index in `ranks`; `group`:
        the torch.distributed group, None for the world; `mark_step`: called before each collective,
        and before and after each point-to-point transfer, on a device that compiles and collects
        operations into recipes. On such a device a collective is never part of a compiled function:
        the vendor's software keeps torch.distributed out of dynamo's graphs (hccl of
        HabanaAI/gaudi-pytorch-bridge)."""
        self._ranks = tuple(ranks)
        self._group = group
        self._mark_step = mark_step or _mark_nothing
        self._run = self._run_now
        if mark_step is not None and len(self._ranks) > 1:
            self._run = torch.compiler.disable(self._run_now)  # type: ignore[no-untyped-call]  # theirs
        self.rank = rank
        self.size = len(self._ranks)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks; in place if `tensor` is contiguous. Returns the sum."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        self._run(dist.all_reduce, tensor)
        return tensor

    def minimum(self, tensor: Tensor) -> Tensor:
        """Element-wise minimum over all ranks, in place. Returns `tensor`."""
        if self.size > 1:
            self._run(dist.all_reduce, tensor, dist.ReduceOp.MIN)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all ranks, concatenated along `dim` in rank order."""
        if self.size == 1:
            return tensor
        # Concatenated output: under torch.compile, all_gather_into_tensor does not support stacked
        # output (pytorch/pytorch, issue 138795).
        shape = tensor.shape
        gathered = tensor.new_empty((self.size * shape[0], *shape[1:]))
        self.all_gather_into(gathered, tensor)
        dim %= tensor.dim()
        return gathered.view(self.size, *shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_gather_into(self, target: Tensor, tensor: Tensor) -> None:
        """Overwrite `target` with the tensors of all ranks, concatenated along the first
        dimension."""
        self._run(dist.all_gather_into_tensor, target, tensor.contiguous())

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's slice, along the first dimension, of the sum over all ranks. `size` must
        divide the first dimension."""
        if self.size == 1:
            return tensor
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        tensor = tensor.contiguous()
        self._run(dist.reduce_scatter_tensor, part, tensor)
        return part

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` on all ranks with the tensor of rank `source` of the group."""
        if self.size > 1:
            self._run(dist.broadcast, tensor, src=self._ranks[source])
        return tensor

    def send(self, tensor: Tensor, target: int) -> None:
        """Send `tensor` to rank `target` of the group, which must be another rank."""
        self._transfer(dist.send, tensor, dst=self._ranks[target])

    def isend(self, tensor: Tensor, target: int) -> Any:
        """Send without waiting. `tensor` must not change before `wait` of the returned work
        returns."""
        return self._transfer(dist.isend, tensor, dst=self._ranks[target])

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` with the tensor that rank `source` of the group sends."""
        self._transfer(dist.recv, tensor, src=self._ranks[source])
        return tensor

    def _transfer(self, collective: Callable[..., Any], tensor: Tensor, **options: Any) -> Any:
        """Send or receive between two ranks, with a recipe boundary after it. A pipeline stage
        transfers tokens only before or after the last launch of a step; the boundary keeps the
        recipe of the following operations equal with and without the transfer."""
        work = self._run(collective, tensor, **options)
        self._mark_step()
        return work

    def _run_now(self, collective: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
        self._mark_step()
        return collective(*tensors, group=self._group, **options)


def _mark_nothing() -> None:
    """`mark_step` of a group whose operations are in no recipe."""


SINGLE = ProcessGroup()
"""Group with a single rank."""


class ExpertGroup(ProcessGroup):
    """The ranks over which experts are distributed. With data parallelism the engines have
    different tokens: the experts compute the tokens of all engines, and each engine gets the sums
    of its own tokens."""

    __slots__ = ("_data", "_gather", "_targets", "_tensor")

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: Any,
        mark_step: Callable[[], None] | None,
        *,
        tensor: ProcessGroup,
        data: ProcessGroup,
    ) -> None:
        """`tensor`: the ranks with the same tokens; `data`: one rank per engine, each with its
        engine's tokens. Other parameters: see ProcessGroup."""
        super().__init__(ranks, rank, group, mark_step)
        self._tensor = tensor
        self._data = data
        # Targets for captured graphs are allocated once per shape, before the capture, by the first
        # run. The vendor's engine does the same (vllm-project/vllm-gaudi, hpu_dp_utils.py).
        self._targets: dict[tuple[torch.Size, torch.dtype], Tensor] | None = None
        self._gather = self._gather_now
        if mark_step is not None:
            self._targets = {}
            self._gather = torch.compiler.disable(self._gather_now)  # type: ignore[no-untyped-call]  # theirs

    def gather_tokens(self, tensor: Tensor) -> Tensor:
        """Gather (T, ...) of this engine's tokens to (engines * T, ...), in engine order. T must be
        equal on all engines. The next call with this shape may overwrite the result."""
        return tensor if self._data.size == 1 else self._gather(tensor)

    def reduce_tokens(self, sums: Tensor) -> Tensor:
        """Reduce partial sums (engines * T, ...) over all ranks and return the sums (T, ...) for
        this engine's tokens."""
        return self._tensor.all_reduce(self._data.reduce_scatter(sums))

    def _gather_now(self, tensor: Tensor) -> Tensor:
        key = tensor.shape, tensor.dtype
        target = None if self._targets is None else self._targets.get(key)
        if target is None:
            target = tensor.new_empty((self._data.size * tensor.shape[0], *tensor.shape[1:]))
            if self._targets is not None:
                self._targets[key] = target
        self._data.all_gather_into(target, tensor)
        return target


def shard_rank(group: ProcessGroup, expert_group: ProcessGroup = SINGLE) -> ShardRank:
    """This rank's position in its tensor-parallel group and in its expert group."""
    return ShardRank(group.rank, group.size, expert_group.rank, expert_group.size)


class ProcessGroups(NamedTuple):
    """The groups that this rank belongs to."""

    tensor: ProcessGroup = SINGLE
    """Ranks of a replica that hold shards of the same layers."""
    pipeline: ProcessGroup = SINGLE
    """One rank of each pipeline stage."""
    expert: ProcessGroup = SINGLE
    """All ranks of a pipeline stage in all replicas, for expert parallelism; an ExpertGroup if
    there are several ranks."""
    data: ProcessGroup = SINGLE
    """The ranks with the same stage and shard, one of each replica."""
    host: ProcessGroup = SINGLE
    """All ranks, for host tensors."""
    stage_host: ProcessGroup = SINGLE
    """The ranks of `tensor`, for host tensors."""


def group_members(tensor: int, pipeline: int, data: int) -> dict[str, list[list[int]]]:
    """Global ranks of each group, by kind. Tensor ranks are adjacent, then pipeline stages, then
    replicas: rank = (replica * pipeline + stage) * tensor + shard."""

    def rank(replica: int, stage: int, shard: int) -> int:
        return (replica * pipeline + stage) * tensor + shard

    replicas, stages, shards = range(data), range(pipeline), range(tensor)
    return {
        "tensor": [[rank(r, p, t) for t in shards] for r in replicas for p in stages],
        "pipeline": [[rank(r, p, t) for p in stages] for r in replicas for t in shards],
        "expert": [[rank(r, p, t) for r in replicas for t in shards] for p in stages],
        "data": [[rank(r, p, t) for r in replicas] for p in stages for t in shards],
    }


def join(backend: str, ranks: Ranks, mark_step: Callable[[], None] | None = None) -> ProcessGroup:
    """Initialize torch.distributed with `backend`, unless there is a single rank. Returns the group
    of all ranks, with `mark_step` as in ProcessGroup. Raises RuntimeError on timeout, and on rank 0
    if it cannot listen on the address."""
    if ranks.global_size == 1:
        return SINGLE
    store = _tcp_store(ranks) if ranks.init_method.startswith(TCP) else None
    dist.init_process_group(
        backend,
        init_method=ranks.init_method if store is None else None,
        store=store,
        rank=ranks.global_rank,
        world_size=ranks.global_size,
        timeout=timedelta(seconds=ranks.timeout_s),
    )
    return ProcessGroup(range(ranks.global_size), ranks.global_rank, mark_step=mark_step)


def _tcp_store(ranks: Ranks) -> Any:
    """The rendezvous store; rank 0 serves it on the given address only, because torch by default
    listens on all interfaces. Raises RuntimeError if rank 0 cannot listen on the address."""
    host, _, port = ranks.init_method.removeprefix(TCP).rpartition(":")
    listener = None
    if ranks.global_rank == 0:
        try:
            listener = create_server((host, int(port)), backlog=ranks.global_size)
        except OSError as error:
            raise RuntimeError(f"cannot listen on {ranks.init_method}: {error}") from error
    return dist.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        host,
        int(port),
        ranks.global_size,
        is_master=listener is not None,
        timeout=timedelta(seconds=ranks.timeout_s),
        # The store closes the file descriptor.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def make_groups(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    mark_step: Callable[[], None] | None = None,
) -> ProcessGroups:
    """Create the groups of this process; call after `join`. `tensor * pipeline * data` must equal
    the world size."""
    if tensor * pipeline * data == 1:
        return ProcessGroups()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    everyone = range(world_size)
    if tensor * pipeline * data != world_size:
        raise ValueError(
            f"tensor {tensor} x pipeline {pipeline} x data {data} is {tensor * pipeline * data} "
            f"ranks, there are {world_size}"
        )
    found: dict[str, ProcessGroup] = {}
    kinds = group_members(tensor, pipeline, data)
    for kind in ("tensor", "pipeline", "data", "expert"):
        for members in kinds[kind]:
            # torch.distributed requires that every rank creates every group, in the same order.
            group = dist.new_group(members) if len(members) > 1 else None
            if rank not in members or group is None:
                continue
            own = members, members.index(rank), group, mark_step
            if kind == "expert":
                shards, replicas = found.get("tensor", SINGLE), found.get("data", SINGLE)
                found[kind] = ExpertGroup(*own, tensor=shards, data=replicas)
            else:
                found[kind] = ProcessGroup(*own)
    # hccl and nccl do not transfer host tensors.
    found["host"] = ProcessGroup(everyone, rank, dist.new_group(list(everyone), backend="gloo"))
    for members in kinds["tensor"]:
        group = dist.new_group(members, backend="gloo") if len(members) > 1 else None
        if rank in members and group is not None:
            found["stage_host"] = ProcessGroup(members, members.index(rank), group)
    return ProcessGroups(**found)


@contextmanager
def alone() -> Iterator[None]:
    """Context with a single-process group, for code that needs torch.distributed to be initialized;
    does nothing if a group exists."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave() -> None:
    """Destroy all process groups."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
