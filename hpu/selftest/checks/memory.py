"""Checks of what the runtime reports: memory, metrics, and the cache of compiled recipes."""

import os
from collections.abc import Iterator
from pathlib import Path

from hpu.selftest.base import Card, Check, Comparison, Fallback

MIB = 1 << 20
NUM_MIB = 64
SLACK_MIB = 8
FIELDS = {
    "graph_compilation": "TotalNumber",
    "cpu_fallback": "TotalNumber",
    "recipe_cache": "TotalMiss",
}
"""Metric -> a field that a server reads."""


def memory_stats(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    free = card.free_bytes()
    card.hpu.reset_peak_memory_stats()
    tensor = card.put(torch.zeros(NUM_MIB * MIB // 4))
    taken = (free - card.free_bytes()) // MIB
    what = f"{taken} MiB reported for a tensor of {NUM_MIB} MiB"
    yield Comparison(what, abs(taken - NUM_MIB) <= SLACK_MIB, True)
    del tensor
    left = (free - card.free_bytes()) // MIB
    yield Comparison(f"{left} MiB reported after it was freed", left <= SLACK_MIB, True)
    total = int(card.hpu.mem_get_info()[1])
    peak = int(card.hpu.max_memory_allocated()) // MIB
    yield Comparison(f"a peak of {peak} MiB", NUM_MIB <= peak <= total // MIB, True)


def metrics(card: Card) -> Iterator[Comparison]:
    for name, field in FIELDS.items():
        metric = card.metrics.metric_global(name)
        yield Comparison(f"metric {name}", bool(metric), True)
        yield Comparison(f"field {field} of {name}", field in dict(metric.stats()), True)
    count = _compilations(card)
    # A shape that no other check has.
    on_card = card.put(card.values(3, 7, 11)) * 1.125
    card.synchronize()
    found = _compilations(card) - count
    yield Comparison(f"{found} compilations of a new recipe", found >= 1, True)
    del on_card


def _compilations(card: Card) -> int:
    return int(dict(card.metrics.metric_global("graph_compilation").stats())["TotalNumber"])


def recipe_cache(card: Card) -> Iterator[Comparison]:
    folder = Path(card.recipe_folder)
    # Unlike all recipes of earlier runs.
    number = int.from_bytes(os.urandom(2), "big") + 3
    on_card = card.put(card.values(5, 13)) + number
    card.synchronize()
    yield Comparison("the folder of recipes exists", folder.is_dir(), True)
    stored = any(path.is_file() for path in folder.rglob("*"))
    yield Comparison("a compiled recipe is stored", stored, True)
    del on_card


CHECKS = (
    Check(
        name="memory-stats",
        assumption="mem_get_info and max_memory_allocated follow allocations and frees",
        source="HabanaAI/gaudi-pytorch-bridge, torch/hpu/memory.py",
        program=memory_stats,
        fallbacks=(Fallback("gpu-memory-utilization", ("0.8",)),),
        is_quick=True,
    ),
    Check(
        name="metrics",
        assumption="the metrics of compilations, fallbacks and recipes have the fields we read",
        source="HabanaAI/gaudi-pytorch-bridge, torch/hpu/metrics/metrics.py",
        program=metrics,
        fallbacks=(),
        is_quick=True,
    ),
    Check(
        name="recipe-cache",
        assumption="PT_HPU_RECIPE_CACHE_CONFIG=folder,false,8192 keeps recipes in that folder",
        source="vendor's documentation of runtime variables",
        program=recipe_cache,
        fallbacks=(Fallback("PT_HPU_RECIPE_CACHE_CONFIG", ("",)),),
    ),
)
