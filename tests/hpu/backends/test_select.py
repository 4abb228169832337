"""hpu/backends/select.py: a back end for every device of config/devices/."""

import dataclasses
import re
from pathlib import Path

import pytest

from config.devices.base import DEVICES
from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import ExecutionConfig
from config.loading.cards import CardNode
from config.loading.sources import load
from hpu.backends.select import select_backend


@pytest.mark.parametrize("device", DEVICES.all)
def test_every_device_has_a_back_end_and_is_a_choice(device: str) -> None:
    assert callable(DEVICES.counterpart(device, "hpu.backends", "BACKENDS"))
    assert EngineConfig("m", device=device).device == device


def test_an_unknown_device_is_refused_with_all_devices() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda, hpu, hpu-emulator"):
        EngineConfig("m", device="tpu")
    with pytest.raises(ConfigError, match="must be one of cpu, cuda, hpu, hpu-emulator"):
        DEVICES.counterpart("tpu", "hpu.backends", "BACKENDS")


def without_effect(
    words: list[str], caplog: pytest.LogCaptureFixture, device: str = "cpu"
) -> list[str]:
    """Log lines about flags without effect at the start on `device` with `words`."""
    caplog.set_level("INFO")
    select_backend(
        load(["m", f"--device={device}", "--num-threads=1", *words], environ={}).engine
    ).close()
    return [line for line in caplog.messages if "no effect" in line]


def test_a_cpu_names_the_changed_flags_that_a_gaudi_reads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["--block-softmax=wsum", "--no-prompt-use-fusedsdpa", "--split-qkv", "--fp32-softmax"]

    assert without_effect(words, caplog) == [
        "--no-prompt-use-fusedsdpa, --softmax-mode, --block-softmax, --split-qkv have no effect on "
        "this device: only a Gaudi reads them"
    ]
    caplog.clear()
    assert without_effect(["--split-qkv", "--gpu-memory-utilization=0.5"], caplog) == [
        "--split-qkv has no effect on this device: only a Gaudi reads it",
        "--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory-bytes sets the size of "
        "the KV cache",
    ]


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_cards_that_auto_leaves_unused_are_reported(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [CardNode(f"/dev/accel/accel{i}", "sys", i) for i in range(2)]
    monkeypatch.setattr("hpu.backends.select.card_nodes", lambda: nodes)

    select_backend(EngineConfig("m", device=device, num_threads=1)).close()

    found = [line for line in caplog.messages if "although this machine has 2 Gaudi cards" in line]
    assert len(found) == (device == "auto")


def test_a_cpu_does_not_report_the_flags_of_contiguous_attention_and_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["--no-contiguous-pa", "--defrag-threshold=8", "--log-step-graph-compilation"]

    assert without_effect(words, caplog) == []


SLICES = "--fsdpa-slicing and --prompt-use-fusedsdpa without --prompt-use-flex-attention"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--execution-mode=hpu-graphs", "--compile-fullgraph", "--config-hidden-layers=2"],
            {"--compile-fullgraph": "--execution-mode torch-compile, the mode is hpu-graphs"},
        ),
        (
            ["--execution-mode=torch-compile", "--compile-fullgraph", "--config-hidden-layers=2"],
            {
                "--config-hidden-layers": "--execution-mode hpu-graphs or lazy, the mode is "
                "torch-compile"
            },
        ),
        (["--no-prompt-use-fusedsdpa", "--fsdpa-slice-size=2048"], {"--fsdpa-slice-size": SLICES}),
        (["--fsdpa-slice-size=2048"], {}),
        (
            ["--disable-mark-scales-as-const"],
            {"--disable-mark-scales-as-const": "--quantization inc"},
        ),
    ],
)
def test_a_gaudi_names_the_changed_flags_without_effect_and_the_settings_they_need(
    words: list[str], expected: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert without_effect(words, caplog, "hpu-emulator") == [
        f"{flag} has no effect: it needs {setting}" for flag, setting in expected.items()
    ]


def test_back_ends_of_other_devices_ignore_execution_flags() -> None:
    names = {field.name for field in dataclasses.fields(ExecutionConfig)}
    for device in ("cpu", "cuda"):
        text = (Path(__file__).parents[3] / "hpu" / "backends" / f"{device}.py").read_text()
        assert not names & set(re.findall(r"execution\.(\w+)", text))
