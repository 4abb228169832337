"""A worker sleeps and wakes up: its memory is free in between, and its tokens do not change."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_encoders import Reader, make_pooling
from tiny_models import make_tiny
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from config.errors import RequestFailed, UserError
from config.execution import EmulatorSettings, WarmupConfig
from hpu.protocol import START_PROFILE, WarmupProgress

BUCKETS = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 8, 8),
    decode_batch=Range(2, 2, 2),
    decode_blocks=Range(16, 16, 16),
)
CARD = EmulatorSettings(memory_bytes=256 << 20, is_strict=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def card_rig(folder: Path) -> Iterator[WorkerRig]:
    rig = WorkerRig(
        folder,
        device="hpu-emulator",
        emulator=CARD,
        buckets=BUCKETS,
        steps=(2, 64, 16),
        # Limits that fit BUCKETS: each wake-up captures all launches.
        max_num_seqs=2,
        max_num_batched_tokens=128,
        max_model_len=64,
    )
    yield rig
    rig.worker.close()


def card_memory() -> Any:
    return torch.hpu.emulated.memory  # type: ignore[attr-defined]  # the emulator's


def said(rig: WorkerRig) -> list[list[int]]:
    """Tokens of two requests, which are freed afterwards."""
    rig.admit(0, list(range(20, 50)))
    rig.admit(1, [44, 45, 46])
    rig.prefill({0: None, 1: None})
    rig.step()
    rig.run([0, 1], 5)
    return [rig.free(0), rig.free(1)]


def live_bytes() -> int:
    """Bytes of all live tensors, including tensors that are frozen out of garbage collection."""
    gc.unfreeze()
    gc.collect()
    held = [
        get_object.untyped_storage()
        for get_object in gc.get_objects()
        if type(get_object) is torch.Tensor
    ]
    held += [
        get_object.untyped_storage()
        for get_object in gc.get_objects()
        if type(get_object) is torch.nn.Parameter
    ]
    return sum({tensor.data_ptr(): tensor.nbytes() for tensor in held}.values())


@pytest.mark.parametrize("level", [1, 2])
def test_a_cpu_sleep_frees_the_cache_and_at_level_two_the_weights(folder: Path, level: int) -> None:
    rig = WorkerRig(folder)
    before, awake = said(rig), live_bytes()

    rig.sleep(level)

    given_back = awake - live_bytes()
    ready = rig.worker.wake_up(lambda progress: None)
    after = said(rig)
    rig.worker.close()
    held = rig.ready.kv_bytes + (rig.ready.weight_bytes if level == 2 else 0)
    assert held <= given_back < held + 2**20
    assert after == before
    assert (ready.num_blocks, ready.kv_bytes) == (rig.ready.num_blocks, rig.ready.kv_bytes)


@pytest.mark.parametrize(("level", "by_parts"), [(1, True), (2, False)])
def test_a_card_is_empty_while_its_worker_sleeps_and_every_graph_is_captured_again(
    card_rig: WorkerRig, level: int, by_parts: bool
) -> None:
    rig, memory = card_rig, card_memory()
    before, awake = said(rig), memory.in_use
    progress: list[WarmupProgress] = []

    rig.sleep(level)

    asleep = memory.in_use - memory.workspace
    if by_parts:
        rig.worker.wake_weights()
        weights = memory.in_use - memory.workspace
        assert rig.ready.weight_bytes <= weights < rig.ready.weight_bytes * 1.1
    ready = rig.worker.wake_up(progress.append)
    after, again = said(rig), memory.in_use
    assert asleep == 0
    assert after == before
    assert ready.buckets == rig.ready.buckets
    assert ready.counters["graphs"] == rig.ready.counters["graphs"] > 0
    assert again <= awake
    assert progress[-1].done == progress[-1].total > 0


def test_a_worker_without_memory_stays_asleep_and_can_wake_up_later(
    card_rig: WorkerRig,
) -> None:
    rig, memory = card_rig, card_memory()
    before = said(rig)
    rig.sleep(1)
    others = memory.allocate(memory.limit - memory.in_use - rig.ready.weight_bytes - 1000)
    taken = memory.in_use

    with pytest.raises(RequestFailed, match="cannot wake up and stays asleep"):
        rig.worker.wake_up(lambda progress: None)

    left = memory.in_use
    with pytest.raises(UserError, match="sleeps"):
        rig.worker.call(START_PROFILE)
    del others
    rig.worker.wake_up(lambda progress: None)
    after = said(rig)
    assert left == taken
    assert after == before


@pytest.mark.parametrize(("device", "level"), [("hpu-emulator", 1), ("cpu", 2)])
def test_a_pooling_model_gives_the_same_vectors_after_its_sleep(
    tmp_path: Path, device: str, level: int
) -> None:
    warmup = WarmupConfig(mode="skip")
    reader = Reader(make_pooling("bert", tmp_path), device=device, warmup=warmup)
    texts = [[5, 6, 7], [8, 9]]
    before = reader.read(texts)

    reader.worker.sleep(level)
    reader.worker.wake_up(lambda progress: None)

    after = reader.read(texts)
    reader.worker.close()
    assert [entry.tolist() for entry in after] == [entry.tolist() for entry in before]
