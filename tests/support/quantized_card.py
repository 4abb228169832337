"""Tokens of a checkpoint on the emulated card, served by a worker."""

from pathlib import Path

import torch
from two_prompts import greedy, random_traffic, working

from config.execution import EmulatorSettings, ExecutionConfig

COUNTERS = ("compilations", "captures", "fallbacks")
GRAPHS = ExecutionConfig(mode="hpu-graphs")


def tokens_on_card(
    folder: Path, generation: str, execution: ExecutionConfig = GRAPHS
) -> tuple[list[list[int]], int]:
    """(tokens of two prompts and of random traffic, number of recipes compiled before the traffic).
    Asserts that no recipe is compiled afterwards."""
    with working(
        folder,
        device="hpu-emulator",
        dtype="bfloat16",
        execution=execution,
        emulator=EmulatorSettings(card=generation, is_strict=True),
    ) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        found = greedy(rig, 6) + random_traffic(rig, 1)
        after = [counts[name] for name in COUNTERS]
    assert after == before and before[2] == 0
    return found, before[0]
