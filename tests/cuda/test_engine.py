"""The engine on a GPU compared with the CPU, in float32, with coarse buckets, chunks, prefix hits
and preemption. No graph is captured after start.

Run by `make test-cuda`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_tiny

from config.params.sampling import SamplingParams
from engine.transport.messages import EngineStats
from gaudiserve import LLM, RequestOutput

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default:::torch"),
]

# 26 blocks hold little more than one context: requests of up to 100 tokens are preempted.
FEW_BLOCKS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 144,
    "block_size": 8,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "bucketing_strategy": "exponential",
    "skip_tokenizer_init": True,
    "executor": "uni",
}
MANY_BLOCKS: dict[str, Any] = {
    **FEW_BLOCKS,
    "num_gpu_blocks_override": 200,
    "max_num_batched_tokens": 144,
    "max_num_seqs": 8,
}

SHARED_PREFIX = [5 + 7 * i % 301 for i in range(41)]
PROMPTS = [
    [9],
    [*SHARED_PREFIX, 11, 12],
    [17 + i for i in range(23)],
    [*SHARED_PREFIX, 13],
    SHARED_PREFIX[:32],
    [*SHARED_PREFIX, *range(40, 65)],
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
SAMPLING_RULES = [
    GREEDY.replace(temperature=1.0, seed=1, n=2),
    GREEDY.replace(temperature=0.8, top_p=0.9, top_k=40, seed=2),
    GREEDY.replace(temperature=1.2, min_p=0.02, seed=3, repetition_penalty=1.3),
    GREEDY.replace(presence_penalty=1.5, frequency_penalty=0.7),
    GREEDY.replace(temperature=1.0, seed=5, allowed_token_ids=tuple(range(30, 90))),
    GREEDY.replace(logit_bias={44: 8.0, 50: -100.0}, bad_words_token_ids=((44, 44), (60,))),
]


def run(
    folder: Path, shape: dict[str, Any], prompts: list[list[int]], params: Any
) -> tuple[list[RequestOutput], EngineStats]:
    with LLM(str(folder), **shape) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, llm._client.stats


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def scores_of(outputs: list[RequestOutput]) -> list[float]:
    """Log-probabilities of the sampled tokens, in the order of the outputs."""
    return [
        entries[token].logprob
        for output in outputs
        for choice in output.outputs
        for token, entries in zip(choice.token_ids, choice.logprobs or [], strict=True)
    ]


def assert_captured_before_ready(stats: EngineStats) -> None:
    warmed = [stats.compilations.get(f"{phase}.warmup", 0) for phase in ("prefill", "decode")]
    assert min(warmed) > 0
    assert stats.graphs == sum(warmed)
    assert not any(name.endswith("serving") for name in stats.compilations)
    assert not any(name.endswith(("miss", "fallback")) for name in stats.lookups)


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_tokens_equal_cpu_tokens(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, seed=3)
    expected, _ = run(folder, {**FEW_BLOCKS, "device": "cpu"}, PROMPTS, GREEDY)

    outputs, stats = run(folder, {**FEW_BLOCKS, "device": "cuda"}, PROMPTS, GREEDY)

    assert tokens_of(outputs) == tokens_of(expected)
    assert scores_of(outputs) == pytest.approx(scores_of(expected), abs=1e-3)
    assert stats.preemptions > 0 and any(output.num_cached_tokens for output in outputs)
    assert_captured_before_ready(stats)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed=3)


def test_every_sampling_rule_samples_the_same_tokens_on_a_gpu(folder: Path) -> None:
    expected, _ = run(folder, {**FEW_BLOCKS, "device": "cpu"}, PROMPTS, SAMPLING_RULES)

    outputs, stats = run(folder, {**FEW_BLOCKS, "device": "cuda"}, PROMPTS, SAMPLING_RULES)

    assert tokens_of(outputs) == tokens_of(expected)
    assert_captured_before_ready(stats)


def test_replays_give_the_tokens_of_eager_mode(folder: Path) -> None:
    shape = {**FEW_BLOCKS, "device": "cuda"}
    eager, plain = run(folder, {**shape, "enforce_eager": True}, PROMPTS, GREEDY)

    replayed, stats = run(folder, shape, PROMPTS, GREEDY)

    assert tokens_of(replayed) == tokens_of(eager)
    assert (plain.graphs, plain.compilations) == (0, {})
    assert_captured_before_ready(stats)


def any_params(rng: random.Random) -> SamplingParams:
    """Random sampling parameters for a request."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 5, 50]),
        min_p=rng.choice([0.0, 0.05]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logprobs=rng.choice([None, None, 3]),
        seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, 24),
        ignore_eos=rng.random() < 0.5,
    )


def test_random_traffic_captures_nothing_and_leaks_no_memory(folder: Path) -> None:
    rng = random.Random(11)
    prompts = [
        [
            *SHARED_PREFIX[: rng.randrange(42)],
            *(rng.randrange(5, 300) for _ in range(rng.randrange(1, 70))),
        ]
        for _ in range(300)
    ]
    params = [any_params(rng) for _ in prompts]

    with LLM(str(folder), **MANY_BLOCKS, device="cuda") as llm:
        # The first round allocates the penalty tables, which stay allocated.
        llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        allocated_later = torch.cuda.memory_allocated()
        stats = llm._client.stats

    # A last step whose result was not needed may still hold its small tensors.
    assert allocated_later - allocated < 1024**2
    assert any(output.num_cached_tokens for output in outputs)
    assert_captured_before_ready(stats)
