"""Layers with a state on the emulated card."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny
from two_prompts import greedy, working

from config.execution import EmulatorSettings, ExecutionConfig


@pytest.mark.parametrize("mode", ["hpu-graphs", "torch-compile"])
@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_next"])
def test_states_give_the_tokens_of_the_cpu_and_nothing_compiles_after_warmup(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    with working(
        folder,
        device="hpu-emulator",
        execution=ExecutionConfig(mode=mode),
        emulator=EmulatorSettings(is_strict=True),
        merged_prefill=True,
        num_blocks=32,
        max_model_len=256,
    ) as rig:
        card = torch.hpu.emulated  # type: ignore[attr-defined]
        names = ("compilations", "captures", "fallbacks")
        before = [card.counters.counts[name] for name in names]
        found = greedy(rig)
        after = [card.counters.counts[name] for name in names]

    assert found == expected
    # Prefix caching is asked for too: without it decodes read the cache as one slice.
    assert not rig.ready.bucket_limits.merged_prefill and rig.ready.contiguous
    assert after == before
    assert before[0] > 0 and before[2] == 0
