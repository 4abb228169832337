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
from two_prompts import greedy, working

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.execution import EAGER, HPU_GRAPHS, ExecutionConfig, ModeChoice, WarmupConfig
from config.model.read_config import read_model_config
from hpu.backends.gaudi import GaudiBackend
from hpu.models.decoder import Decoder
from hpu.profiling.diagnostics import Diagnostics
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
    """A card that records the token shapes of each forward pass, and whether the pass was only
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
        """Hook before the forward pass."""
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
        ready = Warmup(*pools, card, config.warmup, Diagnostics()).start(table, progress.append)
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


def test_buckets_are_compiled_without_a_forward_pass_on_request(folder: Path) -> None:
    card = CompilingCard()

    ready, progress, _ = warmed(folder, card, captures=False, mode="compile")

    ran = {shape for only, shape in card.passes if not only}
    assert sorted(shape for only, shape in card.passes if only) == sorted(b[1:3] for b in ready)
    # The largest bucket of each phase, and the smallest launch of each sampler width.
    assert ran == {(1, 64), (2, 1), (1, 1)}
    assert len({bucket[1:3] for bucket in ready}) > len(ran)
    assert [stage.done for stage in progress] == list(range(progress[0].total + 1))


def test_a_device_that_compiles_only_what_it_runs_runs_each_bucket(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = CompilingCard(refused=64)

    ready, _, _ = warmed(folder, card, mode="compile")

    assert not {bucket[1:3] for bucket in ready} - {s for only, s in card.passes if not only}
    assert any("--warmup is compile, and this device" in text for text in caplog.messages)


@pytest.mark.parametrize("mode", [HPU_GRAPHS, "torch-compile"])
def test_requests_after_a_warm_up_without_a_forward_pass_get_the_same_tokens(
    mode: str, folder: Path
) -> None:
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)
    late: dict[str, tuple[int, int]] = {}

    for kind in ("full", "compile"):
        with working(
            folder,
            device="hpu-emulator",
            execution=ExecutionConfig(mode=mode),
            warmup=WarmupConfig(mode=kind),
        ) as rig:
            counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
            before = counts["compilations"], counts["captures"]
            found = greedy(rig)
            late[kind] = counts["compilations"] - before[0], counts["captures"] - before[1]
        assert found == expected

    # A bucket that was only compiled counts as ready.
    assert late["compile"] == late["full"]


def test_warmup_compile_is_refused_without_compile_only_warmup() -> None:
    with pytest.raises(ConfigError, match="--warmup is compile and --compile-only-warmup is off"):
        WarmupConfig(mode="compile", compile_only=False)


def test_compile_only_can_be_disabled(folder: Path) -> None:
    card = CompilingCard()

    ready, _, _ = warmed(folder, card, compile_only=False)

    assert ready and not any(only for only, _ in card.passes)


def test_after_a_compiler_error_buckets_are_compiled_one_by_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = CompilingCard(refused=64)

    ready, progress, _ = warmed(folder, card)

    assert {bucket[0] for bucket in ready} == {PREFILL, DECODE}
    assert any("compiled one by one" in text and REFUSED in text for text in caplog.messages)
    assert progress[-1].done == progress[-1].total


@pytest.mark.parametrize("mode", ["full", "skip"])
@pytest.mark.parametrize("captures", [True, False])
def test_input_buffers_of_all_buckets_exist_before_the_first_request(
    folder: Path, captures: bool, mode: str
) -> None:
    ready, _, input_buffers = warmed(folder, CompilingCard(), captures=captures, mode=mode)

    kept = [input_buffers.get(bucket) for bucket in ready]
    input_buffers.drop_dynamic()
    assert [input_buffers.get(bucket) for bucket in ready] == kept
    assert all(buffers.is_static for buffers in kept)


def test_compile_only_mode_compiles_and_does_not_change_tensors() -> None:
    with emulated(strict=True) as emulator:
        backend = GaudiBackend(ExecutionConfig(), ModeChoice(HPU_GRAPHS, ""))
        x = torch.zeros(3, device="hpu")
        metrics = backend.runtime_metrics
        before = metrics.compilations()
        with backend.compile_only() as is_on:
            x.add_(7.0)
            copied = backend.to_host(x)
            backend.synchronize()

        assert is_on and copied.shape == (3,)
        assert x.tolist() == [0.0, 0.0, 0.0]
        compiled = metrics.compilations()
        x.add_(7.0)
        backend.synchronize()
        assert compiled > before and metrics.compilations() == compiled
        assert not emulator.counters.counts["compile_only_read"]
        backend.close()


@pytest.mark.parametrize(
    ("mode", "unknown"), [(HPU_GRAPHS, {"PT_COMPILE_ONLY_MODE"}), (EAGER, set[str]())]
)
def test_without_compile_only_mode_launches_are_executed(
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
