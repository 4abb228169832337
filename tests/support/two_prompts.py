"""Two prompts through a worker with few buckets: one plain, one in two chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range

TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 32, 32),
    decode_batch=Range(2, 2, 2),
    decode_blocks=Range(32, 32, 32),
)
PROMPTS = ([3, 5, 7, 9, 11] * 9, [8, 1, 2])


@contextmanager
def working(folder: Path, **settings: Any) -> Iterator[WorkerRig]:
    rig = WorkerRig(folder, buckets=TABLE, steps=(2, 64, 32), **settings)
    try:
        yield rig
    finally:
        rig.worker.close()


def greedy(rig: WorkerRig, count: int = 12) -> list[list[int]]:
    """Two prompts, the longer one in two chunks (the second over cached context), then decodes."""
    for req_index, prompt in enumerate(PROMPTS):
        rig.admit(req_index, prompt)
    rig.prefill({0: 40, 1: None})
    rig.step()
    rig.prefill({0: None})
    rig.step()
    for _ in range(count):
        rig.decode([0, 1])
        rig.step()
    return [rig.free(req_index) for req_index in range(len(PROMPTS))]
