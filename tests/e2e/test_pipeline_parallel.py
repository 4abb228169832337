"""Pipeline stages in separate processes: tokens and log-probabilities equal a single worker's, with
and without tensor parallelism, on the CPU and on the emulated card."""

import os
import re
import signal
import time
from typing import Any

import pytest
from live import own_workers
from tiny_models import make_tiny

from config.errors import ConfigError, EngineDied
from gaudiserve import LLM, SamplingParams
from server.offline.outputs import RequestOutput

PROMPTS = [
    {"prompt_token_ids": list(range(10, 55))},
    {"prompt_token_ids": [40, 41]},
    {"prompt_token_ids": [7] * 9},
]
SAMPLING = [
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, ignore_eos=True),
]
CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 16,
    # The first prompt is computed in several chunks.
    "max_num_batched_tokens": 20,
    "max_num_seqs": 8,
}
CARD: dict[str, Any] = {
    **CPU,
    "device": "hpu-emulator",
    "emulator_strict": True,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "prompt_bs_bucket_max": 1,
    "num_gpu_blocks_override": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    return str(make_tiny("llama", path, num_hidden_layers=3, tie_word_embeddings=True))


def answers(llm: LLM) -> list[RequestOutput]:
    """Outputs of every prompt with every kind of sampling."""
    prompts = [prompt for prompt in PROMPTS for _ in SAMPLING]
    return llm.generate(prompts, SAMPLING * len(PROMPTS), use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    """All log-probabilities, of prompts and of sampled tokens."""
    positions = [
        position
        for output in outputs
        for position in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ()))
        if position is not None
    ]
    return [position[token].logprob for position in positions for token in sorted(position)]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[RequestOutput]:
    with LLM(folder, **CPU) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("stages", "shards"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_stages_give_the_tokens_and_logprobs_of_a_single_worker(
    stages: int, shards: int, folder: str, expected: list[RequestOutput]
) -> None:
    with LLM(folder, **CPU, pipeline_parallel_size=stages, tensor_parallel_size=shards) as llm:
        found = answers(llm)
        # A second call checks that the steps continue correctly.
        again = answers(llm)

    assert tokens_of(found) == tokens_of(again) == tokens_of(expected)
    assert len(logprobs_of(expected)) > 100
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-4)


@pytest.mark.slow
def test_stages_with_few_blocks_preempt_and_give_the_same_tokens(folder: str) -> None:
    prompts = [{"prompt_token_ids": [first, 5]} for first in range(6)]
    sampling = SamplingParams(max_tokens=40, temperature=0.7, seed=1, ignore_eos=True)
    with LLM(folder, **CPU) as llm:
        expected = llm.generate(prompts, sampling, use_tqdm=False)
    with LLM(folder, **CPU, pipeline_parallel_size=2, num_gpu_blocks_override=9) as llm:
        found = llm.generate(prompts, sampling, use_tqdm=False)
        preemptions = llm._client.stats.preemptions

    assert tokens_of(found) == tokens_of(expected)
    assert preemptions > 0


def test_stages_follow_a_grammar(folder: str) -> None:
    pattern = r"[ab]{4}c[0-9]{3}"
    sampling = SamplingParams(max_tokens=20, seed=2, structured_outputs={"regex": pattern})
    with LLM(folder, **CPU, pipeline_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)

    for output in outputs:
        assert re.fullmatch(pattern, output.outputs[0].text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "graph_memory"),
    [(2, 0.1), (2, 0.0), (3, 0.0)],
    ids=["graphs", "no graphs", "3 without graphs"],
)
def test_emulated_cards_give_the_tokens_of_a_single_card_and_compile_nothing(
    stages: int, graph_memory: float, folder: str
) -> None:
    prompts = [{"prompt_token_ids": list(range(20))}, {"prompt_token_ids": [40, 41]}] * 2
    sampling = [
        SamplingParams(max_tokens=9, temperature=item, seed=3, ignore_eos=True) for item in (0, 0.8)
    ]
    sampling = [item for item in sampling for _ in range(2)]
    with LLM(folder, **CPU) as llm:
        expected = llm.generate(prompts, sampling, use_tqdm=False)
    flags = {"execution_mode": "hpu-graphs", "graph_reserved_mem": graph_memory}
    # With the strict emulator, compiling a recipe while serving ends the engine.
    with LLM(folder, **CARD, **flags, pipeline_parallel_size=stages) as llm:
        found = llm.generate(prompts, sampling, use_tqdm=False)
        compilations = llm._client.stats.compilations

    assert tokens_of(found) == tokens_of(expected)
    assert {k: n for k, n in compilations.items() if k.endswith(".serving") and n} == {}


def test_more_stages_than_layers_are_an_error_with_both_numbers(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"3 layers and --pipeline-parallel-size is 4"):
        LLM(folder, **CPU, pipeline_parallel_size=4)


def test_a_killed_stage_ends_the_group_within_seconds(folder: str) -> None:
    with LLM(folder, **CPU, pipeline_parallel_size=2) as llm:
        victim = own_workers()[0]
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDied, match=rf"worker 0 \(process {victim}\) was killed by SIGK"):
            answers(llm)
        assert time.monotonic() - start < 30
