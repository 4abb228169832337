"""The CPU back end."""

import ctypes
import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from config.engine import EngineConfig
from config.model.model_config import ModelConfig
from config.progress import unreported_step
from hpu.backends.cpu import PREFILL_TOKENS, CpuBackend, _make
from hpu.distributed.process_groups import SINGLE_RANK
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import ReplicatedLinear
from hpu.layers.moe import Experts, ExpertsSpec, MoE, TopKRouter


def test_unwritten_zeros_take_no_memory() -> None:
    backend, process = CpuBackend(num_threads=1), psutil.Process()
    before = process.memory_info().rss

    cache = backend.zeros((1024, 1024, 512), torch.bfloat16)
    cache[0, 0, 0] = 1.0

    grown = process.memory_info().rss - before
    assert cache.numel() * cache.element_size() == 1024**3
    assert grown < 64 << 20


def test_zeros_have_the_requested_dtype_and_shape() -> None:
    backend = CpuBackend(num_threads=1)

    made = backend.zeros((2, 0, 3), torch.float32), backend.zeros((2, 3), torch.int64)

    assert [(t.shape, t.dtype) for t in made] == [
        ((2, 0, 3), torch.float32),
        ((2, 3), torch.int64),
    ]
    assert not made[1].any()
    assert made[1].data_ptr() % 64 == 0


def test_a_copy_to_the_host_keeps_its_values_when_the_source_changes() -> None:
    backend = CpuBackend(num_threads=1)
    source = torch.ones(3)

    copy = backend.to_host(source)
    source.fill_(2.0)

    assert copy.tolist() == [1.0, 1.0, 1.0]


def test_the_requested_number_of_threads_computes() -> None:
    before = torch.get_num_threads()

    CpuBackend(num_threads=before + 1)

    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before + 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_a_warm_server_keeps_freed_memory_and_returns_it_when_idle() -> None:
    # Run in a new process: memory that other tests have freed would change the result.
    told = subprocess.run(
        [sys.executable, "-c", _ROUNDS],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    warm, freed, at_rest = json.loads(told.stdout)

    # Well below the parameters' 60 MiB.
    assert warm < 6 << 20
    assert freed > 30 << 20
    assert at_rest > 30 << 20


_ROUNDS = """
import ctypes, json, resource, statistics
import psutil
from hpu.backends.cpu import CpuBackend

BLOCKS, SIZE = 4, 15 << 20
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
held = (ctypes.c_void_p * BLOCKS)()

def mapped():
    "Bytes that a typical round of these blocks maps again."
    counts = []
    for _ in range(21):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # Use malloc directly: a small allocation of PyTorch above the blocks would retain them.
        for place in range(BLOCKS):
            held[place] = library.malloc(ctypes.c_size_t(SIZE))
            library.memset(ctypes.c_void_p(held[place]), 1, ctypes.c_size_t(SIZE))
        for block in held:
            library.free(ctypes.c_void_p(block))
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts) * resource.getpagesize()

backend, process = CpuBackend(num_threads=1), psutil.Process()
backend.end_warmup()
warm = mapped()
size = process.memory_info().rss
backend.begin_warmup()
freed = size - process.memory_info().rss
print(json.dumps([warm, freed, mapped()]))
"""


def test_kernels_are_opened_for_the_first_bfloat16_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def open_library(folder: Path, *_: Any, **__: Any) -> None:
        opened.append(folder)

    monkeypatch.setattr("hpu.backends.cpu.open_library", open_library)
    backend = CpuBackend(1, kernels=tmp_path)
    facts = ModelConfig("m", "LlamaForCausalLM", 64, 64, 64, 1, 4, 2, 16, max_position=64)

    for dtype in (torch.float32, torch.bfloat16):
        backend.dtype_for(dataclasses.replace(facts, dtype=str(dtype).removeprefix("torch.")))
        backend.prepare(model_of(640, 640, "cpu", dtype=dtype))
        backend.prepare_tower(nn.Linear(4, 4, dtype=dtype))
        backend.expect(1, 1)

        assert opened == ([] if dtype == torch.float32 else [tmp_path])

    make = partial(_make, ranks=SINGLE_RANK, on_step=unreported_step)
    for dtype, count in (("float32", 1), ("auto", 1), ("bfloat16", 2)):
        make(EngineConfig(model="m", dtype=dtype, cache_dir=str(tmp_path), num_threads=1))
        assert len(opened) == count


@pytest.mark.parametrize(
    ("by_token", "by_row", "num_tokens", "threads"),
    [(10**5, 10**6, 40, 1), (10**5, 10**6, 4000, 2), (10**8, 10**7, 1, 2)],
)
def test_a_quick_launch_is_not_split_among_threads(
    by_token: int, by_row: int, num_tokens: int, threads: int
) -> None:
    before = torch.get_num_threads()
    backend = CpuBackend(num_threads=2)
    backend.prepare(model_of(by_token, by_row))

    for _ in range(2):
        backend.expect(num_tokens, 1)
        backend.expect(10**6, 1)
    backend.expect(num_tokens, 1)

    used = torch.get_num_threads()
    torch.set_num_threads(before)
    assert used == threads


def test_the_prefill_size_of_a_moe_model_grows_with_its_inactive_experts() -> None:
    options = {"dtype": torch.float32, "device": torch.device("meta")}
    gate = ReplicatedLinear(10, 8, bias=False, **options)
    mixture = MoE(
        gate, TopKRouter(2, renormalize=True), Experts(ExpertsSpec(8, 10, 20, "silu"), **options)
    )
    dense, sparse = CpuBackend(num_threads=1), CpuBackend(num_threads=1)

    dense.prepare(model_of(1000, 1000))
    sparse.prepare(torch.nn.Sequential(mixture))

    assert dense.prefill_launch_tokens == PREFILL_TOKENS
    # The router has 80 weights per token, each of 8 experts has 600; a token uses 2 experts.
    expected = PREFILL_TOKENS * (80 + 8 * 600) / (80 + 2 * 600)
    assert sparse.prefill_launch_tokens == int(expected)


def model_of(by_token: int, by_row: int, device: str = "meta", **options: Any) -> torch.nn.Module:
    """A model with this many multiplications per token and per row of logits."""
    options = {"dtype": torch.float32, "device": torch.device(device), **options}
    return torch.nn.Sequential(
        ReplicatedLinear(10, by_token // 10, bias=False, **options),
        ParallelLMHead(10, by_row // 10, **options),
    )
