"""Restarts: when the number of KV blocks of an earlier start is reused."""

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import make_tiny

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings
from config.loading.env import recipe_cache_folder
from hpu.protocol import WorkerReady
from hpu.worker.previous_split import MAX_ENTRIES, PreviousSplit, SplitRecord, is_near
from hpu.worker.worker import Worker

MEMORY = 192 << 20
SPLIT = PreviousSplit(num_blocks=100, graph_bytes=7, profile_blocks=120)
DESCRIPTION = {"version": "1", "software": "1.22", "driver": "1.22", "max_model_len": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the recipe cache."""
    folder = tmp_path / "recipes"
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{folder},false,1024,false")
    return folder


class FirstStart(NamedTuple):
    """A start with an empty recipe cache."""

    ready: WorkerReady
    misses: int
    left: Path
    """Copy of the recipe cache and of the file beside it."""


@pytest.fixture(scope="module")
def first_start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> FirstStart:
    left = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{left}/recipes,false,1024,false")
        ready, (_, misses) = start(config_of(model))
    return FirstStart(ready, misses, left)


@pytest.fixture
def first(first_start: FirstStart, recipes: Path) -> FirstStart:
    """The first start's results, with its recipe cache and file restored to `recipes`."""
    shutil.copytree(first_start.left, recipes.parent, dirs_exist_ok=True)
    return first_start


def config_of(model: Path, memory_bytes: int = MEMORY, **settings: Any) -> EngineConfig:
    config = EngineConfig(
        str(model),
        device="hpu-emulator",
        num_threads=1,
        max_model_len=64,
        cache=CacheConfig(block_size=8, gpu_memory_utilization=0.2),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        buckets=BucketConfig(
            strategy="linear",
            prompt_batch=Range(1, 1, 1),
            prompt_query=Range(64, 64, 64),
            prompt_context=Range(0, 8, 8),
            decode_batch=Range(2, 2, 2),
            decode_blocks=Range(16, 16, 16),
        ),
        emulator=EmulatorSettings(memory_bytes=memory_bytes),
    )
    return replace(config, **settings)


def start(config: EngineConfig) -> tuple[WorkerReady, tuple[int, int]]:
    """The worker's report, and (hits, misses) of its recipe cache."""
    worker = Worker(config)
    try:
        ready = worker.start(lambda progress: None)
        counters = torch.hpu.emulated.counters  # type: ignore[attr-defined]
        return ready, (counters.recipe_hits.total(), counters.recipe_misses.total())
    finally:
        worker.close()


def restarts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("Restart:")]


@pytest.mark.parametrize("change", [-(1 << 18), 1 << 18])
def test_a_restart_with_slightly_different_memory_compiles_nothing(
    change: int, model: Path, first: FirstStart, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    second, (hits, misses) = start(config_of(model, MEMORY + change))

    num_blocks = first.ready.num_blocks
    assert first.misses > 0
    assert (misses, second.num_blocks) == (0, num_blocks)
    assert hits > first.misses
    (text,) = restarts(caplog)
    assert f"{num_blocks} KV blocks as in the last start" in text
    assert f"({num_blocks} fit)" not in text


@pytest.mark.slow
def test_the_profile_run_of_a_restart_has_the_same_shapes(
    recipes: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With 48 sequences of 4096 tokens, free memory limits the largest decode."""
    folder = tmp_path_factory.mktemp("long")
    model = make_tiny("llama", folder, num_hidden_layers=8, max_position_embeddings=4096)
    settings: dict[str, Any] = {
        "max_model_len": 4096,
        "cache": CacheConfig(block_size=128, gpu_memory_utilization=0.3),
        "scheduler": SchedulerConfig(max_num_seqs=48, max_num_batched_tokens=64),
        "enforce_eager": True,
    }
    start(config_of(model, **settings))

    _, (_, misses) = start(config_of(model, MEMORY - (1 << 19), **settings))

    assert misses == 0


@pytest.mark.parametrize("memory_bytes", [MEMORY * 3 // 4, MEMORY * 3 // 2])
def test_a_restart_with_very_different_memory_stores_a_new_number(
    memory_bytes: int, model: Path, first: FirstStart, caplog: pytest.LogCaptureFixture
) -> None:
    second, _ = start(config_of(model, memory_bytes))
    texts = restarts(caplog)
    third, (_, misses) = start(config_of(model, memory_bytes + (1 << 18)))

    before = first.ready.num_blocks
    assert (second.num_blocks < before) == (memory_bytes < MEMORY)
    assert len(texts) == 1 and f"{second.num_blocks} KV blocks, not {before}" in texts[0]
    assert (third.num_blocks, misses) == (second.num_blocks, 0)


def test_a_configured_number_takes_precedence_and_other_settings_have_separate_records(
    model: Path, first: FirstStart, recipes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_blocks = first.ready.num_blocks
    cache = CacheConfig(block_size=8, num_blocks=num_blocks - 5)

    configured, _ = start(config_of(model, cache=cache))
    fuller, _ = start(
        config_of(model, cache=CacheConfig(block_size=8, gpu_memory_utilization=0.204))
    )
    again, (_, misses) = start(config_of(model, MEMORY + (1 << 18), cache=cache))

    assert configured.num_blocks == again.num_blocks == num_blocks - 5
    assert fuller.num_blocks > num_blocks
    assert misses == 0
    assert restarts(caplog) == []
    (file,) = recipes.parent.glob("*.json")
    assert len(json.loads(file.read_text())["entries"]) == 3


def test_without_a_recipe_cache_no_record_is_stored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PT_HPU_RECIPE_CACHE_CONFIG", raising=False)
    start(config_of(model))
    folders = [recipe_cache_folder(config_of(model))]
    for words in (f"{tmp_path}/recipes,true,1024", f"{tmp_path}/recipes,false,1024"):
        monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", words)
        folders.append(recipe_cache_folder(config_of(model)))
    folders.append(recipe_cache_folder(config_of(model, device="cpu")))

    assert folders == [None, None, tmp_path / "recipes", None]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"format": 7, "entries": {}}',
        b'{"format": 1, "entries": {"a": {"num_blocks": 3}}}',
        b'{"format": 1, "entries": {"a": {"num_blocks": 3, "graph_bytes": -1, '
        b'"profile_blocks": 3}}}',
        b'{"format": 1, "entries": ["a"]}',
        b" " * (2 << 20),
        b"[" * 100_000,
    ],
    ids=["empty", "bytes", "list", "format", "field", "negative", "entries", "size", "depth"],
)
def test_a_file_of_another_kind_is_ignored_with_one_line_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "blocks.json"
    file.write_bytes(content)
    record = SplitRecord(file, DESCRIPTION)

    found = record.read()

    assert found is None
    (text,) = caplog.messages
    assert text.startswith(f"{file} is ignored: ")
    record.write(SPLIT)
    assert record.read() == SPLIT
    assert list(tmp_path.iterdir()) == [file]


def test_each_description_has_its_own_entry_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    def record(number: int) -> SplitRecord:
        return SplitRecord(tmp_path / "blocks.json", {**DESCRIPTION, "max_model_len": number})

    for number in range(MAX_ENTRIES + 2):
        record(number).write(replace(SPLIT, num_blocks=number))
        record(0).write(SPLIT)

    assert record(0).read() == SPLIT
    assert record(1).read() is record(2).read() is None
    assert record(3).read() == replace(SPLIT, num_blocks=3)


def test_an_unwritable_folder_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    record = SplitRecord(tmp_path / "file" / "blocks.json", DESCRIPTION)

    record.write(SPLIT)

    assert any("is not saved for the next start" in text for text in caplog.messages)


def test_a_record_of_another_user_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "blocks.json"
    record = SplitRecord(path, DESCRIPTION)
    record.write(SPLIT)
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root can give a file to another user")

    assert record.read() is None
    assert "it belongs to user 65534" in caplog.text


@pytest.mark.parametrize(
    ("fitting", "is_taken"), [(989, False), (990, True), (1000, True), (1050, True), (1051, False)]
)
def test_the_earlier_number_is_reused_within_a_tolerance(fitting: int, is_taken: bool) -> None:
    assert is_near(1000, fitting) == is_taken
