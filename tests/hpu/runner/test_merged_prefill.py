"""Prompts merged into one row: the same tokens as in separate rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from config.execution import EmulatorSettings, ExecutionConfig
from hpu.protocol import PREFILL, RequestSampling

TABLE = BucketConfig(
    strategy="linear",
    # With merged prefill, the only batch size is 1.
    prompt_batch=Range(1, 1, 2),
    prompt_query=Range(64, 64, 128),
    prompt_context=Range(0, 32, 32),
    decode_batch=Range(1, 1, 3),
    decode_blocks=Range(32, 32, 32),
)
PROMPTS = ([3, 5, 7, 9, 11] * 9, [8, 1, 2], list(range(20, 50)))
ON_CARD: dict[str, Any] = {
    "steps": (1, 64, 32),
    "buckets": TABLE,
    "device": "hpu-emulator",
    "emulator": EmulatorSettings(is_strict=True),
    "merged_prefill": True,
}
WITH_LOGPROBS = RequestSampling(temperature=0.0, num_logprobs=2, num_prompt_logprobs=2)


@contextmanager
def working(folder: Path, **settings: Any) -> Iterator[WorkerRig]:
    rig = WorkerRig(folder, **settings)
    try:
        yield rig
    finally:
        rig.worker.close()


def outcome(rig: WorkerRig) -> tuple[list[list[int]], list[tuple[int, bytes]]]:
    """Tokens of three prompts, two of them in chunks with different contexts, and the ids of the
    prompt log-probabilities of the last two launches."""
    for req_index, prompt in enumerate(PROMPTS):
        rig.admit(req_index, prompt, sampling=WITH_LOGPROBS)
    rig.prefill({0: 40, 2: 11})
    rig.step()
    rig.prefill({2: 9, 1: None, 0: 2})
    found = rig.step().prompt_logprobs
    rig.prefill({0: None, 2: None})
    found += rig.step().prompt_logprobs
    for _ in range(8):
        rig.decode([0, 1, 2])
        rig.step()
    tokens = [rig.free(req_index) for req_index in range(len(PROMPTS))]
    return tokens, [(req_index, bytes(logprobs.ids)) for req_index, logprobs in found]


@pytest.mark.parametrize(
    "execution",
    [
        ExecutionConfig(),
        ExecutionConfig(fused_sdpa=False),
        pytest.param(ExecutionConfig(mode="torch-compile"), marks=pytest.mark.slow),
    ],
    ids=["graphs", "unfused", "compile"],
)
@pytest.mark.parametrize("window", [None, 12])
def test_prompts_in_one_row_give_the_tokens_of_separate_rows(
    window: int | None, execution: ExecutionConfig, tmp_path: Path
) -> None:
    folder = make_tiny("mistral", tmp_path, sliding_window=window)
    with working(folder) as on_cpu:
        expected = outcome(on_cpu)

    with working(folder, **ON_CARD, execution=execution) as rig:
        found = outcome(rig)

    assert rig.ready.bucket_limits.merged_prefill
    assert {batch for phase, batch, *_ in rig.ready.buckets if phase == PREFILL} == {1}
    assert found == expected


def test_a_nan_prompt_affects_no_other_prompt_in_its_row(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    with working(folder) as alone:
        alone.admit(0, PROMPTS[2])
        alone.prefill({0: None})
        alone.step()
        alone.run([0], 4)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with working(folder, **ON_CARD) as rig:
        rig.admit(1, [9] * 12)
        rig.admit(0, PROMPTS[2])
        rig.prefill({1: None, 0: None})
        first = rig.step().tokens
        rig.run([0], 4)

    assert first[0] == -1
    assert rig.requests[0].sampled == alone.requests[0].sampled


def test_a_device_that_pads_nothing_ignores_merged_prefill(tmp_path: Path) -> None:
    with working(make_tiny("llama", tmp_path), merged_prefill=True) as rig:
        pass

    assert not rig.ready.bucket_limits.merged_prefill
