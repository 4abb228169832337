"""A model in the code of transformers on the strict emulated card."""

from pathlib import Path
from typing import Any

import pytest
import torch
from releases import transformers_before
from tiny_models import make_tiny
from two_prompts import greedy, working

from config.execution import EmulatorSettings, ExecutionConfig

STRICT = EmulatorSettings(is_strict=True)
THEIRS = "transformers"


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
@pytest.mark.parametrize("mode", ["hpu-graphs", "torch-compile"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gpt_neox", {}),
        ("starcoder2", {"sliding_window": 9}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ],
)
def test_the_card_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warm_up(
    family: str, overrides: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    with working(folder, model_impl=THEIRS) as on_cpu:
        expected = greedy(on_cpu)

    settings = {
        "execution": ExecutionConfig(mode=mode),
        "emulator": STRICT,
        "model_impl": THEIRS,
    }
    with working(folder, device="hpu-emulator", **settings) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        warm = counts["compilations"], counts["captures"], counts["fallbacks"]
        found = greedy(rig)

    assert found == expected
    assert (counts["compilations"], counts["captures"], counts["fallbacks"]) == warm
    assert counts["fallbacks"] == 0
