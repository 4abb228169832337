"""Preflight checks on simulated machines: each problem has a plain message."""

import os
import re
from pathlib import Path

import pytest
from gaudi_machine import GaudiMachine

from config.errors import ConfigError
from hpu.doctor.cards import find_cards
from hpu.doctor.errors import explain
from hpu.doctor.machine import ERROR, OK, WARN, Machine, has_module, run_command
from hpu.doctor.preflight import check_start, has_sign_of_gaudi, preflight


@pytest.fixture
def gaudi(tmp_path: Path) -> GaudiMachine:
    return GaudiMachine(tmp_path)


def levels(machine: Machine, *, num_cards: int = 1) -> dict[str, str]:
    """Worst level of each problem, by subject."""
    rank = {OK: 0, WARN: 1, ERROR: 2}
    found: dict[str, str] = {}
    for finding in preflight(machine, num_cards=num_cards).findings:
        found[finding.about] = max(
            found.get(finding.about, OK), finding.level, key=rank.__getitem__
        )
    return {about: level for about, level in found.items() if level != OK}


def test_a_complete_machine_has_only_ok_findings(gaudi: GaudiMachine) -> None:
    found = preflight(gaudi.seen(), num_cards=8)

    assert {finding.level for finding in found.findings} == {OK}
    assert [card.module for card in found.cards] == list(range(8))
    assert {card.generation for card in found.cards} == {"gaudi3"}
    check_start(gaudi.seen())


def test_a_machine_without_gaudi_has_errors_for_runtime_driver_and_cards(tmp_path: Path) -> None:
    bare = GaudiMachine(tmp_path, cards=0)
    bare.modules.clear()
    bare.driver = None
    bare.write("proc/modules", "ext4 1 0 - Live 0x0\n")

    assert not has_sign_of_gaudi(bare.seen())
    with pytest.raises(ConfigError, match="no habana_frameworks: use `make install-hpu`"):
        check_start(bare.seen())
    assert levels(bare.seen()) == {
        "runtime": ERROR,
        "driver": ERROR,
        "cards": ERROR,
    }


def test_a_stock_torch_is_recognized_by_its_version(gaudi: GaudiMachine) -> None:
    gaudi.versions["torch"] = "2.7.1+cpu"

    findings = preflight(gaudi.seen()).findings

    assert "torch 2.7.1+cpu, a stock build" in [finding.what for finding in findings]
    check_start(gaudi.seen())


def test_lazy_mode_on_a_stock_torch_is_an_error(gaudi: GaudiMachine) -> None:
    gaudi.versions["torch"] = "2.7.1"
    gaudi.environment["PT_HPU_LAZY_MODE"] = "1"

    with pytest.raises(ConfigError, match=r"not the vendor's build.*set PT_HPU_LAZY_MODE=0"):
        check_start(gaudi.seen())


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("PT_HPU_LAZY_MODE", "true", ERROR),
        ("PT_HPU_LAZY_MODE", "2", ERROR),
        ("PT_HPU_LAZY_MODE", "1", OK),
        ("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "true", WARN),
        ("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", "1", OK),
        ("PT_HPU_WEIGHT_SHARING", "1", WARN),
        ("PT_HPU_WEIGHT_SHARING", "0", OK),
        ("PT_HPU_ENABLE_LAZY_COLLECTIVES", "false", ERROR),
        ("GC_KERNEL_PATH", "/opt/own/libkernels.so", ERROR),
        ("GC_KERNEL_PATH", "/opt/own/libkernels.so:/usr/lib/habanalabs/libtpc_kernels.so", OK),
        ("GC_KERNEL_PATH", "", OK),
        ("HABANA_PLUGINS_LIB_PATH", "/usr/lib/habanatools/habana_plugins", ERROR),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/cache/recipes,false,8192,false", OK),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/cache/recipes", OK),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/cache/recipes,false,8192", WARN),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/cache/my recipes", WARN),
        ("HABANA_VISIBLE_DEVICES", "2", WARN),
        ("HABANA_VISIBLE_DEVICES", "all", OK),
        ("HABANA_VISIBLE_DEVICES", "first", WARN),
        ("HABANA_VISIBLE_MODULES", "all", ERROR),
        ("HABANA_VISIBLE_MODULES", "\u00b2", ERROR),
        ("HABANA_VISIBLE_MODULES", "9" * 5000, ERROR),
        ("HABANA_VISIBLE_DEVICES", "\u00b2", WARN),
        ("HLS_MODULE_ID", "\u00b2", OK),
        ("HABANA_VISIBLE_MODULES", "0,0", ERROR),
        ("HABANA_VISIBLE_MODULES", "0,9", ERROR),
        ("HABANA_VISIBLE_MODULES", "3", ERROR),
        ("HABANA_VISIBLE_MODULES", "1,2", WARN),
        ("HABANA_RUNTIME_ERROR", "no accelerators found", WARN),
        ("HABANA_VISIBLE_MODULES", "2,3", OK),
        ("HABANA_VISIBLE_MODULES", "3,2", OK),
    ],
)
def test_a_harmful_environment_variable_is_reported(
    gaudi: GaudiMachine, name: str, value: str, level: str
) -> None:
    gaudi.environment[name] = value

    found = levels(gaudi.seen(), num_cards=2)

    assert found.get(name, OK) == level


def test_a_revision_without_products_of_float32_is_reported(tmp_path: Path) -> None:
    gaudi = GaudiMachine(tmp_path, cards=1, pci_id="0x1020")
    device = "sys/class/accel/accel0/device/revision"
    for revision, is_limited in (("0x01", False), ("0x04", True)):
        gaudi.write(device, f"{revision}\n")

        assert ("card revision" in levels(gaudi.seen())) == is_limited
        (card,) = find_cards(gaudi.seen()).cards
        assert card.multiplies_float32 != is_limited


def test_missing_files_of_the_compiler_are_reported(gaudi: GaudiMachine) -> None:
    (gaudi.root / "usr/lib/habanalabs/libtpc_kernels.so").unlink()

    findings = [
        found for found in preflight(gaudi.seen()).findings if found.about == "GC_KERNEL_PATH"
    ]

    assert [(found.level, found.do) for found in findings] == [
        (WARN, "install the vendor's packages, or set GC_KERNEL_PATH to where they are")
    ]
    assert (
        "is not set, and /usr/lib/habanalabs/libtpc_kernels.so does not exist" in findings[0].what
    )


def test_device_indices_in_a_container_are_not_reported(gaudi: GaudiMachine) -> None:
    gaudi.environment["HABANA_VISIBLE_DEVICES"] = "2"
    gaudi.write(".dockerenv", "")

    assert levels(gaudi.seen()) == {}


def test_driver_and_runtime_of_two_releases_are_reported(gaudi: GaudiMachine) -> None:
    gaudi.driver = "1.20.0-bd4b6a8"

    (found,) = [f for f in preflight(gaudi.seen()).findings if f.about == "driver version"]

    assert found.level == WARN
    assert "the driver is 1.20.0-bd4b6a8, the runtime 1.22.1.6" in found.what


@pytest.mark.parametrize("manager", ["dpkg-query", "rpm"])
def test_system_packages_are_listed_and_must_be_of_one_release(
    gaudi: GaudiMachine, manager: str
) -> None:
    def told() -> list[str]:
        found = preflight(gaudi.seen()).findings
        return [f"{entry.level} {entry.what}" for entry in found if entry.about.startswith("sys")]

    assert told() == []
    gaudi.package_manager = manager
    gaudi.packages = {"habanalabs-thunk": "1.22.1-6", "habanalabs-graph": "1.22.1-6"}
    assert told() == ["ok habanalabs-graph 1.22.1-6, habanalabs-thunk 1.22.1-6"]
    # The firmware tools may be newer.
    gaudi.packages["habanalabs-firmware-tools"] = "1.23.0-1"
    assert told()[0].startswith("ok ")
    gaudi.packages["habanalabs-graph"] = "1.21.0-555"
    (warning,) = told()
    assert warning.startswith("warn packages of 2 releases") and "thunk 1.22.1-6" in warning


def test_an_operation_that_fails_names_both_releases(gaudi: GaudiMachine) -> None:
    told = explain("Graph compile failed. 26", gaudi.seen())
    assert told is not None and "driver" not in told
    gaudi.driver = "1.20.0-bd4b6a8"

    known = explain("synStatus=26 [Generic failure] Device acquire failed", gaudi.seen())
    unknown = explain("a + a failed", gaudi.seen())

    for text in (known, unknown):
        assert text is not None
        assert "the driver is 1.20.0-bd4b6a8, the runtime 1.22.1.6" in text
        assert text.endswith("update the driver on the host")
    assert str(unknown).startswith("a + a failed; ")


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (0o660, "docker run --group-add {group}, .*supplementalGroups: .{group}. in Kubernetes"),
        (0o600, "docker run --user {user}.*udev rule"),
    ],
)
def test_a_node_that_this_user_may_not_open_is_reported_with_owner_and_remedy(
    mode: int, remedy: str, gaudi: GaudiMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = gaudi.root / "dev/accel/accel3"
    node.chmod(mode)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != node)
    user, group = os.getuid(), node.stat().st_gid

    (found,) = [finding for finding in preflight(gaudi.seen()).findings if finding.level != OK]

    assert found.level == WARN
    wanted = f"/dev/accel/accel3 (user {user}, group {group}, mode {mode:04o})"
    assert found.what == f"user {user} may not open {wanted}"
    assert re.search(remedy.format(user=user, group=group), found.do)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"open /dev/accel/accel0 .*; /dev/accel/accel7"):
        check_start(gaudi.seen())


def test_the_remedy_for_several_nodes_opens_all_of_them(
    gaudi: GaudiMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (gaudi.root / f"dev/accel/accel{number}").chmod(0o600 if number == 5 else 0o660)
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(ConfigError, match="docker run --user"):
        check_start(gaudi.seen())


def test_an_unknown_driver_version_is_reported_as_unknown(gaudi: GaudiMachine) -> None:
    gaudi.driver = None

    (found,) = [f for f in preflight(gaudi.seen()).findings if f.about == "driver version"]

    assert (found.level, found.what) == (OK, "driver version unknown")


def test_a_torch_of_another_release_is_reported_with_both_versions(gaudi: GaudiMachine) -> None:
    gaudi.versions["torch"] = "2.9.0+hpu.1.23.0.695"

    (found,) = [f for f in preflight(gaudi.seen()).findings if f.level == WARN]

    assert "torch is 2.9.0+hpu.1.23.0.695, release 1.22.1.6 has torch 2.7" in found.what


def test_missing_kernel_modules_for_several_cards_are_a_warning(gaudi: GaudiMachine) -> None:
    gaudi.write("proc/modules", "habanalabs 1 0 - Live 0x0\nhabanalabs_cn 1 0 - Live 0x0\n")

    (found,) = [f for f in preflight(gaudi.seen()).findings if f.level == WARN]

    assert "habanalabs_ib, habanalabs_en are not loaded" in found.what


def test_accelerators_of_other_vendors_are_ignored(tmp_path: Path) -> None:
    machine = GaudiMachine(tmp_path, cards=1)
    machine.card(1, vendor="0x8086")

    assert [card.node for card in find_cards(machine.seen()).cards] == ["/dev/accel/accel0"]


def test_cards_without_nodes_are_known_from_hl_smi(tmp_path: Path) -> None:
    machine = GaudiMachine(tmp_path, cards=0)
    machine.smi_modules = [5, 2]

    cards = find_cards(machine.seen()).cards

    assert [(card.module, card.name, card.memory) for card in cards] == [
        (2, "HL-325L", "672 MiB of 131072 MiB"),
        (5, "HL-325L", "672 MiB of 131072 MiB"),
    ]


def test_kernels_are_listed_by_generation_and_release(tmp_path: Path) -> None:
    older = GaudiMachine(tmp_path, cards=1, pci_id="0x1020")

    (found,) = [f for f in preflight(older.seen()).findings if f.about == "kernels"]

    assert found.what.startswith("gaudi2: 10 of 18 fused kernels are known to be available; ")
    missing = "matmul.float32_out, mixture_of_experts.bias_fused_weights"
    assert f"; not there: {missing}; only the runtime can tell: " in found.what
    assert "block_softmax_adjustment" in found.what.partition("only the runtime")[2]


def test_a_card_in_use_is_no_error_while_other_cards_are_free(gaudi: GaudiMachine) -> None:
    gaudi.hold(4711, "/dev/accel/accel0")

    (found,) = [f for f in preflight(gaudi.seen()).findings if f.level == WARN]

    assert "module 0, /dev/accel/accel0, 0000:10:00.0 is held by process 4711" in found.what
    assert found.do == "name a free card: HABANA_VISIBLE_MODULES=1"
    check_start(gaudi.seen())


def test_a_worker_bound_to_a_held_card_does_not_start(gaudi: GaudiMachine) -> None:
    gaudi.hold(4711, "/dev/accel/accel3")
    gaudi.environment["HABANA_VISIBLE_MODULES"] = "2,3"

    check_start(gaudi.seen(), num_cards=2, rank=0)
    with pytest.raises(ConfigError, match=r"module 3.* is held by process 4711 \(python3 server"):
        check_start(gaudi.seen(), num_cards=2, rank=1)


def test_a_server_needs_as_many_free_cards_as_it_has_workers(tmp_path: Path) -> None:
    machine = GaudiMachine(tmp_path, cards=2)
    machine.hold(7, "/dev/accel/accel1")

    found = preflight(machine.seen(), num_cards=2).errors

    assert [finding.what.partition(":")[0] for finding in found] == [
        "1 of 2 cards are free, 2 needed"
    ]


def test_this_process_and_monitors_do_not_count_as_holders(gaudi: GaudiMachine) -> None:
    gaudi.hold(1, "/dev/accel/accel0")
    gaudi.hold(2, "/dev/accel/accel_controlD0")

    assert levels(gaudi.seen(pid=1), num_cards=8) == {}


def test_few_huge_pages_are_a_warning(gaudi: GaudiMachine) -> None:
    gaudi.huge_pages(10)

    (found,) = [f for f in preflight(gaudi.seen()).findings if f.level != OK]

    assert (found.level, found.about) == (WARN, "huge pages")
    assert "20 MiB of huge pages are reserved, deployments reserve 12288 MiB" in found.what
    assert found.do.startswith("reserve 2 MiB pages on the host: sysctl vm.nr_hugepages=6144,")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("synStatus=20 [Device busy] Device acquire failed.", "another process uses the card"),
        ("synStatus=26 [Generic failure] Device acquire failed", "gave no reason"),
        ("Device acquire failed", "status unknown"),
        ("Graph compile failed. 26", "could not be compiled"),
        ("workspace Allocation of size ::1048576 failed!", "needs more workspace"),
        ("cpu fallback is not supported during hpu graph capturing", "--enforce-eager"),
        ("Device Limitation - float32 operation is not supported", "Gaudi 2B, 2C and 2D"),
    ],
)
def test_the_runtimes_errors_are_explained(gaudi: GaudiMachine, text: str, meaning: str) -> None:
    assert meaning in str(explain(f"RuntimeError: {text}", gaudi.seen()))


def test_a_failed_compilation_names_the_missing_files_of_the_compiler(gaudi: GaudiMachine) -> None:
    text = "Graph compile failed. synStatus=synFail 26 [Generic failure]"
    assert "memory is full" in str(explain(text, gaudi.seen()))
    gaudi.environment["GC_KERNEL_PATH"] = "/opt/own.so"

    assert "unset GC_KERNEL_PATH" in str(explain(text, gaudi.seen()))


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (8, "no usable card (status 8)"),
        (17, "was reset"),
        (22, "another process uses the card"),
        (24, "in reset or has failed"),
        (99, "(status 99)"),
    ],
)
def test_the_status_of_a_failed_acquisition_is_explained(
    gaudi: GaudiMachine, status: int, meaning: str
) -> None:
    text = f"Device acquire failed. synStatus={status}"

    assert meaning in str(explain(text, gaudi.seen()))


def test_a_failed_acquisition_names_the_holders(gaudi: GaudiMachine) -> None:
    gaudi.hold(4711, "/dev/accel/accel0")

    told = explain("synStatus=20 [Device busy] Device acquire failed.", gaudi.seen())

    assert told is not None
    assert told.endswith("0000:10:00.0 is held by process 4711 (python3 server.py)")


def test_an_unrelated_error_gets_no_explanation(gaudi: GaudiMachine) -> None:
    assert explain("division by zero", gaudi.seen()) is None


def test_preflight_runs_on_this_machine() -> None:
    assert has_module("torch") and not has_module("no_such_module")
    assert run_command(["no-such-command-anywhere"]) is None
    assert run_command(["echo", "1.22.1"]) == "1.22.1\n"
    assert preflight(Machine(environment={})).findings


def test_links_that_are_down_are_reported(gaudi: GaudiMachine) -> None:
    def told() -> list[str]:
        found = preflight(gaudi.seen(), num_cards=8).findings
        return [f"{entry.level} {entry.what}" for entry in found if entry.about == "links"]

    assert told() == ["ok 40 links between 8 cards are up"]
    gaudi.links_down = [(2, 1), (3, 4)]
    (warning,) = told()
    assert warning.startswith("warn 2 of 40 links between cards are not up: port 1 of module 2, ")
    assert "; port 4 of module 3, " in warning
    gaudi.environment["HABANA_VISIBLE_MODULES"] = "0,1,4,5,6,7"
    assert told() == ["ok 30 links between 6 cards are up"]


def test_a_missing_infiniband_node_of_a_card_is_reported(gaudi: GaudiMachine) -> None:
    text = "Device acquire failed. synStatus 26"
    for index in range(8):
        gaudi.write(f"sys/class/infiniband_verbs/uverbs{index + 2}/ibdev", f"hbl_{index}\n")
        gaudi.write(f"dev/infiniband/uverbs{index + 2}", "")
    assert levels(gaudi.seen()) == {}
    assert "uverbs" not in str(explain(text, gaudi.seen()))

    (gaudi.root / "dev/infiniband/uverbs5").unlink()

    assert levels(gaudi.seen()) == {"infiniband": WARN}
    assert "/dev/infiniband/uverbs5 of module 3, " in str(explain(text, gaudi.seen()))
    gaudi.environment["HABANA_VISIBLE_MODULES"] = "0,1"
    assert levels(gaudi.seen()) == {}


def test_links_are_not_checked_for_a_single_card(gaudi: GaudiMachine) -> None:
    gaudi.links_down = [(0, 1)]

    assert levels(gaudi.seen()) == {}
    check_start(gaudi.seen(), num_cards=8, rank=0)


def test_cards_of_two_generations_are_refused(tmp_path: Path) -> None:
    mixed = GaudiMachine(tmp_path, cards=4)
    mixed.card(4, pci_id="0x1020")
    mixed.smi_modules.append(4)

    (error,) = preflight(mixed.seen(), num_cards=4).errors

    assert error.what == "the cards are of 2 generations: 1 are gaudi2, 4 are gaudi3"
    assert preflight(mixed.seen()).errors == ()


def test_numbers_of_another_script_in_system_files_are_left_out(gaudi: GaudiMachine) -> None:
    gaudi.write("proc/meminfo", "HugePages_Total: \u00b2\nHugepagesize: 2048 kB\n")
    gaudi.write("proc/\u00b2/fd/0", "")

    preflight(gaudi.seen())
