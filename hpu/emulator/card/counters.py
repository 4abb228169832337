"""Counters of a program's device operations, and its misuses with the caller's line."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from hpu.emulator.settings import EmulatorConfig, Misuse

LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
MAX_MISUSES = 10_000


class MisuseRecord(NamedTuple):
    """A misuse; `line` is the caller's `file:line`."""

    kind: str
    op: str
    line: str


def caller_line() -> str:
    """`file:line` of the innermost frame outside torch and the emulator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(slots=True)
class EmulatorCounters:
    """Counts since the emulator was installed. Keys of `counts` are compilations, captures,
    replays, launches, syncs, fallbacks, ungraphed (calls), traces (graphs for hpu_backend),
    eager_ops (ops outside of lazy segments and compiled regions), event_waits, launch_joins,
    upload_waits, input_copies, base_versions (copies for writes to views) and the kinds of misuses.
    `misuses` lists the first MAX_MISUSES."""

    config: EmulatorConfig
    counts: Counter[str] = field(default_factory=Counter)
    misuses: list[MisuseRecord] = field(default_factory=list)
    fallback_ops: Counter[str] = field(default_factory=Counter)
    compile_us: int = 0
    recipes: list[tuple[str, int]] = field(default_factory=list)
    """(signature, microseconds) of each compilation."""
    recipe_hits: Counter[str] = field(default_factory=Counter)
    recipe_misses: Counter[str] = field(default_factory=Counter)

    def misuse(self, kind: str, text: str, op: str = "") -> None:
        """Count a misuse; strict mode raises Misuse, unless the kind is tolerated."""
        self.counts[kind] += 1
        line = caller_line()
        if len(self.misuses) < MAX_MISUSES:
            self.misuses.append(MisuseRecord(kind, op, line))
        if self.config.strict and kind not in self.config.tolerated:
            raise Misuse(kind, text, op, line)
