"""A worker on a GPU: launches never wait for the device, and steps in flight do not interfere.

Run by `make test-cuda`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from hpu.protocol import RequestSampling, StepResult

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default:::torch"),
]

# One bucket per phase, so that every launch is a replay.
ONE_BUCKET_PER_PHASE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(4, 4, 4),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 96, 96),
    decode_batch=Range(4, 4, 4),
    decode_blocks=Range(96, 96, 96),
)
ALL_SAMPLING = [
    RequestSampling(temperature=0.0, num_logprobs=3),
    RequestSampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=4),
    RequestSampling(seed=5, repetition_penalty=1.2, bad_words=((44, 45),), logit_bias=((3, 1.0),)),
    RequestSampling(seed=6, min_tokens=4, end_token_ids=(1,), num_prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def make_rig(folder: Path, device: str = "cuda") -> WorkerRig:
    rig = WorkerRig(
        folder, device=device, buckets=ONE_BUCKET_PER_PHASE, steps=(4, 64, 96), max_num_seqs=4
    )
    for row, sampling in enumerate(ALL_SAMPLING):
        rig.admit(row, [20 + row, *range(30, 60 + row)], sampling=sampling)
    rig.prefill(dict.fromkeys(range(len(ALL_SAMPLING))))
    return rig


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error on operations that wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_step_waits_for_the_device_to_launch_the_next(folder: Path) -> None:
    rig = make_rig(folder)
    rows = list(range(len(ALL_SAMPLING)))

    with no_waiting():
        rig.submit()
        for _ in range(6):
            rig.decode(rows)
            rig.submit()
    results = [rig.collect() for _ in range(7)]

    rig.worker.close()
    assert all(len(result.tokens) == len(rows) for result in results)


def test_overlapped_steps_give_the_tokens_of_sequential_steps(folder: Path) -> None:
    sampled = []
    for depth in (1, 3):
        rig = make_rig(folder)
        rows = list(range(len(ALL_SAMPLING)))
        rig.submit()
        in_flight = 1
        for _ in range(12):
            if in_flight == depth:
                rig.collect()
                in_flight -= 1
            rig.decode(rows)
            rig.submit()
            in_flight += 1
        for _ in range(in_flight):
            rig.collect()
        sampled.append([rig.requests[row].sampled for row in rows])
        rig.worker.close()

    assert sampled[0] == sampled[1]
    assert all(len(tokens) == 13 for tokens in sampled[0])


def test_gpu_logprobs_equal_cpu_logprobs(folder: Path) -> None:
    scores = []
    for device in ("cpu", "cuda"):
        rig = make_rig(folder, device)
        results = [rig.step()]
        for _ in range(4):
            rig.decode(list(range(len(ALL_SAMPLING))))
            results.append(rig.step())
        rig.worker.close()
        scores.append([value for result in results for value in scores_of(result)])

    assert len(scores[0]) > 60
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)


def scores_of(result: StepResult) -> list[float]:
    parts = [part for _, part in result.prompt_logprobs + result.logprobs]
    return [value for part in parts for value in memoryview(part.values).cast("f")]


def test_every_launch_of_a_prepared_shape_is_a_replay(folder: Path) -> None:
    rig = make_rig(folder)

    results = [rig.step()]
    for _ in range(5):
        rig.decode(list(range(len(ALL_SAMPLING))))
        results.append(rig.step())

    rig.worker.close()
    counted_later = {name for result in results for name in result.counters}
    assert {(0, 4, 64, 0), (1, 4, 1, 96)} <= set(rig.ready.buckets)
    assert rig.ready.counters["graphs"] == len(rig.ready.buckets)
    assert not any("compil" in name or "graph" in name for name in counted_later)
    assert all(seconds > 0 for result in results for seconds in result.seconds)
