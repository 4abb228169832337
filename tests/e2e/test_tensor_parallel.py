"""Tensor-parallel workers in separate processes: the tokens of a single worker, on the CPU and on
the emulated card, and the end of a group whose worker dies."""

import os
import signal
import time
from typing import Any

import pytest
from live import own_workers
from tiny_models import make_tiny

from config.errors import ConfigError, EngineDied
from gaudiserve import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": list(range(10, 31))}, {"prompt_token_ids": [40, 41]}]
SAMPLING = [
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True),
]
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "block_size": 16}
CARD: dict[str, Any] = {
    **CPU,
    "device": "hpu-emulator",
    "emulator_strict": True,
    # Few buckets, because both cards warm up each bucket. The longer prompt has two chunks.
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "prompt_bs_bucket_max": 1,
    "num_gpu_blocks_override": 12,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2))


def answers(llm: LLM) -> list[list[int]]:
    """Token ids of every prompt with every kind of sampling."""
    prompts = [prompt for prompt in PROMPTS for _ in SAMPLING]
    outputs = llm.generate(prompts, SAMPLING * len(PROMPTS), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    with LLM(folder, **CPU) as llm:
        return answers(llm)


def test_two_ranks_on_the_cpu_give_the_tokens_of_a_single_rank(
    folder: str, expected: list[list[int]]
) -> None:
    with LLM(folder, **CPU, tensor_parallel_size=2, compare_ranks=True) as llm:
        assert answers(llm) == expected


def test_two_ranks_with_several_decodes_per_step_give_the_tokens_of_a_single_rank(
    folder: str, expected: list[list[int]]
) -> None:
    with LLM(
        folder, **CPU, tensor_parallel_size=2, compare_ranks=True, num_scheduler_steps=4
    ) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize(
    "mode",
    ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)],
)
def test_two_emulated_cards_give_the_tokens_of_a_single_card_and_compile_nothing(
    mode: str, folder: str, expected: list[list[int]]
) -> None:
    with LLM(
        folder, **CARD, execution_mode=mode, tensor_parallel_size=2, compare_ranks=True
    ) as llm:
        found = answers(llm)
        compilations = llm._client.stats.compilations

    assert found == expected
    assert {k: n for k, n in compilations.items() if k.endswith(".serving") and n} == {}


def test_heads_that_the_ranks_do_not_divide_are_an_error_with_both_numbers(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"4 query heads, and 3 .* works with 1, 2, 4"):
        LLM(folder, **CPU, tensor_parallel_size=3)


def test_a_killed_rank_ends_the_group_within_seconds(folder: str) -> None:
    with LLM(folder, **CPU, tensor_parallel_size=2) as llm:
        victim = own_workers()[1]
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDied, match=rf"worker 1 \(process {victim}\) was killed by SIGK"):
            answers(llm)
        assert time.monotonic() - start < 30
