"""Recurrent states of requests in a worker: reuse of an index with steps in flight, memory,
settings."""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny
from two_prompts import PROMPTS, greedy, working, working_wide

from config.execution import WarmupConfig


@pytest.fixture(
    scope="module",
    params=["granitemoehybrid", "qwen3_next", pytest.param("lfm2", marks=pytest.mark.slow)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_an_index_is_used_again_while_the_last_decode_is_in_flight(folder: Path) -> None:
    with working_wide(folder) as rig:
        expected = greedy(rig)[0]
        rig.admit(0, [7, 7, 7, 9])
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

    # The decode in flight belonged to the previous request at this index.
    assert found[-13:] == expected


def test_tokens_do_not_depend_on_request_indices(folder: Path) -> None:
    with working_wide(folder) as rig:
        expected = greedy(rig)
        for req_index, prompt in ((6, PROMPTS[0]), (3, PROMPTS[1])):
            rig.admit(req_index, prompt)
        rig.prefill({6: 40, 3: None})
        rig.step()
        rig.prefill({6: None})
        rig.step()
        rig.run([3, 6], 12)

        found = [rig.free(6), rig.free(3)]

    assert found == expected


def test_disabled_prefix_caching_and_merged_prefill_are_logged_once_each(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), working_wide(folder, merged_prefill=True) as rig:
        limits = rig.ready.bucket_limits

    assert not limits.prefix_caching and not limits.merged_prefill
    assert caplog.text.count("Prefix caching is off: the model has recurrent layers") == 1
    assert caplog.text.count("Merged prefill is off: the model has recurrent layers") == 1
    assert re.search(r"States: \d+\.\d\d [KM]iB for 8 requests", caplog.text)


def test_states_are_counted_and_freed_during_sleep(folder: Path) -> None:
    with working_wide(folder) as rig:
        expected = greedy(rig)
        states = [tensor for layer in rig.worker.loaded.model.state_layers
                  for tensor in layer.state._tensors]  # fmt: skip
        # States of 8 requests, the runner and padding.
        assert {len(state) for state in states} == {10}
        num_bytes = sum(state.numel() * state.element_size() for state in states)
        keys = rig.worker.serving.components.cache.bytes  # type: ignore[union-attr]
        assert rig.ready.kv_bytes == keys + num_bytes

        rig.sleep(1)
        assert not any(layer.state._tensors for layer in rig.worker.loaded.model.state_layers)
        rig.worker.wake_up(lambda progress: None)

        assert greedy(rig) == expected


@pytest.mark.parametrize("mode", ["full", "skip"])
def test_a_card_gives_the_tokens_of_the_cpu_with_and_without_a_warm_up(
    mode: str, folder: Path
) -> None:
    """Without a warm-up, the buckets are not prepared; a launch that ran twice would update its
    states twice."""
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    with working(folder, device="hpu-emulator", warmup=WarmupConfig(mode=mode)) as rig:
        found = greedy(rig)
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]

    assert found == expected
    assert (counts["captures"] > 0) == (mode == "full")
