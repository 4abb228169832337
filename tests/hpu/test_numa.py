"""Cores of a worker, from the kernel files of a simulated host."""

import os
from pathlib import Path

import pytest

from config.engine import EngineConfig
from hpu.numa import (
    CoreRange,
    bind_worker,
    cores_of_module,
    cores_of_rank,
    node_of_module,
    numa_nodes,
)
from hpu.protocol import Ranks


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Two nodes of four cores with their second threads, and a card on each node, in reverse
    order."""
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for index, module, node in ((0, 5, 1), (1, 2, 0), (2, 7, -1)):
        device = tmp_path / f"sys/class/accel/accel{index}/device"
        device.mkdir(parents=True)
        (device / "module_id").write_text(f"{module}\n")
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_a_card_gets_the_usable_cores_of_its_node(host: Path) -> None:
    near = cores_of_module(5, range(6), host)

    assert numa_nodes(host)[1] == {4, 5, 6, 7, 12, 13, 14, 15}
    assert [node_of_module(module, host) for module in (5, 2, 7, 3)] == [1, 0, None, None]
    assert near == CoreRange(frozenset({4, 5}), (1,))
    assert cores_of_module(5, range(4), host) is None
    assert cores_of_module(7, range(16), host) is None


def test_workers_on_a_cpu_share_the_usable_cores_node_by_node(host: Path) -> None:
    three = [cores_of_rank(rank, 3, range(16), host) for rank in range(3)]

    assert cores_of_rank(1, 2, range(16), host) == CoreRange(numa_nodes(host)[1], (1,))
    assert [None if host is None else host.nodes for host in three] == [(0,), (0, 1), (1,)]
    assert sum(len(host.cores) for host in three if host is not None) == 16


def test_a_host_with_a_single_node_or_few_cores_binds_no_worker(host: Path, tmp_path: Path) -> None:
    assert cores_of_rank(0, 2, range(4), host) is None
    assert cores_of_rank(0, 3, (3, 4), host) is None
    assert cores_of_rank(0, 2, range(16), tmp_path / "none") is None
    assert cores_of_rank(0, 1, range(16), host) is None


@pytest.mark.parametrize(
    ("config", "ranks", "visible", "bound", "threads"),
    [
        (EngineConfig("m", device="cpu"), Ranks(2, 1), "", {4, 5}, 2),
        (EngineConfig("m", device="cpu", num_threads=7), Ranks(2, 0), "", {0, 1}, 7),
        (EngineConfig("m", device="cpu"), Ranks(2, 1, local_rank=0), "", None, None),
        (EngineConfig("m", device="hpu"), Ranks(2, 1), "2,5", {4, 5}, None),
        (EngineConfig("m", device="hpu"), Ranks(8, 2), "", {0, 1}, None),
        (EngineConfig("m", device="hpu"), Ranks(1, 0), "2,5", None, None),
    ],
)
def test_a_worker_is_bound_to_its_node(
    config: EngineConfig,
    ranks: Ranks,
    visible: str,
    bound: set[int] | None,
    threads: int | None,
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    affinity = [{0, 1, 4, 5}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: affinity.append(set(cores)))
    monkeypatch.setattr("hpu.numa.usable_cores", lambda: len(affinity[-1]))
    monkeypatch.delenv("HLS_MODULE_ID", raising=False)
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)

    changed = bind_worker(config, ranks, host)

    assert affinity[1:] == ([] if bound is None else [bound])
    assert changed.num_threads == threads
