"""A model on the strict emulated card compared with the same model on the CPU."""

from pathlib import Path
from typing import Any

import torch
from two_prompts import greedy, random_traffic, working
from worker_rig import WorkerRig

from config.execution import EmulatorSettings, ExecutionConfig
from hpu.protocol import WorkerReady

STRICT = EmulatorSettings(is_strict=True)
COUNTERS = ("compilations", "captures", "fallbacks")


def assert_nothing_compiles_after_warmup(
    folder: Path,
    execution: ExecutionConfig,
    *,
    model_impl: str = "auto",
    shares: bool = True,
    **settings: Any,
) -> WorkerReady:
    """Assert that two prompts and random traffic give the CPU's tokens, without compilations,
    captures or fallbacks. `shares`: whether requests share blocks; `settings`: settings of the
    card's worker."""

    def outcome(rig: WorkerRig) -> list[list[int]]:
        return greedy(rig) + random_traffic(rig, shares=shares)

    with working(folder, model_impl=model_impl) as on_cpu:
        expected = outcome(on_cpu)

    with working(
        folder,
        device="hpu-emulator",
        execution=execution,
        emulator=STRICT,
        model_impl=model_impl,
        **settings,
    ) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        found = outcome(rig)
        after = [counts[name] for name in COUNTERS]

    assert found == expected
    assert after == before
    assert before[0] > 0 and before[2] == 0
    return rig.ready
