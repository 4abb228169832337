"""GaudiGroup between two processes, each with an emulated card: the sum at the start, and a rank
without a partner."""

import os
from pathlib import Path

from child_processes import child_context

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import ExecutionConfig
from config.loading.env import hpu_mode
from hpu.backends.gaudi import GaudiBackend
from hpu.distributed.process_groups import Ranks
from hpu.emulator.install import install
from hpu.emulator.settings import EmulatorConfig

VARIABLES = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}


def backend_of(ranks: Ranks) -> GaudiBackend:
    config = EngineConfig("m", device="hpu-emulator")
    return GaudiBackend(ExecutionConfig(), hpu_mode(config), ranks=ranks)


def run_rank(store: Path, rank: int) -> None:
    """Exits with 7 if the sum over both ranks is right, on this rank's card and with collectives
    that graphs can contain."""
    import torch

    variables = {**VARIABLES, "HABANA_VISIBLE_MODULES": "5,6"}
    emulator = install(EmulatorConfig(), variables)
    backend = backend_of(Ranks(2, rank, f"file://{store}", timeout_s=60))
    mine = torch.full((3,), float(rank + 1), device=backend.device)
    total = backend.world.all_reduce(mine).cpu().tolist()
    is_own_card = emulator.device.acquisition.module == 5 + rank
    # hccl reads the variable at its import; a later value has no effect.
    del variables["PT_HPU_ENABLE_LAZY_COLLECTIVES"]
    is_lazy = emulator.device.variables.lazy_collectives()
    os._exit(7 if total == [3.0] * 3 and is_own_card and is_lazy else 1)


def run_alone(store: Path) -> None:
    """Exits with 8 if a rank without a partner reports the timeout."""
    install(EmulatorConfig(), dict(VARIABLES))
    try:
        backend_of(Ranks(2, 0, f"file://{store}", timeout_s=1))
    except ConfigError:
        os._exit(8)
    os._exit(1)


def test_two_ranks_sum_over_both_cards(tmp_path: Path) -> None:
    context = child_context()
    ranks = [context.Process(target=run_rank, args=(tmp_path / "store", rank)) for rank in (0, 1)]

    for child in ranks:
        child.start()
    for child in ranks:
        child.join(120)

    assert [child.exitcode for child in ranks] == [7, 7]


def test_a_rank_without_a_partner_times_out(tmp_path: Path) -> None:
    child = child_context().Process(target=run_alone, args=(tmp_path / "store",))

    child.start()
    child.join(120)

    assert child.exitcode == 8


def test_a_group_of_a_single_rank_needs_no_partner() -> None:
    import torch

    with install(EmulatorConfig(), {"PT_HPU_LAZY_MODE": "1"}):
        backend = backend_of(Ranks())
        mine = torch.ones(2, device=backend.device)

        same = backend.world.all_reduce(mine)

        assert same is mine
        backend.close()
