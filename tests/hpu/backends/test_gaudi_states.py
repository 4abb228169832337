"""Recurrent layers on the emulated card."""

from pathlib import Path

import pytest
from strict_card import assert_nothing_compiles_after_warmup
from tiny_models import make_tiny

from config.execution import ExecutionConfig


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "hpu-graphs") for family in ("granitemoehybrid", "qwen3_next")),
        pytest.param("lfm2_moe", "hpu-graphs", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", "torch-compile", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "torch-compile", marks=pytest.mark.slow),
        pytest.param("lfm2_moe", "torch-compile", marks=pytest.mark.slow),
    ],
)
def test_recurrent_layers_give_the_tokens_of_the_cpu_and_compile_nothing_after_warmup(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    ready = assert_nothing_compiles_after_warmup(
        folder,
        ExecutionConfig(mode=mode),
        shares=False,
        merged_prefill=True,
        num_blocks=32,
        max_model_len=256,
    )

    # Models with recurrent states have no prefix caching, so decodes read the cache as a slice.
    assert not ready.bucket_limits.merged_prefill and ready.contiguous
