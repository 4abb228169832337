"""Sliding-window layers with a cache of the window's size, on the emulated card."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny
from two_prompts import greedy, working

from config.execution import EmulatorSettings, ExecutionConfig


@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
def test_window_caches_give_the_tokens_of_the_cpu_and_compile_nothing_after_warmup(
    mode: str, tmp_path: Path
) -> None:
    folder = make_tiny("gpt_oss", tmp_path)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    with working(
        folder,
        device="hpu-emulator",
        execution=ExecutionConfig(mode=mode),
        emulator=EmulatorSettings(is_strict=True),
        prefix_caching=False,
        num_blocks=32,
        max_model_len=256,
    ) as rig:
        card = torch.hpu.emulated  # type: ignore[attr-defined]
        names = ("compilations", "captures", "fallbacks")
        before = [card.counters.counts[name] for name in names]
        found = greedy(rig)
        after = [card.counters.counts[name] for name in names]
        components = rig.worker.serving.components

    assert found == expected
    # Rings of two requests, of the runner and of padding.
    assert components is not None and components.cache is not None
    assert components.cache.num_rings == 4
    assert after == before
    assert before[0] > 0 and before[2] == 0
