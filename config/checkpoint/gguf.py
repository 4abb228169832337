"""Converts GGUF files to Hugging Face folders in the cache folder."""

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from config.cache_folder import cache_errors, cache_path, check_own, check_room
from config.checkpoint.gguf_config import generation_config, model_config, pooling_files
from config.checkpoint.gguf_metadata import GgufFile, open_gguf
from config.checkpoint.gguf_tensors import Entry, model_entries, num_blocks
from config.checkpoint.gguf_tokenizer import tokenizer_files
from config.checkpoint.gguf_weights import stored_shapes, write_blocks, write_safetensors
from config.checkpoint.shapes import check_num_layers, check_shapes, weight_map_of
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import Fields
from config.model.model_config import BLOCKS, DTYPES, ModelConfig
from config.model.read_config import model_config_of, read_model_config
from config.owned_directory import OwnedDirectory
from config.progress import CONVERTING, Report, unreported
from config.whole_folders import is_whole, place_folder, write_json

logger = logging.getLogger(__name__)

_FORMAT = 3
"""Version of the conversion. Increase it when the result changes, so that older copies are not
used."""
_SAMPLE_BYTES = 2**20
_POLL_S, _BEAT_S, _STUCK_S = 0.2, 5.0, 60.0
_UNLISTED = ("config.json", "model.safetensors")
"""Files that a copy made by an earlier version must have to count as complete: such copies list no
file sizes."""
NO_SAMPLING: Mapping[str, float] = MappingProxyType({})


def converted(
    source: Path,
    cache: Path,
    *,
    dtype: str = "bfloat16",
    keep_blocks: bool = False,
    sampling: Mapping[str, float] = NO_SAMPLING,
    progress: bool = True,
    report: Report = unreported,
    check: Callable[[str], object] = read_model_config,
) -> Path:
    """The folder in `cache` with the converted `source`; created if it does not exist. With
    `keep_blocks` it also has the file BLOCKS. Its generation_config.json has the defaults in
    `sampling`, which GGUF files lack. `check` gets a folder with all files but the converted
    weights, before they are written.

    A folder appears only when its conversion is complete; a folder that lacks files, or has
    truncated files, is converted again. A second process waits for the conversion of the first;
    it converts the file itself if the first process ends, or is stuck for _STUCK_S. Raises
    ConfigError.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}, it must be one of {', '.join(DTYPES)}")
    suffix = "-blocks" if keep_blocks else ""
    name = f"{source.stem}-{dtype}{suffix}-{_fingerprint(source, sampling)}"
    target = cache_path(str(cache), "converted") / name
    if target.is_dir():
        check_own(target)
        if is_whole(target, _UNLISTED):
            return target
    report(CONVERTING, 0, 0)
    with ExitStack() as stack:
        stack.enter_context(cache_errors(target.parent, "the converted model"))
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.enter_context(_locked(target, report))
        if not is_whole(target, _UNLISTED):
            made = stack.enter_context(OwnedDirectory(".converting-", target.parent))
            fresh = Path(made, "model")
            fresh.mkdir()
            _convert(source, fresh, dtype, keep_blocks, sampling, progress, report, check)
            # A process that was stuck may have finished first.
            if not is_whole(target, _UNLISTED):
                place_folder(fresh, target)
    return target


def _fingerprint(source: Path, sampling: Mapping[str, float]) -> str:
    status = source.stat()
    digest = hashlib.sha256(f"{_FORMAT} {status.st_size} {status.st_mtime_ns}".encode())
    if sampling:
        digest.update(json.dumps(dict(sampling), sort_keys=True).encode())
    with source.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, status.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


@contextmanager
def _locked(target: Path, report: Report) -> Iterator[None]:
    """Hold the lock of `target`, unless the target is complete or the holder of the lock is stuck.
    The holder sets the time of the lock file every _BEAT_S. The kernel releases the lock when the
    holder dies."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(target.with_name(f"{target.name}.lock"), flags, 0o600)
    try:
        _wait_for(lock, target, report)
        ended = threading.Event()
        beat = threading.Thread(target=_beat, args=(lock, ended), name="beat", daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
    finally:
        os.close(lock)


def _wait_for(lock: int, target: Path, report: Report) -> None:
    """Wait until this process holds `lock`, `target` is complete, or the time of the file has not
    changed for _STUCK_S."""
    seen_ns, seen_s, is_logged = 0, time.monotonic(), False
    while not (_has_locked(lock) or is_whole(target)):
        if not is_logged:
            logger.info("Another process is converting the same file: waiting for it")
            is_logged = True
        report("waiting for another process that converts the same file", 0, 0)
        if (beat_ns := os.fstat(lock).st_mtime_ns) != seen_ns:
            seen_ns, seen_s = beat_ns, time.monotonic()
        if time.monotonic() - seen_s > _STUCK_S:
            logger.warning(
                "The process that converts the same file has stopped for %g s: it is converted "
                "here, too",
                _STUCK_S,
            )
            return
        time.sleep(_POLL_S)


def _has_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _beat(lock: int, ended: threading.Event) -> None:
    while True:
        # If the time cannot be set, a waiting process converts the file, too.
        with suppress(OSError):
            os.utime(lock)
        if ended.wait(_BEAT_S):
            return


def _convert(
    source: Path,
    folder: Path,
    dtype: str,
    keep_blocks: bool,
    sampling: Mapping[str, float],
    progress: bool,
    report: Report,
    check: Callable[[str], object],
) -> None:
    file = open_gguf(source)
    config = model_config(file, dtype)
    generation = {**generation_config(file), **sampling}
    # Check before writing gigabytes that no worker can load.
    _, entries = read_entries(file, config, generation, dtype)
    _check_room(folder.parent.parent, file, entries, keep_blocks)
    for name, content in (tokenizer_files(file) or {}).items():
        write_json(folder / name, content)
    for name, content in pooling_files(file).items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, content)
    write_json(folder / "generation_config.json", generation)
    # MTP layers are not converted.
    config.pop("num_nextn_predict_layers", None)
    write_json(folder / "config.json", config)
    if keep_blocks:
        write_blocks(entries, folder / BLOCKS)
    check(str(folder))
    write_safetensors(file, entries, folder / "model.safetensors", progress, report)


def read_entries(
    file: GgufFile, config: Json, generation: Json, dtype: str
) -> tuple[ModelConfig, list[Entry]]:
    """ModelConfig from `config` and `generation`, which were made from `file`, and the entries of
    the checkpoint. Raises ConfigError."""
    fields, defaults = Fields(config, file.path), Fields(generation, file.path)
    facts = model_config_of(str(file.path), fields, defaults)
    # Check before building a weight map, which could have 10^9 layers.
    check_num_layers(facts, num_blocks(file), file.path)
    weight_map = weight_map_of(facts)
    assert weight_map is not None, "the table of architectures has built-in models only"
    entries = model_entries(file, facts, weight_map, dtype)
    check_shapes(facts, stored_shapes(entries), file.path)
    return facts, entries


def _check_room(folder: Path, file: GgufFile, entries: list[Entry], keep_blocks: bool) -> None:
    needed = sum(entry.num_bytes for entry in entries)
    if keep_blocks:
        needed += sum(tensor.n_bytes for tensor in file.tensors.values())
    check_room(folder, needed, "the converted model")
