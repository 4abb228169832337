"""The doctor's report on simulated machines: which device would be used, and whether it can
serve."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from gaudi_machine import GaudiMachine

from config.engine import EngineConfig
from config.execution import ExecutionConfig
from config.loading.env import chosen_device, environment, hpu_mode, selftest_file
from engine.reports.doctor import Diagnosis, as_json, as_text, diagnose, this_machine
from engine.selftest.results import CheckResult, SelfTest, result_of, write
from engine.selftest.start import identity_of
from hpu.selftest.base import FAILS, HOLDS, all_checks

DiskUsage = namedtuple("DiskUsage", ["total", "used", "free"])


@pytest.fixture
def gaudi(tmp_path: Path) -> GaudiMachine:
    return GaudiMachine(tmp_path / "root")


@pytest.fixture
def plain(tmp_path: Path) -> GaudiMachine:
    """A machine without Gaudi cards, drivers or packages."""
    machine = GaudiMachine(tmp_path / "root", cards=0)
    machine.modules.clear()
    machine.driver = None
    machine.write("proc/modules", "")
    machine.versions["torch"] = "2.13.0+cpu"
    return machine


def examined(machine: GaudiMachine, **settings: Any) -> Diagnosis:
    return diagnose(machine.seen(), EngineConfig("m", **settings), str(machine.root / "cache"))


def test_a_plain_machine_serves_on_its_cpu(plain: GaudiMachine) -> None:
    found = examined(plain)

    text = as_text(found)

    assert found.can_serve
    assert "--device auto selects cpu: habana_frameworks is not installed" in text
    assert "none here: no runtime, no driver, no card" in text
    assert "torch-compile" not in text
    assert "slow" not in text
    assert text.endswith("can run here, on cpu. The model and the port were not checked.")
    assert as_json(found)["not_checked"] == ["model", "port"]


def test_a_plain_machine_cannot_serve_on_a_gaudi(plain: GaudiMachine) -> None:
    found = examined(plain, device="hpu")

    text = as_text(found)

    assert not found.can_serve
    assert "error this Python has no habana_frameworks\n        use `make install-hpu`" in text
    assert "the errors above prevent the use of a card: runtime, driver, cards" in text
    assert text.endswith("cannot run here; try --device cpu.")


def test_a_gaudi_machine_uses_a_card_with_graphs(gaudi: GaudiMachine) -> None:
    found = examined(gaudi)

    assert (found.device, found.can_serve) == ("hpu", True)
    assert found.mode is not None and found.mode.mode == "hpu-graphs"
    assert "8 cards: module 0, /dev/accel/accel0" in as_text(found)


def test_a_gaudi_with_a_stock_torch_compiles(gaudi: GaudiMachine) -> None:
    gaudi.versions["torch"] = "2.11.0"

    mode = examined(gaudi).mode

    assert mode is not None and mode.mode == "torch-compile"


def test_modes_that_contradict_each_other_cannot_serve(gaudi: GaudiMachine) -> None:
    gaudi.environment["PT_HPU_LAZY_MODE"] = "0"

    found = examined(gaudi, execution=ExecutionConfig(mode="hpu-graphs"))

    assert not found.can_serve
    assert "execution-mode is 'hpu-graphs' and PT_HPU_LAZY_MODE is '0'" in as_text(found)


def test_the_self_test_and_its_findings_are_reported(gaudi: GaudiMachine, tmp_path: Path) -> None:
    config = EngineConfig("m", device="hpu", cache_dir=str(tmp_path / "cache"))
    machine = gaudi.seen()
    checks = all_checks()

    def told(*results: CheckResult) -> str:
        if results:
            found = SelfTest(identity_of(config, machine), True, results)
            write(selftest_file(config), found)
        return as_text(diagnose(machine, config, str(tmp_path)))

    holds = result_of(checks["uploads"], HOLDS, "")
    fails = result_of(checks["fused-sdpa"], FAILS, "3, expected 4")

    assert "ok    no self-test of this card" in told()
    assert "ok    self-test, the quick part: 1 hold, 0 unknown" in told(holds)
    text = told(holds, fails)
    assert "warn  self-test, the quick part: 1 hold, 1 fails (fused-sdpa), 0 unknown" in text
    assert "unless you set them: --no-prompt-use-fusedsdpa" in text


def test_a_gpu_without_a_driver_cannot_serve(plain: GaudiMachine) -> None:
    without = examined(plain, device="cuda")
    plain.write("proc/driver/nvidia/version", "NVRM version: 1\n")

    assert not without.can_serve
    assert examined(plain, device="cuda").can_serve


def test_a_machine_without_torch_cannot_serve(plain: GaudiMachine) -> None:
    plain.versions["torch"] = None

    found = examined(plain)

    assert not found.can_serve
    assert as_text(found).endswith("cannot run here.")


@pytest.mark.parametrize(("model", "can_serve"), [("m", True), ("demo", False), ("a.gguf", False)])
def test_an_unwritable_cache_folder_is_an_error_for_models_that_need_it(
    plain: GaudiMachine, model: str, can_serve: bool
) -> None:
    plain.write("a-file", "")
    folder = str(plain.root / "a-file/cache")

    found = diagnose(plain.seen(), EngineConfig(model), folder)

    assert found.can_serve == can_serve
    assert f"--cache-dir is {folder}, which cannot be written to ({plain.root}/a-file: " in as_text(
        found
    )


def test_a_cache_folder_on_a_file_system_without_new_files_cannot_be_written(
    plain: GaudiMachine,
) -> None:
    found = diagnose(plain.seen(), EngineConfig("demo"), "/proc/x")

    assert not found.can_serve
    assert "error --cache-dir is /proc/x, which cannot be written to (/proc: " in as_text(found)


def test_little_space_for_the_cache_folder_is_a_warning(
    plain: GaudiMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(plain.root)
    monkeypatch.setattr("shutil.disk_usage", lambda _: DiskUsage(2**40, 2**40, 2**29))

    found = diagnose(plain.seen(), EngineConfig("demo"), folder)

    assert found.can_serve
    assert f"{folder}, 0.50 GiB left on its disk; models" in as_text(found)


def test_the_check_of_the_cache_folder_leaves_no_file(plain: GaudiMachine, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()

    found = diagnose(plain.seen(), EngineConfig("demo"), str(parent / "cache/below"))

    assert found.can_serve
    assert not list(parent.iterdir())


def test_a_load_above_the_cores_is_a_warning(plain: GaudiMachine) -> None:
    plain.write("proc/loadavg", "0.00 5.00 5.00 1/100 4711\n")
    idle = as_text(examined(plain))
    plain.write("proc/loadavg", "9999.25 5.00 5.00 1/100 4711\n")
    busy = examined(plain)

    assert "load average" not in idle
    assert busy.can_serve
    assert "cores may be used, and the load average is 9999.2: a server would" in as_text(busy)


def test_the_documented_packages_are_reported(gaudi: GaudiMachine) -> None:
    vendor = ("habana-torch-dataloader", "habana-media-loader", "pyhlml", "neural-compressor-pt")
    gaudi.versions.update(dict.fromkeys(vendor, "1.22.1.6"))

    text = as_text(examined(gaudi))

    assert [name for name in vendor if f"{name} 1.22.1.6" not in text] == []


def test_the_compressor_is_an_error_only_where_it_is_needed_and_missing(
    gaudi: GaudiMachine,
) -> None:
    needed = {"quantization": "inc", "quant_config": "quant.json"}
    missing = examined(gaudi, **needed)

    assert examined(gaudi).can_serve
    assert not missing.can_serve
    assert (
        "error --quantization is inc, and Intel Neural Compressor is not installed here\n"
        "        pip install neural-compressor-pt"
    ) in as_text(missing)
    gaudi.modules.add("neural_compressor")
    assert examined(gaudi, **needed).can_serve


def test_the_json_has_an_execution_mode_only_on_a_gaudi(gaudi: GaudiMachine) -> None:
    assert as_json(examined(gaudi, device="cpu"))["execution_mode"] is None
    assert as_json(examined(gaudi, device="hpu-emulator"))["execution_mode"]["mode"]


def test_the_json_agrees_with_the_text(gaudi: GaudiMachine) -> None:
    gaudi.hold(4711, "/dev/accel/accel0")

    told = json.loads(json.dumps(as_json(examined(gaudi))))

    assert told["device"] == {
        "asked": "auto",
        "taken": "hpu",
        "why": "habana_frameworks is installed",
    }
    assert told["execution_mode"]["mode"] == "hpu-graphs"
    assert told["packages"]["habana-torch-plugin"] == "1.22.1.6"
    assert [card["module"] for card in told["cards"]] == list(range(8))
    (held,) = [found for found in told["findings"] if found["about"] == "card held"]
    assert (held["section"], held["level"]) == ("gaudi", "warn")
    assert "process 4711" in held["what"]


def test_the_doctor_and_a_worker_choose_the_same_device_and_mode_on_this_machine(
    tmp_path: Path,
) -> None:
    config = EngineConfig("m")

    found = diagnose(this_machine(environment()), config, str(tmp_path))

    assert found.device == chosen_device("auto")
    assert found.mode == (hpu_mode(config) if found.device.startswith("hpu") else None)
