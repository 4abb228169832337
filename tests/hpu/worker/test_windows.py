"""Sliding-window layers with window-sized caches in a worker: memory, reuse of an index with steps
in flight, sleep, and the log lines that name the cache form."""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny
from two_prompts import PROMPTS, greedy, working_wide
from worker_rig import BLOCK_SIZE, WorkerRig

RINGS = 10
"""Rings of 8 requests, the runner and padding."""


@pytest.fixture(scope="module", params=["gpt_oss", "llama4_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def caches(rig: WorkerRig) -> list[int]:
    """Number of key slots of each layer."""
    model = rig.worker.loaded.model
    return [len(layer.attn.caches[0]) for layer in model.attention_layers]  # type: ignore[union-attr]


def test_the_cache_of_a_window_is_as_large_as_the_window(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with working_wide(folder) as rig:
        expected, whole = greedy(rig), rig.ready.kv_bytes
        assert set(caches(rig)) == {97 * BLOCK_SIZE}

    with caplog.at_level("INFO"), working_wide(folder, prefix_caching=False) as rig:
        assert greedy(rig) == expected
        # A window of 9 or a chunk of 7 takes two blocks.
        assert caches(rig) == [RINGS * 2 * BLOCK_SIZE, 97 * BLOCK_SIZE]
        assert rig.ready.kv_bytes == whole // 2 * (97 + RINGS * 2) // 97
        rig.sleep(1)
        rig.worker.wake_up(lambda progress: None)
        assert greedy(rig) == expected

    assert re.search(r"Window caches: \d+\.\d\d [KM]iB for the windows of 8 requests", caplog.text)


def test_an_index_is_used_again_while_the_last_decode_is_in_flight(folder: Path) -> None:
    with working_wide(folder, prefix_caching=False) as rig:
        expected = greedy(rig)[0]
        rig.admit(0, [7, 7, 7, 9] * 9)
        rig.prefill({0: None})
        rig.step()
        rig.decode([0])
        rig.submit()
        rig.free(0)
        rig.admit(0, PROMPTS[0])
        rig.prefill({0: 40})
        rig.submit()
        rig.prefill({0: None})
        rig.submit()
        for _ in range(3):
            rig.collect()
        rig.run([0], 12)

        found = rig.free(0)

    assert found[-13:] == expected


@torch.inference_mode()
def test_scrubbing_clears_non_finite_values_of_blocks_and_rings(folder: Path) -> None:
    with working_wide(folder, prefix_caching=False) as rig:
        expected = greedy(rig)
        model = rig.worker.loaded.model
        for layer in model.attention_layers:  # type: ignore[union-attr]
            for cache in layer.attn.caches:
                cache[: 2 * BLOCK_SIZE] = torch.nan
        cache = rig.worker.serving.components.cache
        cache.scrub([0, 1])
        cache.scrub_rings(0)

        assert greedy(rig) == expected
        for layer in model.attention_layers:  # type: ignore[union-attr]
            assert all(cache.isfinite().all() for cache in layer.attn.caches)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"prefix_caching": True}, "prefix caching is on: --no-enable-prefix-caching"),
        ({"num_blocks": 19}, "windows for 8 requests (max-num-seqs) leave no room"),
    ],
)
def test_the_log_has_the_reason_why_full_contexts_are_cached(
    settings: dict[str, int], why: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"prefix_caching": False, "max_model_len": 128, **settings}
    with caplog.at_level("INFO"), working_wide(folder, **given) as rig:
        assert len(set(caches(rig))) == 1

    assert caplog.text.count("cache the whole context, because " + why) == 1


def test_a_model_with_only_windowed_layers_keeps_full_caches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny("mistral", tmp_path, sliding_window=9)
    with caplog.at_level("INFO"), working_wide(folder, prefix_caching=False) as rig:
        assert set(caches(rig)) == {97 * BLOCK_SIZE}

    assert "because all layers have a window" in caplog.text
