"""Checks of captured graphs."""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hpu.selftest.base import BFLOAT16, Card, Check, Comparison, Fallback

if TYPE_CHECKING:
    from torch import Tensor

BRIDGE = "HabanaAI/gaudi-pytorch-bridge"
OTHER_MODE = Fallback("execution-mode", ("torch-compile", "lazy", "eager"))
KEEP_TENSORS = Fallback("PT_HPUGRAPH_DISABLE_TENSOR_CACHE", ("0",))
LESS_MEMORY = Fallback("gpu-memory-utilization", ("0.8",))
MIB = 1 << 20


def _fill(targets: "Iterable[Tensor]", *hosts: "Tensor") -> None:
    for target, host in zip(targets, hosts, strict=True):
        target.copy_(host)


def _written(card: Card, number: int) -> "tuple[Tensor, Tensor]":
    """Rows that call `number` writes to a cache of 32 rows, and their slots."""
    return card.values(4, 8, seed=number), card.torch.arange(number, 32, 8).int()


def replay(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    weight = card.values(16, 16, seed=1)
    # Some cards multiply no float32 matrices.
    on_card = card.put(weight.bfloat16())
    graph = card.graph(lambda x: torch.relu(x @ on_card) + 1)
    given = card.put(card.values(4, 16).bfloat16())
    for number in range(3):
        rows = card.values(4, 16, seed=number + 2)
        given.copy_(rows.bfloat16())
        expected = torch.relu(rows @ weight) + 1
        yield Comparison(f"call {number} on new values", graph(given), expected, BFLOAT16)


def other_inputs(card: Card) -> Iterator[Comparison]:
    hosts = [card.values(4, 16, seed=seed) for seed in range(2)]
    tensors = [card.put(host) for host in hosts]
    graph = card.graph(lambda x: x * 3 + 1)
    for number in (0, 1, 0, 1):
        expected = hosts[number] * 3 + 1
        yield Comparison(f"a replay on tensor {number} of two", graph(tensors[number]), expected)


def writes(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    expected = torch.zeros(32, 8)
    cache = card.put(expected)

    def write(rows: "Tensor", slots: "Tensor") -> "Tensor":
        cache.index_copy_(0, slots, rows)
        return cache.index_select(0, slots) * 2

    graph = card.graph(write)
    given = [card.put(host) for host in _written(card, 0)]
    for number in range(4):
        rows, slots = _written(card, number)
        _fill(given, rows, slots)
        expected.index_copy_(0, slots.long(), rows)
        yield Comparison(f"rows of call {number}", graph(*given), rows * 2)
        # Reuse memory that the graph has freed.
        card.put(card.values(256, 256)).add_(1)
    yield Comparison("the cache after all calls", cache, expected)


def outputs(card: Card) -> Iterator[Comparison]:
    double, triple = card.graph(lambda x: x * 2), card.graph(lambda x: x * 3)
    first, second = card.values(4, 16, seed=1), card.values(4, 16, seed=2)
    given, other = card.put(first), card.put(second)
    double(given)
    triple(other)
    found, found_later = double(given), triple(other)
    yield Comparison("an output after a replay of another graph", found, first * 2)
    yield Comparison("the output of that graph", found_later, second * 3)


def views(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    table = card.values(16, 4, seed=1)
    on_card = card.put(table)

    def read(packed: "Tensor") -> "tuple[Tensor, Tensor]":
        rows, slots = packed[:6].view(2, 3), packed[6:14].view(2, 4)
        return on_card.index_select(0, rows.flatten()).sum(1).view(2, 3), slots + 1

    graph = card.graph(read)
    given = card.put(torch.zeros(16, dtype=torch.int32))
    for number in range(3):
        packed = (torch.arange(16) * (number + 1) % 16).int()
        given.copy_(packed)
        sums, slots = graph(given)
        expected = table.index_select(0, packed[:6].long()).sum(1).view(2, 3)
        yield Comparison(f"a view at the start of the input, call {number}", sums, expected)
        yield Comparison(f"a view at an offset, call {number}", slots, packed[6:14].view(2, 4) + 1)


def slices(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    expected = torch.zeros(32, 8)
    cache = card.put(expected)

    def write(rows: "Tensor", slots: "Tensor") -> "Tensor":
        cache.index_copy_(0, slots, rows)
        return cache[8:24] * 2

    graph = card.graph(write)
    given = [card.put(host) for host in _written(card, 0)]
    for number in range(3):
        rows, slots = _written(card, number)
        _fill(given, rows, slots)
        expected.index_copy_(0, slots.long(), rows)
        found = graph(*given)
        yield Comparison(f"a slice of the cache, call {number}", found, expected[8:24] * 2)


def state_updates(card: Card) -> Iterator[Comparison]:
    """A graph reads rows before it writes them, as for the states of Mamba 2 and gated DeltaNet and
    for the blocks of a sliding window."""
    states = card.values(6, 2, 3, 4, seed=1)
    on_card = card.put(states)

    def update(indices: "Tensor", rows: "Tensor", is_fresh: "Tensor") -> "Tensor":
        own = on_card.index_select(0, indices).masked_fill(is_fresh, 0.0)
        own = own * 0.5 + rows
        on_card.index_copy_(0, indices, own)
        return own + 1

    graph = card.graph(update)
    torch = card.torch
    given = [
        card.put(torch.zeros(2, dtype=torch.int32)),
        card.put(torch.zeros(2, 2, 3, 4)),
        card.put(torch.zeros(2, 1, 1, 1, dtype=torch.bool)),
    ]
    # The first call captures the graph and runs it; later calls replay it.
    written = [(4, 1), (1, 3), (4, 3), (0, 4)]
    for number, indices in enumerate(written):
        rows = card.values(2, 2, 3, 4, seed=number + 2)
        is_fresh = torch.tensor([number == 2, False]).view(2, 1, 1, 1)
        chosen = torch.tensor(indices)
        _fill(given, chosen.int(), rows, is_fresh)
        own = states.index_select(0, chosen).masked_fill(is_fresh, 0.0)
        expected = own * 0.5 + rows
        states.index_copy_(0, chosen, expected)
        yield Comparison(f"states of call {number}", graph(*given), expected + 1)
    yield Comparison("all states after the calls", on_card, states)


def cache_views(card: Card) -> Iterator[Comparison]:
    """A cache is written by slot and read by block through a view."""
    torch = card.torch
    expected = torch.zeros(32, 8)
    cache = card.put(expected)

    def write(rows: "Tensor", slots: "Tensor", blocks: "Tensor") -> "Tensor":
        cache.index_copy_(0, slots, rows)
        return cache.view(8, 4, 8).index_select(0, blocks) * 2

    graph = card.graph(write)
    given = [card.put(host) for host in (*_written(card, 0), torch.arange(3).int())]
    for number in range(4):
        rows, slots = _written(card, number)
        blocks = torch.tensor([number, 7 - number, 2]).int()
        _fill(given, rows, slots, blocks)
        expected.index_copy_(0, slots.long(), rows)
        wanted = expected.view(8, 4, 8).index_select(0, blocks.long()) * 2
        yield Comparison(f"blocks of call {number}", graph(*given), wanted)


def sampling(card: Card) -> Iterator[Comparison]:
    """Operators of the sampler in a graph without the tensor cache."""
    torch = card.torch

    def function(scores: "Tensor") -> "tuple[Tensor, Tensor]":
        values, ids = scores.topk(8, dim=-1)
        sums = values.sort(dim=-1, descending=True).values.cumsum(-1)
        return sums, ids.gather(-1, (sums > 0).sum(-1, keepdim=True) - 1)

    graph = card.graph(function)
    given = card.put(torch.zeros(2, 128))
    for number in range(3):
        scores = card.unequal(2, 128, seed=number)
        given.copy_(scores)
        found = graph(given)
        # Reuse memory that the graph has freed.
        card.put(card.values(256, 256)).add_(1)
        for what, own, expected in zip(("sums", "ids"), found, function(scores), strict=True):
            yield Comparison(f"{what} of call {number}", own, expected)


def after_failure(card: Card) -> Iterator[Comparison]:
    rows = card.values(4, 16)
    given = card.put(rows)

    def function(x: "Tensor") -> "Tensor":
        raise RuntimeError(f"the check stops a capture of {(x * 2).shape}")

    # The unfinished graph is destroyed together with the wrapper and the error.
    with contextlib.suppress(RuntimeError):
        card.graph(function)(given)
    gc.collect()
    card.synchronize()
    small = card.graph(lambda x: x + 1)
    yield Comparison("a graph after a capture that failed", small(given), rows + 1)
    yield Comparison("its replay", small(given), rows + 1)
    yield Comparison("a launch after it", given * 3, rows * 3)


def marks(card: Card) -> Iterator[Comparison]:
    def function(x: "Tensor") -> "Tensor":
        doubled = x * 2
        card.mark()
        return doubled + 1

    graph = card.graph(function)
    given = card.put(card.values(4, 16))
    for number in range(2):
        rows = card.values(4, 16, seed=number)
        given.copy_(rows)
        yield Comparison(f"call {number} with a mark inside", graph(given), rows * 2 + 1)


def memory(card: Card) -> Iterator[Comparison]:
    given = card.put(card.values(1024, 1024))
    before = card.free_bytes()
    graph = card.graph(lambda x: tuple(x + number for number in range(6)))
    kept = graph(given)
    taken = before - card.free_bytes()
    what = f"{taken >> 20} MiB reported for a graph with {len(kept) * 4} MiB of outputs"
    yield Comparison(what, taken >= 16 * MIB, True)


CHECKS = (
    Check(
        name="graph-replay",
        assumption="a captured graph computes what its function computes",
        source=f"{BRIDGE}, torch/hpu/graphs.py",
        program=replay,
        fallbacks=(OTHER_MODE,),
        is_quick=True,
    ),
    Check(
        name="graph-inputs",
        assumption="a graph without tensor cache may be replayed on other tensors",
        source=f"{BRIDGE}, backend/habana_device/HPUGraph.cpp (replayV3)",
        program=other_inputs,
        fallbacks=(KEEP_TENSORS,),
        needs=("graph-replay",),
        is_quick=True,
    ),
    Check(
        name="graph-cache-writes",
        assumption="without tensor cache, a KV cache that a graph writes stays valid",
        source="vllm-project/vllm-gaudi, docs/configuration/env_variables.md",
        program=writes,
        fallbacks=(KEEP_TENSORS,),
        needs=("graph-replay", "cache-writes"),
        is_quick=True,
    ),
    Check(
        name="graph-outputs",
        assumption="outputs are valid until the graph's next replay",
        source=f"{BRIDGE}, torch/hpu/graphs.py",
        program=outputs,
        fallbacks=(OTHER_MODE,),
        needs=("graph-replay",),
        is_quick=True,
    ),
    Check(
        name="graph-views",
        assumption="a captured function may make views of its input",
        source=f"{BRIDGE}, habana_lazy/lazy_executor.cpp",
        program=views,
        fallbacks=(OTHER_MODE,),
        needs=("graph-replay",),
        is_quick=True,
    ),
    Check(
        name="graph-cache-slices",
        assumption="a capture may write the KV cache and read a slice",
        source="vllm-project/vllm-gaudi, vllm_gaudi/extension/cache_ops.py",
        program=slices,
        fallbacks=(Fallback("contiguous-pa", ("off",)),),
        needs=("graph-cache-writes",),
    ),
    Check(
        name="graph-state-updates",
        assumption="a capture may read rows, then write them",
        source="vllm-project/vllm-gaudi, vllm_gaudi/ops/hpu_gdn_pytorch.py",
        program=state_updates,
        fallbacks=(OTHER_MODE,),
        needs=("graph-cache-writes",),
    ),
    Check(
        name="graph-cache-views",
        assumption="a capture may write the KV cache and read views",
        source="vllm-project/vllm-gaudi, vllm_gaudi/extension/cache_ops.py",
        program=cache_views,
        fallbacks=(OTHER_MODE,),
        needs=("graph-cache-writes",),
    ),
    Check(
        name="graph-sampler",
        assumption="graphs of the sampler need no tensor cache",
        source="vllm-project/vllm-gaudi, docs/configuration/env_variables.md",
        program=sampling,
        fallbacks=(KEEP_TENSORS,),
        needs=("graph-replay", "sampler-operators"),
    ),
    Check(
        name="graph-failures",
        assumption="after a failed capture, a small capture makes launches run",
        source=f"{BRIDGE}, backend/habana_device/HPUGraph.cpp",
        program=after_failure,
        fallbacks=(OTHER_MODE,),
        needs=("graph-replay",),
    ),
    Check(
        name="graph-marks",
        assumption="a hook may call mark_step inside a capture",
        source="vllm-project/vllm-gaudi, vllm_gaudi/v1/worker/hpu_model_runner.py",
        program=marks,
        fallbacks=(Fallback("config-hidden-layers", ("1000",)),),
        needs=("graph-replay",),
        is_quick=True,
    ),
    Check(
        name="graph-memory",
        assumption="mem_get_info includes the memory of graphs",
        source="vllm-project/vllm-gaudi, vllm_gaudi/extension/profiler.py",
        program=memory,
        fallbacks=(LESS_MEMORY,),
        needs=("graph-replay", "memory-stats"),
    ),
)
