"""NUMA binding of a worker: to the cores near its card, or to its share of the host's cores. Reads
the kernel's files below `root`. Opens no device.

Memory needs no binding: Linux allocates it on the node of the core that first writes it.
"""

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from config.engine import EngineConfig
from config.loading.env import chosen_device, module_id
from hpu.host import ROOT, usable_cores
from hpu.protocol import Ranks

logger = logging.getLogger(__name__)

CARD_CLASSES = ("accel", "habanalabs")
"""Folders in sys/class, for newer and for older drivers."""


class CoreRange(NamedTuple):
    """Cores of a worker, on one or several NUMA nodes."""

    cores: frozenset[int]
    nodes: tuple[int, ...]


def bind_worker(config: EngineConfig, ranks: Ranks, root: Path = ROOT) -> EngineConfig:
    """On a host with several NUMA nodes, bind this process to the cores near its card, if they are
    known. A CPU worker is bound to its share of the cores, if there are several workers and all run
    on this host. Must be called before torch is imported. Returns `config`, with `num_threads` set
    to the number of usable cores for a bound CPU worker that has no `num_threads`."""
    if not hasattr(os, "sched_setaffinity"):
        return config
    device = chosen_device(config.device)
    usable = os.sched_getaffinity(0)
    module = module_id(ranks.device_index, ranks.world_size) if device == "hpu" else None
    found = None
    if module is not None:
        found = cores_of_module(module, usable, root)
    elif device == "cpu" and ranks.local_rank is None:
        found = cores_of_rank(ranks.rank, ranks.world_size, usable, root)
    if found is None:
        return config
    os.sched_setaffinity(0, found.cores)
    near = "" if module is None else f", near module {module}"
    nodes = ", ".join(map(str, found.nodes))
    logger.info("Bound to %d cores of NUMA node %s%s", len(found.cores), nodes, near)
    if device == "cpu" and config.num_threads is None:
        return dataclasses.replace(config, num_threads=usable_cores())
    return config


def numa_nodes(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """Cores of each NUMA node that has cores; empty if the kernel does not expose nodes."""
    found = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        cores = _core_list(path)
        if cores:
            found[int(path.parent.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def node_of_module(module: int, root: Path = ROOT) -> int | None:
    """NUMA node of the card with this module id; None if the kernel does not expose it."""
    for kind in CARD_CLASSES:
        for device in sorted((root / "sys/class" / kind).glob("*/device")):
            if _number(device / "module_id") == module:
                node = _number(device / "numa_node")
                return None if node is None or node < 0 else node
    return None


def cores_of_module(module: int, usable: Collection[int], root: Path = ROOT) -> CoreRange | None:
    """The `usable` cores on the NUMA node of a card; None if the node is unknown, has no usable
    cores, or is the only node."""
    nodes = numa_nodes(root)
    node = node_of_module(module, root)
    if len(nodes) < 2 or node is None:
        return None
    cores = nodes.get(node, frozenset()) & frozenset(usable)
    return CoreRange(cores, (node,)) if cores else None


def cores_of_rank(
    rank: int, num_ranks: int, usable: Collection[int], root: Path = ROOT
) -> CoreRange | None:
    """Cores of worker `rank` of `num_ranks` CPU workers on this host: ranges of the `usable` cores,
    node by node, whose sizes differ by at most 1. None if fewer than two nodes have usable cores,
    or if there is a single worker or fewer cores than workers."""
    nodes: Mapping[int, frozenset[int]] = {
        node: cores & frozenset(usable) for node, cores in numa_nodes(root).items()
    }
    ordered = [(node, core) for node, cores in nodes.items() for core in sorted(cores)]
    if sum(map(bool, nodes.values())) < 2 or num_ranks < 2 or len(ordered) < num_ranks:
        return None
    share = ordered[len(ordered) * rank // num_ranks : len(ordered) * (rank + 1) // num_ranks]
    return CoreRange(
        frozenset(core for _, core in share), tuple(sorted({node for node, _ in share}))
    )


def _core_list(path: Path) -> frozenset[int]:
    """Parse a core list such as `0-3,8-11`; empty if the file cannot be read."""
    cores: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            if first:
                cores.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cores)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip(), 0)
    except (OSError, ValueError):
        return None
