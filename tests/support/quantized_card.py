"""Tokens of a checkpoint on the emulated card, as a worker serves it."""

from pathlib import Path

import torch
from two_prompts import greedy, random_traffic, working

from config.execution import EmulatorSettings, ExecutionConfig

COUNTERS = ("compilations", "captures", "fallbacks")
GRAPHS = ExecutionConfig(mode="hpu-graphs")


def tokens_on_card(
    folder: Path, generation: str, execution: ExecutionConfig = GRAPHS
) -> tuple[list[list[int]], int]:
    """The tokens of two prompts and of random traffic, and the number of recipes compiled before
    the traffic. Asserts that none is compiled afterwards."""
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
