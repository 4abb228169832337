"""LoRAManager: reads of adapters to host memory."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from tiny_models import make_tiny
from worker_rig import WorkerRig

import hpu.lora.manager
from config.lora.adapter import load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config
from config.params.lora import LoRAConfig
from hpu.protocol import AdapterLoaded, DropAdapter, LoadAdapter
from hpu.worker.worker import Worker


def load_message(folder: Path, base: Path) -> LoadAdapter:
    modules = BaseModules(read_model_config(str(base)))
    loaded = load_adapter(AdapterFolder(str(folder)), modules, 16, ())
    return LoadAdapter(loaded.content, str(folder), "", "one")


def next_messages(worker: Worker, count: int) -> list[Any]:
    """Poll the worker for `count` messages: `on_message` only wakes a thread that waits for
    them."""
    messages: list[Any] = []
    deadline = time.monotonic() + 60
    while len(messages) < count and time.monotonic() < deadline:
        time.sleep(0.001)
        messages += worker.take_messages()
    return messages


@pytest.mark.parametrize("fails", [False, True])
def test_an_adapter_is_reported_when_its_read_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    base = make_tiny("llama", tmp_path / "base")
    folder = write_adapter(tmp_path / "one", base)
    message = load_message(folder, base)
    may_read = threading.Event()

    def read(*args: Any, **options: Any) -> Any:
        assert may_read.wait(60)
        if fails:
            raise OSError("no such file")
        return load_adapter(*args, **options)

    monkeypatch.setattr(hpu.lora.manager, "load_adapter", read)
    rig = WorkerRig(base, lora=LoRAConfig(enable_lora=True, max_loras=1))
    worker = rig.worker
    try:
        worker.handle(message)
        worker.handle(message)
        early = worker.take_messages()
        may_read.set()
        late = next_messages(worker, 2)

        error = "one cannot be read" if fails else None
        assert early == []
        assert late == [AdapterLoaded(message.content, error)] * 2
        manager = worker.loaded.lora
        assert list(manager._host) == ([] if fails else [message.content])
        worker.handle(message)
        assert next_messages(worker, 1) == late[:1]
        # Adapters take no memory while the worker sleeps.
        worker.sleep(1)
        assert not manager._host
    finally:
        worker.close()


def test_a_failed_read_drops_no_later_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny("llama", tmp_path / "base")
    folder = write_adapter(tmp_path / "one", base)
    message = load_message(folder, base)
    may_read = threading.Event()
    num_reads = 0

    def read(*args: Any, **options: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        assert may_read.wait(60)
        if num_reads == 1:
            raise OSError("no such file")
        return load_adapter(*args, **options)

    monkeypatch.setattr(hpu.lora.manager, "load_adapter", read)
    worker = WorkerRig(base, lora=LoRAConfig(enable_lora=True, max_loras=1)).worker
    try:
        worker.handle(message)
        worker.handle(DropAdapter(message.content))
        worker.handle(message)
        may_read.set()
        loaded = next_messages(worker, 2)

        assert [answer.error for answer in loaded] == ["one cannot be read", None]
        assert list(worker.loaded.lora._host) == [message.content]
    finally:
        worker.close()
