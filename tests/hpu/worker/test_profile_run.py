"""Launches outside of any request: the largest launches, which measure a card's memory, and
launches that are profiled instead of serving."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError, ProfileWritten
from config.execution import EmulatorSettings, ExecutionConfig
from hpu.worker.worker import Worker

FEW = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(128, 128, 128),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(4, 4, 4),
    decode_blocks=Range(64, 64, 64),
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def config_of(folder: Path, memory_bytes: int, **settings: Any) -> EngineConfig:
    return EngineConfig(
        str(folder),
        device="hpu-emulator",
        dtype="float32",
        max_model_len=256,
        num_threads=1,
        cache=CacheConfig(block_size=16, **settings),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
        buckets=FEW,
        emulator=EmulatorSettings(memory_bytes=memory_bytes, is_strict=True),
    )


def test_the_largest_launch_is_measured_and_its_memory_stays_free(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    worker = Worker(config_of(folder, 128 * MIB))

    ready = worker.start(lambda progress: None)

    card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
    free = card.memory.limit - card.memory.in_use
    worker.close()
    (memory,) = [
        record for record in caplog.records if record.getMessage().startswith("Free device memory")
    ]
    assert "(gpu_memory_utilization=0.9)" in memory.getMessage()
    fields = memory.fields  # type: ignore[attr-defined]  # of the JSON log
    assert fields["is_measured"] and fields["largest_launch_bytes"] > 0
    # Per block: keys and values of two layers with two heads of 16 in float32 for 16 tokens, plus a
    # float32 flag per slot (hpu/layers/non_finite.py).
    assert ready.kv_bytes == (ready.num_blocks + 1) * 16 * 4 * (2 * 2 * 2 * 16 + 1)
    assert 0.75 * 128 * MIB < ready.kv_bytes < 0.81 * 128 * MIB
    assert ready.graph_bytes > 0 and free >= fields["largest_launch_bytes"]


def test_a_pinned_number_of_blocks_does_not_depend_on_free_memory(folder: Path) -> None:
    found = []
    for megabytes in (64, 128):
        worker = Worker(config_of(folder, megabytes * MIB, num_blocks=200))
        found.append(worker.start(lambda progress: None).num_blocks)
        worker.close()

    assert found == [200, 200]


@pytest.mark.parametrize(
    ("memory_bytes", "words"),
    [
        (
            2 * MIB,
            r"the device ran out of memory before the model was ready \(.*Allocation failed.*\)",
        ),
        (3 * MIB, r"largest launch .* MiB are free; lower --max-num"),
    ],
)
def test_a_card_that_is_too_small_is_reported_with_the_sizes(
    folder: Path, memory_bytes: int, words: str
) -> None:
    worker = Worker(config_of(folder, memory_bytes))

    with pytest.raises(ConfigError, match=words):
        worker.start(lambda progress: None)

    worker.close()


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "auto"),
        ("cpu", "torch-compile"),
        ("hpu-emulator", "auto"),
        pytest.param("hpu-emulator", "torch-compile", marks=pytest.mark.slow),
    ],
)
def test_the_named_launches_are_profiled_instead_of_serving(
    device: str, mode: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "trace.json"
    settings = ExecutionConfig(
        mode=mode, profile_prompt="1,32,2", profile_decode="2,5", profiler=str(path)
    )
    config = dataclasses.replace(
        config_of(folder, 128 * MIB), device=device, buckets=BucketConfig(), execution=settings
    )
    worker = Worker(config)

    words = re.escape(f"the profile is in {path}: to serve, start")
    with pytest.raises(ProfileWritten, match=words):
        worker.start(lambda progress: None)

    worker.close()
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profile_prompt": "5,32"}, "'5,32': BATCH is 5, it must be between 1 and 4"),
        ({"profile_prompt": "1,129"}, "TOKENS is 129, it must be between 1 and 128"),
        ({"profile_prompt": "1,32,17"}, "BLOCKS is 17, it must be between 0 and 16"),
        ({"profile_decode": "2,1"}, "'2,1': BLOCKS is 1, it must be between 2 and 64"),
        ({"profile_decode": "0,9"}, "--profile-decode is '0,9': BATCH is 0"),
    ],
)
def test_a_launch_that_no_request_could_have_is_not_profiled(
    settings: dict[str, str], words: str, folder: Path
) -> None:
    config = dataclasses.replace(
        config_of(folder, 128 * MIB), device="cpu", execution=ExecutionConfig(**settings)
    )
    worker = Worker(config)

    with pytest.raises(ConfigError, match=words):
        worker.start(lambda progress: None)

    worker.close()
