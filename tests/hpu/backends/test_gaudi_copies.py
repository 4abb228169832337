"""--host-copies: each method gives the CPU's tokens, and auto skips a method that does not work on
the card."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import change_cards, emulated
from tiny_models import make_tiny
from torch import nn
from two_prompts import greedy, working

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import BLOCKING_COPIES, DEFAULT_COPIES, SIDE_COPIES, ExecutionConfig
from hpu.backends import gaudi_copies, gaudi_copy_trials
from hpu.backends.gaudi import GaudiBackend
from hpu.backends.select import select_backend
from hpu.emulator.faults import WEDGED_COPIES

KINDS = (SIDE_COPIES, DEFAULT_COPIES, BLOCKING_COPIES)


@contextmanager
def a_card(host_copies: str = "auto", **config: Any) -> Iterator[GaudiBackend]:
    execution = ExecutionConfig(host_copies=host_copies)
    backend = select_backend(EngineConfig("m", device="hpu-emulator", execution=execution))
    assert isinstance(backend, GaudiBackend)
    device = torch.hpu.emulated  # type: ignore[attr-defined]
    device.config = dataclasses.replace(device.config, **config)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pins_memory", [False, True])
def test_each_copy_method_delivers_the_output_of_a_launch(
    kind: str, pins_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_cards(monkeypatch, pins_memory=pins_memory, strict=True)
    execution = ExecutionConfig(host_copies=kind)
    backend = select_backend(EngineConfig("m", device="hpu-emulator", execution=execution))
    source = torch.arange(64, dtype=torch.int32).to(backend.device)

    for number in range(5):
        copy = backend.to_host(source + number)
        backend.event().wait()

        assert copy.tolist() == list(range(number, number + 64))
    backend.close()


def test_auto_tries_each_copy_method_and_logs_its_choice_with_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), a_card() as backend:
        backend.prepare(nn.Module())

        assert backend.host_copies == SIDE_COPIES
    (line,) = [text for text in caplog.messages if text.startswith("Copies to the host")]
    assert all(f"{kind} " in line for kind in KINDS) and " us" in line


def test_auto_skips_a_copy_method_that_never_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaudi_copy_trials, "WATCHDOG_S", 0.2)

    with a_card(faults=frozenset([WEDGED_COPIES])) as backend:
        backend.prepare(nn.Module())

        assert backend.host_copies == DEFAULT_COPIES
        # The waiting thread does not change the current stream.
        hpu: Any = torch.hpu  # type: ignore[attr-defined]
        assert hpu.current_stream() is hpu.default_stream()
        copy = backend.to_host(torch.arange(4, dtype=torch.int32).to(backend.device))
        backend.event().wait()
        assert copy.tolist() == [0, 1, 2, 3]
    assert "side is not used: no result after" in caplog.text


def test_pinned_memory_does_not_wait_for_the_launches_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_cards(
        monkeypatch, pins_memory=True, faults=frozenset([WEDGED_COPIES]), launch_submit_s=0.02
    )

    with a_card() as backend:
        backend.prepare(nn.Module())

        assert backend.host_copies == SIDE_COPIES


def test_auto_without_a_working_copy_method_reports_the_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gaudi_copies.HostCopies, "start", lambda self, source: torch.zeros(256))

    with (
        a_card() as backend,
        pytest.raises(ConfigError, match=r"blocking: copied 0.0 instead of 1; .* side: copied"),
    ):
        backend.prepare(nn.Module())


def test_a_copy_to_unpinned_memory_joins_the_launches_before_it() -> None:
    with emulated(launch_submit_s=0.05) as card:
        x = torch.ones(4, device="hpu") + 1
        target = torch.zeros(4)

        with torch.hpu.stream(torch.hpu.Stream()):  # type: ignore[attr-defined]
            target.copy_(x, non_blocking=True)
        joins = card.counters.counts["launch_joins"]

    assert joins == 1
    with emulated(pins_memory=True) as card:
        x = torch.ones(4, device="hpu") + 1
        pinned = torch.zeros(4).pin_memory("hpu")
        pinned.copy_(x, non_blocking=True)

        assert pinned.is_pinned("hpu") and not torch.zeros(4).is_pinned("hpu")
        assert card.counters.counts["launch_joins"] == 0


@pytest.mark.slow
def test_a_worker_serves_with_the_remaining_copy_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaudi_copy_trials, "WATCHDOG_S", 0.2)
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)
    change_cards(monkeypatch, faults=frozenset([WEDGED_COPIES]))

    with working(folder, device="hpu-emulator") as rig:
        assert greedy(rig) == expected
