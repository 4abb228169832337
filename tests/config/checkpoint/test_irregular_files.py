"""FIFOs, devices, folders and broken links in a checkpoint are errors, not missing files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from tiny_models import make_tiny

from config.engine import EngineConfig
from config.errors import ConfigError
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
