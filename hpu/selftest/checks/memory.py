"""Checks of the runtime's names, memory, metrics, and cache of compiled recipes."""

import os
from collections.abc import Iterator
from pathlib import Path

from hpu.gaudi_devices import OUT_OF_MEMORY
from hpu.selftest.base import Card, Check, Comparison, Fallback

MIB = 1 << 20
NUM_MIB = 64
SLACK_MIB = 8
NUM_PARTS = 32
FIELDS = {
    "graph_compilation": "TotalNumber",
    "cpu_fallback": "TotalNumber",
    "recipe_cache": "TotalMiss",
}
"""A field that a server reads, by metric."""
NAMES = {
    "core": ("mark_step",),
    "distributed.hccl": ("initialize_distributed_hpu",),
    "hpex.kernels": ("FusedSDPA", "RotaryPosEmbeddingMode", "apply_rotary_pos_emb"),
    "hpex.normalization": ("FusedRMSNorm",),
    "hpu": (
        *("Event", "Stream", "stream", "default_stream", "set_stream", "synchronize"),
        *("mem_get_info", "memory_allocated", "max_memory_allocated", "memory_stats"),
        *("reset_peak_memory_stats", "is_available", "current_device", "get_device_name"),
        *("manual_seed", "wrap_in_hpu_graph_func"),
    ),
    "hpu.metrics": ("metric_global",),
    "internal.bridge_config": ("env_setting",),
    "utils.internal": ("is_lazy",),
    "utils.experimental": ("_get_device_type", "synDeviceType"),
}
"""Names that the check looks for in lazy mode, by module of the vendor: the names that a server or
the self-test uses."""
EITHER = {
    "core": (
        ("hpu_inference_set_env", "hpu_set_env"),
        ("hpu_inference_initialize", "hpu_initialize"),
    ),
}
"""Groups of old and new names, by module of the vendor: a server uses an existing name."""


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


def out_of_memory(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    # Allocate in parts: a tensor of all memory may have too many elements for a recipe.
    part = int(card.hpu.mem_get_info()[1]) // NUM_PARTS
    held, refusal = [], ""
    try:
        for _ in range(NUM_PARTS + 1):
            held.append(torch.zeros(1024, part // 4096, device="hpu"))
            card.synchronize()
    except RuntimeError as error:
        refusal = str(error)
    held.clear()
    yield Comparison("more tensors than fit are refused", bool(refusal), True)
    is_known = any(word in refusal.lower() for word in OUT_OF_MEMORY)
    yield Comparison(f"a known text of full memory, in {refusal[:200]!r}", is_known, True)
    rows = card.values(4, 16)
    yield Comparison("a launch after it", card.put(rows) * 3, rows * 3)


def metrics(card: Card) -> Iterator[Comparison]:
    for name, field in FIELDS.items():
        metric = card.metrics.metric_global(name)
        yield Comparison(f"metric {name}", bool(metric), True)
        yield Comparison(f"field {field} of {name}", field in dict(metric.stats()), True)
    count, before = _compilations(card), _lookups(card)
    # A shape that no other check uses.
    on_card = card.put(card.values(3, 7, 11)) * 1.125
    card.synchronize()
    found = _compilations(card) - count
    yield Comparison(f"{found} compilations of a new recipe", found >= 1, True)
    lookups = _lookups(card) - before
    yield Comparison(f"{lookups} lookups of a new recipe", lookups >= 1, True)
    del on_card


def names(card: Card) -> Iterator[Comparison]:
    for module, words in NAMES.items():
        found = card.module(module)
        missing = [word for word in words if not hasattr(found, word)]
        missing += [
            " or ".join(group)
            for group in EITHER.get(module, ())
            if not any(hasattr(found, word) for word in group)
        ]
        yield Comparison(f"missing names of {module}", missing, [])


def _compilations(card: Card) -> int:
    return int(dict(card.metrics.metric_global("graph_compilation").stats())["TotalNumber"])


def _lookups(card: Card) -> int:
    """Number of recipe lookups, which the runtime counts with PT_HPU_ENABLE_CACHE_METRICS=1."""
    facts = dict(card.metrics.metric_global("recipe_cache").stats())
    return int(facts["TotalHit"]) + int(facts["TotalMiss"])


def recipe_cache(card: Card) -> Iterator[Comparison]:
    folder = Path(card.recipe_folder)
    # In inference mode the runtime appends the rank to the name of the folder.
    folders = [folder, Path(f"{folder}{card.rank}")]
    # A random constant, because an earlier run may have stored the recipe of a fixed constant.
    number = int.from_bytes(os.urandom(2), "big") + 3
    on_card = card.put(card.values(5, 13)) + number
    card.synchronize()
    yield Comparison("the folder of recipes exists", any(map(Path.is_dir, folders)), True)
    stored = any(path.is_file() for kept in folders for path in kept.rglob("*"))
    yield Comparison("a compiled recipe is stored", stored, True)
    del on_card


CHECKS = (
    Check(
        name="runtime-names",
        assumption="the vendor's modules have the expected names",
        source="HabanaAI/gaudi-pytorch-bridge, its Python package",
        program=names,
        fallbacks=(),
        is_quick=True,
    ),
    Check(
        name="memory-stats",
        assumption="mem_get_info and max_memory_allocated follow allocations",
        source="HabanaAI/gaudi-pytorch-bridge, torch/hpu/memory.py",
        program=memory_stats,
        fallbacks=(Fallback("gpu-memory-utilization", ("0.8",)),),
        is_quick=True,
    ),
    Check(
        name="out-of-memory",
        assumption="too large allocations fail with a known text",
        source="HabanaAI/gaudi-pytorch-bridge, backend/synapse_helpers (PT_DEVMEM)",
        program=out_of_memory,
        fallbacks=(Fallback("gpu-memory-utilization", ("0.8",)),),
        needs=("memory-stats",),
        limit_s=60.0,
    ),
    Check(
        name="metrics",
        assumption="metrics count compilations, fallbacks and recipes",
        source="HabanaAI/gaudi-pytorch-bridge, torch/hpu/metrics/metrics.py",
        program=metrics,
        fallbacks=(),
        is_quick=True,
    ),
    Check(
        name="recipe-cache",
        assumption="PT_HPU_RECIPE_CACHE_CONFIG keeps recipes in a folder",
        source="vendor's documentation of runtime variables",
        program=recipe_cache,
        fallbacks=(Fallback("PT_HPU_RECIPE_CACHE_CONFIG", ("",)),),
    ),
)
