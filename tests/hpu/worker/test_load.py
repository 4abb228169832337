"""check_memory: weights and contexts that exceed memory are refused before they are allocated."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.model_config import MAX_POSITION
from config.model.read_config import read_model_config
from hpu.backends.base import Backend
from hpu.backends.select import select_backend
from hpu.worker.load import load


def _start(folder: Path, backend: Backend) -> None:
    config = EngineConfig(str(folder), device="cpu", dtype="float32")
    load(config, read_model_config(str(folder)), None, backend, lambda progress: None)


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return select_backend(EngineConfig(str(tmp_path), device="cpu", num_threads=1))


def test_a_context_that_the_machine_has_no_memory_for_is_refused_with_both_numbers(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path, max_position_embeddings=MAX_POSITION)
    monkeypatch.setattr("hpu.worker.load.usable_memory", lambda: (2**30, 2**31))

    with pytest.raises(ConfigError, match=r"for 16777216 tokens takes 4.00 GiB .* has 2.00 GiB"):
        _start(folder, backend)


def test_weights_that_the_device_has_no_memory_for_are_refused_with_both_numbers(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path)
    num_bytes = (folder / "model.safetensors").stat().st_size
    allocated: list[object] = []
    monkeypatch.setattr(backend, "memory", lambda: (num_bytes // 2, num_bytes // 2))
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: allocated.append(size))

    with pytest.raises(ConfigError, match=r"the weights in .* take .* [KM]iB, cpu has .* [KM]iB"):
        _start(folder, backend)

    assert allocated == []
