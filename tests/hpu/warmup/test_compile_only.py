"""Buckets are compiled before they run, on a device that can compile without executing."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_card import REFUSED, CapturedCard
from emulated import emulated
from tiny_models import make_tiny
from torch import nn

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EAGER, HPU_GRAPHS, ExecutionConfig, ModeChoice, WarmupConfig
from config.model.read_config import read_model_config
from hpu.backends.gaudi import GaudiBackend
from hpu.models.decoder import Decoder
from hpu.protocol import DECODE, PREFILL, Bucket, WarmupProgress
from hpu.runner.counters import Counters
from hpu.runner.input_buffers import InputBufferPool
from hpu.warmup.warmup import Warmup
from hpu.worker.build import make_runner, make_sampler
from hpu.worker.load import load

BUCKETS = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(32, 32, 64),
    prompt_context=Range(0, 8, 8),
    decode_batch=Range(1, 1, 2),
    decode_blocks=Range(8, 8, 16),
)


class CompilingCard(CapturedCard):
    """A card that notes the shapes of the tokens of each forward pass, and whether it was only
    compiled."""

    compiles = True

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.only_compiles = False
        self.passes: list[tuple[bool, tuple[int, ...]]] = []
        self._refused = refused

    @contextlib.contextmanager
    def compile_only(self) -> Iterator[bool]:
        self.only_compiles = True
        yield True
        self.only_compiles = False

    def note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A hook before the forward pass."""
        if self.only_compiles and inputs[0].numel() == self._refused:
            raise RuntimeError(REFUSED)
        self.passes.append((self.only_compiles, tuple(inputs[0].shape)))


def warmed(
    folder: Path, card: CompilingCard, *, captures: bool = True, **settings: Any
) -> tuple[list[Bucket], list[WarmupProgress], InputBufferPool[Any]]:
    """(usable buckets, progress, input buffers) of a warm-up."""
    config = EngineConfig(
        str(folder),
        dtype="float32",
        max_model_len=128,
        cache=CacheConfig(block_size=16, num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        buckets=BUCKETS,
        warmup=WarmupConfig(**settings),
    )
    progress: list[WarmupProgress] = []
    with torch.inference_mode():
        loaded = load(config, read_model_config(config.model), None, card, lambda _: None)
        assert isinstance(loaded.model, Decoder)
        loaded.model.register_forward_pre_hook(card.note)
        sampler, table = make_sampler(loaded), loaded.bucket_table(16)
        parts = make_runner(
            loaded, sampler, Counters(), num_blocks=16, captures=captures, graph_bytes=1 << 20
        )
        pools = parts.runner, parts.graphs, parts.input_buffers
        ready = Warmup(*pools, card, config.warmup, 16).start(table, progress.append)
    return ready, progress, parts.input_buffers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_every_bucket_is_compiled_after_the_largest_have_run_and_then_runs(folder: Path) -> None:
    card = CompilingCard()

    ready, progress, _ = warmed(folder, card)

    first = [only for only, _ in card.passes].index(True)
    compiled = [shape for only, shape in card.passes if only]
    assert {shape for _, shape in card.passes[:first]} == {(1, 64), (2, 1)}
    assert sorted(compiled) == sorted(bucket[1:3] for bucket in ready)
    run = [shape for only, shape in card.passes[first + len(compiled) :]]
    assert not set(compiled) - set(run)
    assert [stage.done for stage in progress] == list(range(progress[0].total + 1))


def test_nothing_is_only_compiled_where_it_is_turned_off(folder: Path) -> None:
    card = CompilingCard()

    ready, _, _ = warmed(folder, card, compile_only=False)

    assert ready and not any(only for only, _ in card.passes)


def test_an_error_of_the_compiler_ends_the_pass_and_the_next_pass_names_the_bucket(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = CompilingCard(refused=64)

    ready, progress, _ = warmed(folder, card)

    assert {bucket[0] for bucket in ready} == {PREFILL, DECODE}
    assert any("compiled one by one" in text and REFUSED in text for text in caplog.messages)
    assert progress[-1].done == progress[-1].total


@pytest.mark.parametrize("mode", ["full", "skip"])
@pytest.mark.parametrize("captures", [True, False])
def test_input_buffers_of_all_buckets_are_there_before_the_first_request(
    folder: Path, captures: bool, mode: str
) -> None:
    ready, _, input_buffers = warmed(folder, CompilingCard(), captures=captures, mode=mode)

    kept = [input_buffers.get(bucket) for bucket in ready]
    input_buffers.drop_dynamic()
    assert [input_buffers.get(bucket) for bucket in ready] == kept
    assert all(buffers.is_static for buffers in kept)


def test_the_mode_of_the_vendor_compiles_and_leaves_tensors_as_they_were() -> None:
    with emulated(strict=True) as emulator:
        backend = GaudiBackend(ExecutionConfig(), ModeChoice(HPU_GRAPHS, ""))
        x = torch.zeros(3, device="hpu")
        before = backend.compilations()
        with backend.compile_only() as is_on:
            x.add_(7.0)
            copied = backend.to_host(x)
            backend.synchronize()

        assert is_on and copied.shape == (3,)
        assert x.tolist() == [0.0, 0.0, 0.0]
        compiled = backend.compilations()
        x.add_(7.0)
        backend.synchronize()
        assert compiled > before and backend.compilations() == compiled
        assert not emulator.counters.counts["compile_only_read"]
        backend.close()


@pytest.mark.parametrize(
    ("mode", "unknown"), [(HPU_GRAPHS, {"PT_COMPILE_ONLY_MODE"}), (EAGER, set[str]())]
)
def test_without_the_mode_launches_are_executed(
    mode: str, unknown: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    lazy = mode == HPU_GRAPHS
    with emulated(lazy=lazy, strict=True, unknown_variables=frozenset(unknown)):
        backend = GaudiBackend(ExecutionConfig(), ModeChoice(mode, ""))
        x = torch.zeros(1, device="hpu")
        with backend.compile_only() as is_on:
            x.add_(7.0)

        assert not is_on and x.tolist() == [7.0]
        assert ("has no PT_COMPILE_ONLY_MODE" in caplog.text) == bool(unknown)
        backend.close()
