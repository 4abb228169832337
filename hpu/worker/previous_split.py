"""Memory split of an earlier start, stored next to the cache of compiled recipes.

The number of KV blocks is part of compiled shapes, and the free memory varies slightly from start
to start. A restart with the same settings, software and card reuses the earlier number while it is
near the number that fits, so that all its recipes are in the cache.
"""

import dataclasses
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.cache_folder import read_cached, write_cached
from config.json_text import Json, parse_json
from config.loading import env
from config.setting import settings_of
from config.version import VERSION
from hpu.worker.load import LoadedModel

logger = logging.getLogger(__name__)

LESS, MORE = 0.01, 0.05
"""Accepted shortfall and excess of the number of blocks that fit now, as shares of the earlier
number. The unused margin of memory covers the shortfall; a larger excess is worth new recipes."""

MAX_ENTRIES = 64
"""Maximum number of stored entries; the least recently written entries are dropped."""

MAX_BYTES = 1 << 20
"""Larger files are not read: this module does not write them."""

FORMAT = 1

UNRELATED = frozenset(
    (
        "model",
        "revision",
        "download_dir",
        "seed",
        "cache_dir",
        "device",
        "executor",
        "num_threads",
        "cpu_kernels",
        "cpu_int8_activations",
        "emulator",
        "data_parallel",
        "compare_ranks",
        "policy",
        "max_inflight_steps",
        "num_scheduler_steps",
        "max_queue_len",
        "kv_offloading_dir",
        "kv_offloading_dir_size",
        "kv_offloading_delete_files",
    )
)
"""Settings that do not affect shapes on a card, or whose effect is already in the fingerprint."""


@dataclass(frozen=True, slots=True)
class PreviousSplit:
    """Results of an earlier start that determined its shapes."""

    num_blocks: int
    """Number of KV blocks without the pad block."""
    graph_bytes: int
    """Graph budget, which determines the captured buckets."""
    profile_blocks: int
    """Maximum number of blocks of the largest launches in the profile run."""


class SplitRecord:
    """Entry of a fingerprint in the file at `path`. If two processes write concurrently, an entry
    may be lost; the next start then compiles again."""

    def __init__(self, path: Path, description: Json) -> None:
        self._path = path
        self._versions = {name: description[name] for name in ("version", "software", "driver")}
        text = json.dumps(description, sort_keys=True, default=str)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def read(self) -> PreviousSplit | None:
        """Split of the last start; None if there is no entry."""
        found = self._entries().get(self._fingerprint)
        return None if found is None else _split_of(found)

    def write(self, split: PreviousSplit) -> None:
        """Store the split by atomically replacing the file. A failed write is logged."""
        entries = self._entries()
        entries.pop(self._fingerprint, None)
        entries[self._fingerprint] = {**self._versions, **dataclasses.asdict(split)}
        kept = dict(list(entries.items())[-MAX_ENTRIES:])
        text = json.dumps({"format": FORMAT, "entries": kept}, indent=1)
        try:
            write_cached(self._path, text.encode())
        except OSError as error:
            logger.warning("The number of KV blocks is not saved for the next start: %s", error)

    def _entries(self) -> Json:
        """Entries by fingerprint, newest last; empty if the file is missing or invalid."""
        try:
            content = parse_json(read_cached(self._path, MAX_BYTES))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
            entries = dict(content["entries"])
            for entry in entries.values():
                _split_of(entry)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s is ignored: %s", self._path, error)
            return {}
        return entries


def _split_of(entry: Any) -> PreviousSplit:
    """Parse an entry. Raises ValueError, TypeError or KeyError for an invalid entry."""
    values = [entry[field.name] for field in dataclasses.fields(PreviousSplit)]
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"an entry has the values {values}, they must be integers of at least 0")
    return PreviousSplit(*values)


def split_record(loaded: LoadedModel) -> SplitRecord | None:
    """Record of a loaded model; None without a persistent recipe cache."""
    folder = env.recipe_cache_folder(loaded.config)
    if folder is None:
        return None
    return SplitRecord(folder.with_name(f"{folder.name}-kv-blocks.json"), _describe(loaded))


def is_near(previous: int, fitting: int) -> bool:
    """Whether to reuse the earlier number of blocks `previous`, given that `fitting` blocks fit
    now."""
    return previous * (1 - LESS) <= fitting <= previous * (1 + MORE)


def _describe(loaded: LoadedModel) -> Json:
    """Everything that determines the shapes, and the versions that affect compilation."""
    backend = loaded.backend
    facts = dataclasses.asdict(loaded.model_config)
    # The raw fields, because json would write the object with its address.
    facts["fields"] = loaded.model_config.fields.raw
    # These fields do not affect shapes.
    del facts["path"], facts["generation_defaults"]
    return {
        "version": VERSION,
        "software": backend.software,
        "driver": backend.driver,
        "card": backend.card,
        "mode": env.hpu_mode(loaded.config).mode,
        "model": facts,
        "pooler": loaded.pooler,
        "dtype": loaded.dtype,
        "max_model_len": loaded.max_model_len,
        "block_size": loaded.block_size,
        "num_rings": loaded.num_rings,
        "weight_bytes": loaded.weight_bytes,
        "settings": _related(loaded.config),
    }


def _related(config: Any) -> Json:
    """Settings of a configuration, including nested configurations, by field name; without
    unrelated settings."""
    related: Json = {}
    settings = settings_of(config)
    for field in dataclasses.fields(config):
        facts = settings.get(field.name)
        if field.name in UNRELATED or (facts is not None and facts.group == "Diagnostics"):
            continue
        value = getattr(config, field.name)
        related[field.name] = _related(value) if dataclasses.is_dataclass(value) else value
    return related
