"""A model in the code of transformers on the strict emulated card."""

from pathlib import Path
from typing import Any

import pytest
from releases import transformers_before
from strict_card import assert_nothing_compiles_after_warmup
from tiny_models import make_tiny

from config.execution import ExecutionConfig

THEIRS = "transformers"
FIELDS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "starcoder2": {"sliding_window": 9},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "hpu-graphs") for family in FIELDS),
        # Its plain attention and MLP are in the next one too, with a window.
        pytest.param("gpt_neox", "torch-compile", marks=pytest.mark.slow),
        ("starcoder2", "torch-compile"),
        ("qwen3_moe", "torch-compile"),
    ],
)
def test_the_card_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warm_up(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **FIELDS[family])

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode), model_impl=THEIRS)
