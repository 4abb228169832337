"""Prepared buckets, their order, and the message when memory does not suffice."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from captured_card import GRAPH_BYTES, REFUSED, CapturedCard
from tiny_models import make_tiny

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.execution import WarmupConfig
from config.model.read_config import read_model_config
from config.traffic import read_traffic
from hpu.bucketing.bucket_table import BucketTable
from hpu.models.decoder import Decoder
from hpu.profiling.diagnostics import Diagnostics
from hpu.protocol import DECODE, PREFILL, WarmupProgress
from hpu.runner.counters import Counters
from hpu.runner.graph_cache import GraphCache
from hpu.runner.model_runner import ModelRunner
from hpu.sampling.sampler import GREEDY
from hpu.warmup.order import by_use, order_buckets
from hpu.warmup.warmup import Warmup
from hpu.worker.build import make_runner, make_sampler
from hpu.worker.load import load

BUCKETS = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 2, 2),
    prompt_query=Range(32, 32, 64),
    prompt_context=Range(0, 32, 32),
    decode_batch=Range(2, 2, 4),
    decode_blocks=Range(32, 32, 64),
)


class Rig(NamedTuple):
    """A completed warm-up and the objects that it used."""

    warmup: Warmup
    graphs: GraphCache
    runner: ModelRunner
    card: CapturedCard
    counters: Counters
    table: BucketTable
    buckets: list[tuple[int, int, int, int]]
    """Buckets that a launch can use."""
    ready: list[tuple[int, int, int, int]]
    progress: list[WarmupProgress]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def warmed(folder: Path, card: CapturedCard, *, graph_bytes: int = 1 << 20, **settings: Any) -> Rig:
    config = EngineConfig(
        str(folder),
        dtype="float32",
        max_model_len=256,
        cache=CacheConfig(block_size=8, num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_prefill_batch=4),
        buckets=BUCKETS,
        warmup=WarmupConfig(**settings),
    )
    counters = Counters()
    progress: list[WarmupProgress] = []
    with torch.inference_mode():
        loaded = load(config, read_model_config(config.model), None, card, lambda _: None)
        assert isinstance(loaded.model, Decoder)
        loaded.model.register_forward_pre_hook(card.refuse)
        sampler, table = make_sampler(loaded), loaded.bucket_table(40)
        parts = make_runner(
            loaded, sampler, counters, num_blocks=40, captures=True, graph_bytes=graph_bytes
        )
        runner, graphs = parts.runner, parts.graphs
        assert isinstance(runner, ModelRunner)
        warmup = Warmup(runner, graphs, parts.input_buffers, card, config.warmup, Diagnostics())
        ready = warmup.start(table, progress.append)
    return Rig(warmup, graphs, runner, card, counters, table, table.reachable, ready, progress)


def tokens_of(bucket: tuple[int, int, int, int]) -> tuple[int, int]:
    return bucket[1:3]


def phase_of(rig: Rig, phase: int) -> list[tuple[int, int, int, int]]:
    return [bucket for bucket in rig.buckets if bucket[0] == phase]


def test_every_bucket_is_captured_in_the_order_of_its_use_and_replayed(
    folder: Path, tmp_path: Path
) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"prompt_tokens": 60, "output_tokens": 30}\n' * 8)

    rig = warmed(folder, CapturedCard(), traffic=str(traffic))

    used = by_use(rig.table, rig.buckets, read_traffic(str(traffic)))
    order = sorted(used, key=lambda bucket: bucket[0] == DECODE)
    assert rig.card.captured == [tokens_of(bucket) for bucket in order]
    assert rig.card.captured[0] == (1, 64)
    assert rig.card.replays >= len(rig.buckets)
    assert rig.ready and sorted(rig.ready) == rig.buckets
    assert rig.graphs.stage == "serving" and rig.card.is_settled
    assert rig.counters.total("graphs") == len(rig.buckets)


def test_graphs_are_captured_in_the_vendors_orders_on_request(folder: Path) -> None:
    rig = warmed(folder, CapturedCard(), prompt_order="min_tokens", decode_order="max_bs")

    prompts = order_buckets(phase_of(rig, PREFILL), "min_tokens", 8)
    decodes = order_buckets(phase_of(rig, DECODE), "max_bs", 8)
    assert rig.card.captured == [tokens_of(bucket) for bucket in prompts + decodes]


def test_progress_counts_every_step_of_the_warm_up_up_to_the_total(folder: Path) -> None:
    rig = warmed(folder, CapturedCard())

    done = [progress.done for progress in rig.progress]
    assert done == list(range(rig.progress[0].total + 1))
    assert len(done) > 2 * len(rig.buckets)
    assert rig.progress[1].left_s > 0 and rig.progress[-1].left_s == 0


def test_buckets_beyond_the_graph_budget_are_logged_and_run_without_a_graph(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = warmed(
        folder,
        CapturedCard(),
        graph_bytes=6 * GRAPH_BYTES,
        graph_prompt_ratio=0.5,
        prompt_order="min_tokens",
        decode_order="max_bs",
    )

    assert len(rig.card.captured) == 6
    assert sorted(rig.ready) == rig.buckets
    (text,) = [text for text in caplog.messages if "prompt buckets have no graph" in text]
    for flag in ("--graph-reserved-mem (now 0.1)", "--graph-prompt-ratio (now 0.5)"):
        assert flag in text
    left_out = [bucket for bucket in rig.ready if not rig.graphs.has_graph(bucket)]
    caplog.clear()
    with torch.inference_mode():
        rig.runner.warm_up(left_out[0], GREEDY)
    assert not caplog.messages  # The bucket has run before, so nothing is compiled.
    assert rig.counters.total("compilations.prefill.serving") == 0


def test_unused_graph_memory_of_a_phase_is_given_to_the_other_phase(folder: Path) -> None:
    for ratio in (0.95, 0.05):
        rig = warmed(folder, CapturedCard(), graph_bytes=60 * GRAPH_BYTES, graph_prompt_ratio=ratio)

        assert len(rig.buckets) < 60
        assert rig.counters.total("graphs") == len(rig.buckets)


def test_a_full_card_ends_the_captures_and_keeps_all_buckets(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = warmed(folder, CapturedCard(capacity=3))

    assert len(rig.card.captured) == 3
    assert sorted(rig.ready) == rig.buckets
    texts = [text for text in caplog.messages if "have no graph" in text]
    assert len(texts) == 2
    assert all("memory is full" in text and "--gpu-memory-utilization" in text for text in texts)


def test_a_bucket_that_cannot_run_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = warmed(folder, CapturedCard(most_tokens=63))

    lost = set(rig.buckets) - set(rig.ready)
    assert lost and all(bucket[1] * bucket[2] == 64 for bucket in lost)
    assert all(rig.graphs.has_graph(bucket) for bucket in rig.ready)
    assert any("does not fit" in text for text in caplog.messages)


def test_a_bucket_that_the_compiler_refuses_is_logged_and_dropped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = warmed(folder, CapturedCard(uncompilable=64))

    lost = set(rig.buckets) - set(rig.ready)
    assert lost and all(bucket[1] * bucket[2] == 64 for bucket in lost)
    assert all(rig.graphs.has_graph(bucket) for bucket in rig.ready)
    refusals = [text for text in caplog.messages if "cannot be compiled" in text]
    assert len(refusals) == len(lost) and all(REFUSED in text for text in refusals)
    assert not any("does not fit" in text for text in caplog.messages)


def test_a_graph_that_the_compiler_refuses_ends_no_other_captures(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = warmed(folder, CapturedCard(ungraphable=64))

    without = [bucket for bucket in rig.ready if not rig.graphs.has_graph(bucket)]
    assert sorted(rig.ready) == rig.buckets
    assert without and all(bucket[1] * bucket[2] == 64 for bucket in without)
    assert sum("runs without a graph: Graph compile" in text for text in caplog.messages) == len(
        without
    )


def test_a_phase_without_any_bucket_is_an_error_that_names_the_flag(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 of .* prompt buckets fit .*--max-num-batched-tokens"):
        warmed(folder, CapturedCard(most_tokens=10))


def test_a_background_warm_up_prepares_the_rest_in_sequence(folder: Path) -> None:
    rig = warmed(folder, CapturedCard(), mode="background")
    num_deferred = rig.warmup.num_deferred

    with torch.inference_mode():
        early, settled_early = list(rig.ready), rig.card.is_settled
        later = [rig.warmup.prepare_next() for _ in range(num_deferred)]

    assert 0 < len(early) < len(rig.buckets) and not settled_early
    assert all(len(buckets) == 1 for buckets in later)
    assert sorted(early + [bucket for (bucket,) in later]) == rig.buckets
    assert all(rig.graphs.has_graph(bucket) for bucket in rig.buckets)
    assert rig.card.is_settled
    assert rig.counters.total("compilations.prefill.serving") == 0


def test_traffic_decides_which_buckets_come_first(folder: Path, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"prompt_tokens": 20, "output_tokens": 3}\n' * 20)

    rig = warmed(folder, CapturedCard(), mode="background", traffic=str(traffic))

    assert (PREFILL, 1, 32, 0) in rig.ready
    assert rig.warmup.num_deferred > 0


def test_without_a_warm_up_nothing_runs_and_a_warning_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = warmed(folder, CapturedCard(), mode="skip")

    assert rig.card.captured == [] and sorted(rig.ready) == rig.buckets
    assert any("Warm-up is skipped" in text for text in caplog.messages)
    assert rig.graphs.on_demand


def test_log_lines_have_buckets_steps_graphs_and_the_total(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    rig = warmed(folder, CapturedCard())

    prompts = len(phase_of(rig, PREFILL))
    texts = caplog.messages
    batch, query, blocks = max(phase_of(rig, PREFILL), key=lambda b: (b[1] * b[2], b[3]))[1:]
    size = f"batch_size:{batch} query_len:{query} num_blocks:{blocks} free_mem:"
    assert any(text.startswith(f"[Warmup][Prompt][1/{prompts}] {size}") for text in texts)
    assert any(text.startswith(f"[Warmup][Graph/prompt][1/{prompts}] ") for text in texts)
    assert any(text.startswith(f"Graph/Prompt captured:{prompts} (100.0%) ") for text in texts)
    assert texts[-1].startswith("Warmup finished in ")
    record = next(record for record in caplog.records if "[Graph/prompt]" in record.getMessage())
    assert record.fields["number"] == 1 and record.fields["total"] == prompts
