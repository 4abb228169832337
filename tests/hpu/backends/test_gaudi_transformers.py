"""A model in the code of transformers on the strict emulated card."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import transformers_before
from tiny_models import make_tiny
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from config.execution import EmulatorSettings, ExecutionConfig

TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 32, 32),
    decode_batch=Range(2, 2, 2),
    decode_blocks=Range(32, 32, 32),
)
PROMPTS = ([3, 5, 7, 9, 11] * 9, [8, 1, 2])
STRICT = EmulatorSettings(is_strict=True)


@contextmanager
def working(folder: Path, **settings: Any) -> Iterator[WorkerRig]:
    rig = WorkerRig(folder, buckets=TABLE, steps=(2, 64, 32), model_impl="transformers", **settings)
    try:
        yield rig
    finally:
        rig.worker.close()


def greedy(rig: WorkerRig, count: int = 8) -> list[list[int]]:
    """Two prompts, the longer one in two chunks (the second over cached context), then decodes."""
    for req_index, prompt in enumerate(PROMPTS):
        rig.admit(req_index, prompt)
    rig.prefill({0: 40, 1: None})
    rig.step()
    rig.prefill({0: None})
    rig.step()
    rig.run([0, 1], count)
    return [rig.free(req_index) for req_index in range(len(PROMPTS))]


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
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    settings = {"execution": ExecutionConfig(mode=mode), "emulator": STRICT}
    with working(folder, device="hpu-emulator", **settings) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        warm = counts["compilations"], counts["captures"], counts["fallbacks"]
        found = greedy(rig)

    assert found == expected
    assert (counts["compilations"], counts["captures"], counts["fallbacks"]) == warm
    assert counts["fallbacks"] == 0
