"""Module ids of the cards in a container, and their assignment to engines and workers."""

import os
from pathlib import Path

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading import env
from config.loading.cards import card_nodes, visible_modules
from config.loading.env import device_environment, module_id, worker_environment
from config.parallel import ParallelConfig
from server.cli.main import main

MODULES = {0: 2, 1: 6, 2: 3, 3: 7, 4: 0, 5: 4, 6: 1, 7: 5}
"""Module id by device node index, as measured on a machine."""


def machine(root: Path, indices: list[int]) -> Path:
    """A container with these device nodes; the driver's files of all cards are visible in it."""
    for index, module in MODULES.items():
        device = root / f"sys/class/accel/accel{index}/device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1da3\n")
        (device / "module_id").write_text(f"{module}\n")
    (root / "dev/accel").mkdir(parents=True)
    for index in indices:
        (root / f"dev/accel/accel{index}").touch()
    return root


def test_module_ids_follow_the_device_nodes_in_the_container(tmp_path: Path) -> None:
    root = machine(tmp_path, [0, 2])

    assert [card.module for card in card_nodes(root)] == [2, 3]
    assert visible_modules(root) == [2, 3]


def test_other_accelerators_and_drivers_without_module_ids_give_no_modules(tmp_path: Path) -> None:
    root = machine(tmp_path, [0, 1])
    (root / "sys/class/accel/accel1/device/vendor").write_text("0x1002\n")

    assert visible_modules(root) == [2]
    (root / "sys/class/accel/accel0/device/module_id").unlink()
    assert visible_modules(root) == []
    assert visible_modules(tmp_path / "none") == []


def test_workers_get_the_modules_of_a_partial_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = machine(tmp_path, [4, 6])
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)
    monkeypatch.delenv("HLS_MODULE_ID", raising=False)
    monkeypatch.setattr(env, "visible_modules", lambda: visible_modules(root))
    pair = ParallelConfig(tensor_parallel_size=2)
    config = EngineConfig("m", device="hpu", parallel=pair)

    assert worker_environment(config)["HABANA_VISIBLE_MODULES"] == "0,1"
    assert [module_id(rank, 2) for rank in range(2)] == [0, 1]
    with pytest.raises(ConfigError, match=r"this machine has 2 cards \(0,1\)"):
        module_id(2, 3)
    second = device_environment(EngineConfig("m", device="hpu"), 1, 2)
    assert second == {"HABANA_VISIBLE_MODULES": "1", "HLS_MODULE_ID": "1"}
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "6,7")
    assert worker_environment(config)["HABANA_VISIBLE_MODULES"] == "6,7"


def test_other_devices_get_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)
    monkeypatch.setattr(env, "visible_modules", lambda: list(range(8)))

    assert "HABANA_VISIBLE_MODULES" not in worker_environment(EngineConfig("m", device="cpu"))


def test_a_command_disables_autoload_unless_the_user_set_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PT_HPU_AUTOLOAD", "1")
    env.disable_autoload()
    assert os.environ["PT_HPU_AUTOLOAD"] == "1"
    monkeypatch.delenv("PT_HPU_AUTOLOAD")

    assert main(["--version"]) == 0

    assert os.environ["PT_HPU_AUTOLOAD"] == "0"
