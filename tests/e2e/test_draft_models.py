"""Drafts of a draft model compared with the same engine without drafts: float32, greedy or seeded,
with chunks, prefix hits, preemptions, and requests that arrive and finish."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import MIXED, PROMPTS, ROOMY, SHAPE, choices, run
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from config.errors import ConfigError
from config.params.sampling import SamplingParams
from gaudiserve import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary of `folder` and different weights: its drafts are wrong."""
    folder = tmp_path_factory.mktemp("other")
    return make_tiny("qwen3", folder, hidden_size=32, num_hidden_layers=1)


def drafts(drafter: Path, **keys: Any) -> dict[str, Any]:
    method = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 4}
    return {"speculative_config": {**method, "adaptive": False, **keys}}


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    return choices(run(folder, MIXED)[0])


def test_all_drafts_of_the_target_itself_are_accepted(folder: Path) -> None:
    expected, _ = run(folder, **ROOMY)

    outputs, stats = run(folder, **ROOMY, **drafts(folder))

    counts = stats.spec_decode
    assert choices(outputs) == choices(expected)
    # All drafts are accepted except drafts after the last requested token.
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 100


@pytest.mark.parametrize("drafter", ["folder", "other"])
def test_drafts_of_a_model_change_no_token(
    folder: Path, drafter: str, plain: list[Any], request: pytest.FixtureRequest
) -> None:
    outputs, stats = run(folder, MIXED, **drafts(request.getfixturevalue(drafter)))

    assert choices(outputs) == plain
    assert stats.preemptions > 0
    assert stats.spec_decode["num_draft_tokens"] > 100


def test_the_drafter_is_rolled_back_and_starts_again_after_preemptions(folder: Path) -> None:
    expected, _ = run(folder)

    outputs, stats = run(folder, **drafts(folder))

    counts = stats.spec_decode
    assert choices(outputs) == choices(expected)
    assert stats.preemptions > 0
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 100


def test_drafts_of_a_nan_token_change_no_token(folder: Path, tmp_path: Path) -> None:
    target, drafter, poison = tmp_path / "target", tmp_path / "drafter", 200
    for copy in (target, drafter):
        shutil.copytree(folder, copy)
        tensors = load_file(copy / "model.safetensors")
        tensors["model.embed_tokens.weight"][poison] = torch.nan
        if copy == drafter:
            # Make the drafter propose only the poison token.
            tensors["lm_head.weight"] *= 0.01
            tensors["lm_head.weight"][poison] = 10 * tensors["model.norm.weight"]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    bias = {poison: -100.0}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=bias)
    expected, _ = run(target, params)

    outputs, stats = run(target, params, **drafts(drafter))

    assert choices(outputs) == choices(expected)
    assert stats.spec_decode["num_draft_tokens"] > 40


def test_a_prefix_that_the_target_has_cached_is_computed_by_the_drafter(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    single = SamplingParams(temperature=0, max_tokens=1)
    flags = {**SHAPE, **ROOMY}
    with LLM(str(folder), **flags) as llm:
        expected = choices(llm.generate(PROMPTS, params, use_tqdm=False))

    with LLM(str(folder), **flags, **drafts(folder)) as llm:
        # These requests end before the drafter runs.
        llm.generate(PROMPTS, single, use_tqdm=False)
        before = llm._client.stats
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm._client.stats

    assert choices(outputs) == expected
    assert before.spec_decode.get("num_draft_tokens", 0) == 0
    counts = stats.spec_decode
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 40


def test_a_draft_model_on_the_compiled_decoder_changes_no_token(folder: Path) -> None:
    # Without preemptions: a recomputed token is rounded differently in a prompt.
    roomy: dict[str, Any] = {**ROOMY, "dtype": "bfloat16", "max_num_batched_tokens": 512}
    expected, _ = run(folder, **roomy)

    outputs, stats = run(folder, **roomy, **drafts(folder))

    assert choices(outputs) == choices(expected)
    assert stats.spec_decode["num_accepted_tokens"] > 100


def test_a_drafter_as_slow_as_the_target_is_hardly_used(folder: Path) -> None:
    expected, _ = run(folder, **ROOMY)

    outputs, stats = run(folder, **ROOMY, **drafts(folder, adaptive=True))

    assert choices(outputs) == choices(expected)
    assert stats.spec_decode.get("num_draft_tokens", 0) < 20


def test_a_drafter_stops_at_the_end_of_its_context(folder: Path) -> None:
    expected, _ = run(folder, **ROOMY)

    outputs, stats = run(folder, **ROOMY, **drafts(folder, max_model_len=40))

    assert choices(outputs) == choices(expected)
    counts = stats.spec_decode
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 0


@pytest.mark.slow
def test_tensor_parallel_ranks_draft_the_same_tokens(folder: Path, plain: list[Any]) -> None:
    flags = {"tensor_parallel_size": 2, "compare_ranks": True}

    outputs, stats = run(folder, MIXED, **flags, **drafts(folder, draft_tensor_parallel_size=2))

    assert choices(outputs) == plain
    assert stats.spec_decode["num_accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("keys", "flags", "error"),
    [
        ({"model": "/no/such"}, {}, "model of --speculative-config: no such file or folder"),
        ({"draft_tensor_parallel_size": 3}, {}, "is 3 and --tensor-parallel-size is 1"),
    ],
)
def test_incompatible_draft_models_are_refused_at_start(
    folder: Path, keys: dict[str, Any], flags: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        run(folder, **flags, **drafts(folder, **keys))


def test_a_draft_model_with_another_vocabulary_is_refused_at_start(
    folder: Path, tmp_path: Path
) -> None:
    other = make_tiny("llama", tmp_path, vocab_size=400)

    with pytest.raises(ConfigError, match=r"has 400 tokens in its vocabulary, and .* has 320"):
        run(folder, **drafts(other))


def test_suffix_drafts_from_earlier_requests_are_refused_with_stages_on_cards(folder: Path) -> None:
    suffix = {"speculative_config": {"method": "suffix"}, "pipeline_parallel_size": 2}

    with pytest.raises(ConfigError, match=r"cached_requests is 10000 and --pipeline-parallel-size"):
        run(folder, device="hpu-emulator", dtype="bfloat16", **suffix)
