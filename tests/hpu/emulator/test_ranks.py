"""Ranks and collectives of several emulated cards: the bridge's `hccl` module and its process
groups."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import child_context
from emulated import emulated

HCCL = "habana_frameworks.torch.distributed.hccl"
RANK = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


def _initialize(**given: int) -> Any:
    return importlib.import_module(HCCL).initialize_distributed_hpu(**given)


def test_arguments_are_used_only_if_all_three_are_given() -> None:
    with emulated() as card:
        environment = card.device.variables.environment

        assert _initialize(world_size=2, rank=1) == (1, -1, -1)
        assert "HLS_MODULE_ID" not in environment
        assert _initialize(world_size=2, rank=1, local_rank=1) == (2, 1, 1)
        assert (environment["WORLD_SIZE"], environment["HLS_MODULE_ID"]) == ("2", "1")


def test_mpi_gives_a_rank_with_all_three_variables() -> None:
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")

    with emulated(variables=dict(zip(names, "432", strict=True))):
        assert _initialize() == (4, 3, 2)
    with emulated(variables={names[0]: "4"}):
        assert _initialize() == (1, -1, -1)


def test_importing_hccl_sets_the_module_id_of_a_rank() -> None:
    with emulated(variables={**RANK, "HABANA_VISIBLE_MODULES": "6,7"}) as card:
        importlib.import_module(HCCL)

        assert card.device.variables.environment["HLS_MODULE_ID"] == "7"


def test_a_rank_without_a_visible_module_is_refused() -> None:
    with (
        emulated(variables={"HABANA_VISIBLE_MODULES": "6,7"}),
        pytest.raises(AssertionError, match="local rank 5 of 2 visible modules"),
    ):
        _initialize(world_size=8, rank=5, local_rank=5)


def test_set_device_selects_another_card_only_with_visible_modules() -> None:
    with emulated(num_devices=4):
        hpu: Any = torch.hpu  # type: ignore[attr-defined]
        hpu.set_device(0)

        with pytest.raises(AssertionError, match="the only supported device idx is 0, got 1"):
            hpu.set_device(1)
    with emulated(num_devices=4, variables={"HABANA_VISIBLE_MODULES": "4,5,6,7"}) as card:
        torch.hpu.set_device(1)  # type: ignore[attr-defined]

        assert card.device.variables.environment["HLS_MODULE_ID"] == "5"


def test_integers_are_summed_as_float32(tmp_path: Path) -> None:
    context = child_context()
    ranks = [context.Process(target=_sum, args=(tmp_path / "store", rank)) for rank in (0, 1)]
    for child in ranks:
        child.start()
    for child in ranks:
        child.join(60)

    assert [child.exitcode for child in ranks] == [15, 15]


def _sum(store: Path, rank: int) -> None:
    """Exits with 15 if a sum beyond 2**24 is rounded and a small sum is right."""
    with emulated():
        torch.distributed.init_process_group(
            "hccl", init_method=f"file://{store}", rank=rank, world_size=2
        )
        total = torch.tensor([1 << 24, 3], dtype=torch.int32).to("hpu")
        total[0] += rank
        torch.distributed.all_reduce(total)
        os._exit(15 if total.tolist() == [1 << 25, 6] else 1)
