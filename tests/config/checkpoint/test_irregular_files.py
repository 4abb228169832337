"""FIFOs, devices, folders and broken links in a checkpoint are errors, not missing files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from tiny_models import make_tiny

from config.checkpoint.safetensors_files import folder_shapes
from config.engine import EngineConfig
from config.errors import CheckpointError, ConfigError
from config.model.read_config import read_model_config
from config.model.sentence_transformers import read_sentence_config
from config.startup_checks import check_checkpoint
from server.text.tokenizer_files import read_text_files


@contextmanager
def _in_place_of(file: Path, kind: str) -> Iterator[None]:
    """Put a FIFO, a device, a folder or a broken link in place of `file`."""
    before = file.read_bytes() if file.exists() else None
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"device": "/dev/zero", "broken link": "nowhere"}[kind])
    try:
        yield
    finally:
        file.rmdir() if kind == "folder" else file.unlink()
        if before is not None:
            file.write_bytes(before)


def test_a_file_that_is_not_regular_is_not_taken_for_a_missing_file(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    names = (
        *("config.json", "generation_config.json", "hf_quant_config.json", "modules.json"),
        *("model.safetensors", "model.safetensors.index.json", "tokenizer.json"),
        *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
        *("chat_template.json", "processor_config.json"),
    )
    taken = []
    for name, kind in product(names, ("fifo", "device", "folder", "broken link")):
        with _in_place_of(folder / name, kind):
            try:
                check_checkpoint(EngineConfig(model=str(folder), device="cpu"), str(folder))
                read_sentence_config(str(folder))
                read_text_files(str(folder), tmp_path / "cache")
                taken.append((name, kind))
            except ConfigError as error:
                assert name in str(error)

    assert not taken


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_truncated_file_is_an_error_of_the_checkpoint_not_of_the_settings(
    name: str, tmp_path: Path
) -> None:
    """An engine that is restarted meanwhile tries again."""
    folder = make_tiny("llama", tmp_path / "model")
    os.truncate(folder / name, (folder / name).stat().st_size // 2)

    with pytest.raises(CheckpointError, match=name):
        folder_shapes(Path(read_model_config(str(folder)).path))
