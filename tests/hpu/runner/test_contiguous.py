"""Decodes that read the cache as a slice give the tokens of decodes that gather their blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_tiny
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig
from config.errors import ConfigError
from config.execution import EmulatorSettings, ExecutionConfig
from hpu.backends.cpu import CpuBackend
from hpu.runner.kv_cache import reads_contiguously

PROMPTS = ([3, 5, 7, 9, 11] * 9, [8, 1, 2], [4, 4, 6, 1] * 5)
SLICES = ExecutionConfig(contiguous_pa=True)
TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(4, 4, 4),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 96, 96),
    decode_batch=Range(4, 4, 4),
    decode_blocks=Range(96, 96, 96),
)
LIMITS = {"max_num_seqs": 4, "max_model_len": 128}
"""Limits with which few buckets are added for the largest launches, and no sampler width."""


@contextmanager
def working(folder: Path, **settings: Any) -> Iterator[WorkerRig]:
    rig = WorkerRig(folder, prefix_caching=False, **settings)
    try:
        yield rig
    finally:
        rig.worker.close()


def greedy(rig: WorkerRig, *, packs: bool = False) -> list[list[int]]:
    """Tokens of whole and chunked prompts: requests decode in changing batches, a request leaves
    and returns with its tokens in other blocks, and another request reuses freed blocks. With
    `packs`, blocks are moved down in between, also while a step is in flight."""
    gone = []
    rig.admit(0, PROMPTS[0])
    rig.admit(1, PROMPTS[1])
    rig.prefill({0: 40, 1: None})
    rig.step()
    rig.prefill({0: None})
    rig.step()
    rig.run([1, 0], 4)
    rig.decode([1, 0])
    rig.submit()
    if packs:
        rig.pack()
    rig.decode([1, 0])
    rig.submit()
    rig.collect()
    rig.collect()
    rig.run([0, 1], 3)
    first = rig.free(1)
    rig.admit(3, PROMPTS[2])
    rig.prefill({3: None})
    rig.step()
    rig.run([0, 3], 5)
    gone.append(rig.free(0))
    tokens = [*PROMPTS[1], *first]
    rig.admit(2, tokens, num_prompt=len(PROMPTS[1]))
    if packs:
        rig.pack()
    rig.prefill({2: None})
    rig.step()
    rig.run([2, 3], 12)
    return [*gone, first + rig.free(2), rig.free(3)]


LATENT = [name for name in ("deepseek_v3",) if name in FAMILIES]
"""MLA families; empty for releases of transformers without deepseek_v3."""


@pytest.mark.parametrize("family", ["llama", "mistral", *LATENT])
@pytest.mark.parametrize("steps", [(1, 1, 1), (4, 64, 32)], ids=["exact", "coarse"])
@pytest.mark.parametrize("packs", [False, True], ids=["", "moved"])
def test_a_slice_gives_the_tokens_of_a_gather(
    family: str, steps: tuple[int, int, int], packs: bool, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    with working(folder) as gathering:
        expected = greedy(gathering)

    with working(folder, steps=steps, execution=SLICES) as slicing:
        found = greedy(slicing, packs=packs)

    assert not gathering.ready.contiguous and slicing.ready.contiguous
    assert found == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"execution": ExecutionConfig(mode="torch-compile")}, marks=pytest.mark.slow),
        {"emulator": EmulatorSettings(card="gaudi3", is_strict=True)},
    ],
    ids=["graphs", "compile", "strict-gaudi3"],
)
@pytest.mark.parametrize("family", ["qwen3", *LATENT])
def test_a_card_without_prefix_caching_reads_slices_and_gives_the_tokens_of_the_cpu(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    shape = {"buckets": TABLE, "steps": (4, 64, 96), "device": "hpu-emulator", **LIMITS}
    with working(folder, **shape, **settings) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        warm = counts["compilations"], counts["captures"]
        found = greedy(rig, packs=True)

    assert rig.ready.contiguous
    assert found == expected
    assert (counts["compilations"], counts["captures"]) == warm


@pytest.mark.parametrize(
    "settings",
    [
        {"execution": SLICES},
        {
            "buckets": TABLE,
            "steps": (4, 64, 96),
            "device": "hpu-emulator",
            "emulator": EmulatorSettings(is_strict=True),
        },
    ],
    ids=["cpu", "card"],
)
def test_nan_blocks_within_a_slice_affect_no_other_request(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path)
    with working(folder) as alone:
        alone.admit(0, PROMPTS[2])
        alone.prefill({0: None})
        alone.step()
        alone.run([0], 6)
        expected = alone.free(0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with working(folder, **settings) as rig:
        rig.admit(0, PROMPTS[2])
        rig.admit(1, [9] * 12)
        rig.prefill({0: None})
        rig.step()
        rig.prefill({1: None})
        broken = rig.step().tokens
        rig.run([0], 2)
        rig.run([1, 0], 2)
        rig.free(1)
        rig.run([0], 2)

    assert broken == [-1]
    assert rig.requests[0].sampled == expected


@pytest.mark.parametrize(
    ("prefix_caching", "asked", "gains", "expected"),
    [
        (False, None, True, True),
        (False, None, False, False),
        (False, True, False, True),
        (False, False, True, False),
        (True, None, True, False),
    ],
)
def test_contiguous_attention_is_used_if_it_helps_and_prefixes_are_not_shared(
    prefix_caching: bool, asked: bool | None, gains: bool, expected: bool
) -> None:
    backend = CpuBackend(1)
    backend.reads_contiguously = gains
    config = EngineConfig(
        "m",
        cache=CacheConfig(enable_prefix_caching=prefix_caching),
        execution=ExecutionConfig(contiguous_pa=asked),
    )

    assert reads_contiguously(config, backend) is expected


def test_slices_and_shared_prefixes_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="contiguous_pa and enable_prefix_caching are both on"):
        EngineConfig("m", execution=SLICES)
