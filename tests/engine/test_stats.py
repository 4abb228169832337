"""engine/stats.py: counters and snapshots."""

from typing import Any

from engine.stats import MAX_SAMPLES, StepStats
from engine.transport.messages import EngineStats
from hpu.protocol import DECODE, PREFILL

GAUGES: dict[str, Any] = {
    "running": 1,
    "waiting": 2,
    "waiting_prompt_tokens": 3,
    "blocks_used": 4,
    "blocks_total": 5,
    "sleep": "awake",
}


def snapshot(stats: StepStats, *, with_samples: bool = True) -> EngineStats:
    return stats.snapshot(**GAUGES, with_samples=with_samples)


def test_launches_are_counted_by_phase_and_lookup_result() -> None:
    stats = StepStats()

    stats.count_launch("prefill", "hit", useful=10, padded=16, shape=(1, 16, 0))
    stats.count_launch("prefill", "fallback", useful=3, padded=3, shape=(1, 3, 0))
    stats.count_launch("decode", "hit", useful=2, padded=4, shape=(1, 4, 0))

    sent = snapshot(stats)
    assert sent.lookups == {"prefill.hit": 1, "prefill.fallback": 1, "decode.hit": 1}
    assert sent.useful_tokens == {"prefill": 13, "decode": 2}
    assert sent.padding_tokens == {"prefill": 6, "decode": 2}


def test_samples_are_sent_once_and_counters_accumulate() -> None:
    stats = StepStats()
    stats.count_step(12, [DECODE, PREFILL], [0.1, 0.2])

    peek = snapshot(stats, with_samples=False)
    first = snapshot(stats)
    second = snapshot(stats)

    assert peek.step_tokens == []
    assert first.step_tokens == [12]
    assert first.step_seconds == [(DECODE, 0.1), (PREFILL, 0.2)]
    assert second.step_tokens == [] and second.step_seconds == []
    assert second.steps == 1


def test_a_step_without_tokens_adds_no_sample() -> None:
    stats = StepStats()
    stats.count_step(0, [PREFILL], [0.1])

    sent = snapshot(stats)

    assert sent.step_tokens == [] and sent.steps == 1
    assert sent.step_seconds == [(PREFILL, 0.1)]


def test_a_snapshot_does_not_change_with_later_counts() -> None:
    stats = StepStats()
    stats.count_launch("decode", "hit", useful=1, padded=1, shape=(1, 1, 0))

    sent = snapshot(stats)
    stats.count_launch("decode", "hit", useful=1, padded=1, shape=(1, 1, 0))

    assert sent.lookups == {"decode.hit": 1}


def test_unread_samples_are_bounded() -> None:
    stats = StepStats()

    for _ in range(MAX_SAMPLES + 10):
        stats.count_step(1, [DECODE], [0.1])

    sent = snapshot(stats)
    assert len(sent.step_tokens) <= MAX_SAMPLES
    assert len(sent.step_seconds) <= MAX_SAMPLES


def test_worker_counters_replace_earlier_values() -> None:
    stats = StepStats(graph_bytes=7)

    stats.update_counters({"compilations.decode.warmup": 3.0, "graphs": 2.0, "unheard_of": 1.0})
    stats.update_counters({"compilations.decode.warmup": 4.0, "compile_seconds.warmup": 1.5})

    sent = snapshot(stats)
    assert sent.compilations == {"decode.warmup": 4}
    assert sent.compile_seconds == {"warmup": 1.5}
    assert (sent.graphs, sent.graph_bytes) == (2, 7)


def test_runtime_counters_are_sent_by_name() -> None:
    stats = StepStats()

    stats.update_counters({"recompilations": 2.0, "cpu_fallbacks": 3.0, "recipe_hits": 9.0})
    stats.update_counters({"recipe_misses": 1.0, "recipe_hits": 10.0})

    sent = snapshot(stats)
    assert (sent.recompilations, sent.cpu_fallbacks) == (2, 3)
    assert sent.recipes == {"hit": 10, "miss": 1}
