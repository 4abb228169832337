"""A worker's life cycle: its report at start, refusals, and clean-up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny
from worker_rig import BLOCK_SIZE, WorkerRig

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig
from config.errors import ConfigError
from config.execution import WarmupConfig
from config.model.model_config import ModelConfig
from hpu.backends.cpu import CpuBackend
from hpu.protocol import DECODE, PREFILL, WarmupProgress
from hpu.worker.load import choose_dtype
from hpu.worker.worker import Worker

LINEAR = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 2, 3),
    prompt_query=Range(64, 64, 128),
    prompt_context=Range(0, 32, 32),
    decode_batch=Range(4, 4, 8),
    decode_blocks=Range(32, 64, 96),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_a_worker_with_exact_buckets_is_ready_after_a_prefill_and_a_decode(folder: Path) -> None:
    rig = WorkerRig(folder)

    ready = rig.ready

    rig.worker.close()
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (96, BLOCK_SIZE, 512)
    assert (ready.vocab_size, ready.device, ready.dtype) == (320, "cpu", "float32")
    assert ready.buckets == []
    # Keys and values of two layers with two heads of 16 in float32, including the pad block.
    assert ready.kv_bytes == 97 * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4
    assert ready.weight_bytes > 0 and ready.load_s > 0 and ready.warmup_s > 0
    assert ready.total_bytes > ready.kv_bytes
    warmed = [p for p in rig.progress if p.stage == "warmup"]
    assert warmed[-1] == WarmupProgress("warmup", 3, 3)
    assert any(p.stage == "load" and p.done == p.total for p in rig.progress)


def test_every_prepared_bucket_runs_before_the_first_plan(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    rig = WorkerRig(folder, buckets=LINEAR)

    rig.worker.close()
    assert {phase for phase, *_ in rig.ready.buckets} == {PREFILL, DECODE}
    last = rig.progress[-1]
    assert last.done == last.total > len(rig.ready.buckets)
    lines = [line for line in caplog.messages if line.startswith("Warmup finished")]
    assert len(lines) == 1 and f"{len(rig.ready.buckets)} buckets" in lines[0]


def test_a_prepared_table_gives_the_tokens_of_an_exact_table(folder: Path) -> None:
    said = []
    for steps, buckets in (((1, 1, 1), None), ((3, 128, 96), LINEAR)):
        rig = WorkerRig(folder, steps=steps, buckets=buckets)
        rig.admit(0, list(range(20, 50)))
        rig.admit(1, [44, 45, 46])
        rig.prefill({0: None, 1: None})
        rig.step()
        rig.run([0, 1], 9)
        said.append([rig.requests[req_index].sampled for req_index in (0, 1)])
        rig.worker.close()

    assert said[0] == said[1]


def test_a_step_reports_the_times_of_launches_and_host(folder: Path) -> None:
    rig = WorkerRig(folder)
    rig.admit(0, [30, 31, 32])
    rig.admit(1, [33])
    rig.prefill({0: None})
    rig.prefill({1: None})

    result = rig.step()

    rig.worker.close()
    assert len(result.seconds) == 2
    assert all(seconds > 0 for seconds in result.seconds)
    assert 0 < result.host_s < 60
    assert result.counters == {}


def test_a_plan_without_launches_gets_a_result(folder: Path) -> None:
    rig = WorkerRig(folder)
    rig.admit(0, [30, 31, 32])

    result = rig.step()

    rig.worker.close()
    assert (result.step, result.tokens, result.seconds) == (0, [], [])


def test_a_result_can_be_polled_before_it_is_awaited(folder: Path) -> None:
    rig = WorkerRig(folder)
    rig.admit(0, [30, 31, 32])
    rig.prefill({0: None})

    before = rig.worker.has_result()
    rig.submit()
    after = rig.worker.has_result()

    rig.worker.close()
    assert (before, after) == (False, True)


def test_closing_twice_is_harmless(folder: Path) -> None:
    rig = WorkerRig(folder)

    rig.worker.close()
    rig.worker.close()

    assert not rig.worker.has_result()


def test_a_cache_that_holds_no_full_context_is_refused_at_start(folder: Path) -> None:
    config = EngineConfig(
        str(folder), device="cpu", cache=CacheConfig(block_size=8, num_blocks=63), num_threads=1
    )

    with pytest.raises(ConfigError, match="--max-model-len to 504"):
        Worker(config).start(lambda progress: None)


def test_a_context_longer_than_the_checkpoints_is_served_with_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = WorkerRig(folder, max_model_len=600, allow_long_max_model_len=True)
    rig.admit(0, list(range(20, 270)) * 2 + [30] * 10)

    rig.prefill({0: 255})
    rig.prefill({0: None})
    rig.step()
    rig.run([0], 8)

    rig.worker.close()
    assert rig.ready.max_model_len == 600
    assert len(rig.requests[0].sampled) == 9 and min(rig.requests[0].sampled) >= 0
    (warning,) = [text for text in caplog.messages if "longer than" in text]
    assert "context of 600 tokens is longer than the 512 that the checkpoint" in warning


def test_a_checkpoint_keeps_its_dtype_only_if_the_device_is_fast_with_it() -> None:
    backend = CpuBackend(num_threads=1)
    backend.fast_dtypes = (torch.float32,)
    backend.default_dtype = torch.float32
    facts = ModelConfig("m", "LlamaForCausalLM", 64, 64, 64, 1, 4, 2, 16, max_position=64)

    chosen = [
        choose_dtype(asked, replace(facts, dtype=own), backend)
        for asked, own in (
            ("auto", "float32"),
            ("auto", "bfloat16"),
            ("bfloat16", "float32"),
        )
    ]

    assert chosen == [torch.float32, torch.float32, torch.bfloat16]


def test_a_worker_that_pads_nothing_leaves_no_bucket_for_later(folder: Path) -> None:
    rig = WorkerRig(folder, warmup=WarmupConfig(mode="background"))

    warmed = rig.worker.idle()

    rig.worker.close()
    assert (rig.ready.num_deferred, warmed) == (0, None)


def test_a_worker_without_warm_up_serves_requests(folder: Path) -> None:
    said = []
    for mode in ("full", "skip"):
        rig = WorkerRig(folder, warmup=WarmupConfig(mode=mode))
        rig.admit(0, list(range(20, 50)))
        rig.prefill({0: None})
        rig.step()
        rig.run([0], 4)
        said.append(rig.requests[0].sampled)
        rig.worker.close()

    assert said[0] == said[1]
    assert not [p for p in rig.progress if p.stage == "warmup"]
