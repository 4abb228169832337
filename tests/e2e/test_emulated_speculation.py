"""Speculation on the strict emulated card, with two steps in flight: the answers equal the CPU's
without speculation, and nothing is compiled or falls back after the warm-up."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import VOCAB_SIZE, make_tiny

from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.transport.messages import EngineStats
from gaudiserve import LLM

SHAPE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "skip_tokenizer_init": True,
}
CARD: dict[str, Any] = {
    "device": "hpu-emulator",
    "emulator_strict": True,
    "emulator_late_copy": 0.002,
    "executor": "uni",
    "block_size": 16,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_prefill_batch": 2,
    "bucketing_strategy": "exponential",
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
}
SUFFIX: dict[str, Any] = {
    "method": "suffix",
    "num_speculative_tokens": 3,
    "suffix_decoding_max_spec_factor": 4.0,
    "suffix_decoding_max_cached_requests": 20,
}
METHODS = {"ngram": CARD["speculative_config"], "suffix": SUFFIX}


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with repetitions; greedy and sampled answers."""
    rng = random.Random(3)
    prompts, params = [], []
    for _ in range(count):
        part = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        prompts.append((part * rng.randint(1, 5))[:60])
        options: dict[str, Any] = rng.choice(
            [
                *({}, {}, {}),
                {"temperature": 0.3, "seed": rng.randrange(99)},
                {"temperature": 1.0, "top_p": 0.4, "top_k": 5, "seed": rng.randrange(99)},
                {"frequency_penalty": 0.1, "repetition_penalty": 1.02},
                {"temperature": 0.2, "seed": rng.randrange(99), "logprobs": 2},
                {"min_tokens": 9, "stop_token_ids": [*range(0, VOCAB_SIZE, 5)]},
                {"logit_bias": {3: 2.0}, "temperature": 0.2, "seed": rng.randrange(99)},
            ]
        )
        limit = rng.randint(9 if "min_tokens" in options else 1, 40)
        params.append(SamplingParams(**{"temperature": 0, "max_tokens": limit, **options}))
    return prompts, params


def run(folder: Path, count: int, **flags: Any) -> tuple[list[Any], EngineStats]:
    prompts, params = requests(count)
    with LLM(str(folder), **{**SHAPE, **flags}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        choices = [output.outputs[0] for output in outputs]
        found = [(c.token_ids, c.finish_reason, _rounded(c.logprobs)) for c in choices]
        return found, llm._client.stats


def _rounded(logprobs: Any) -> list[Any]:
    """Rounded log-probabilities of each token: the last digits differ between devices."""
    return [
        {token: round(logprob.logprob, 2) for token, logprob in position.items()}
        for position in logprobs or ()
    ]


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("ngram", "hpu-graphs"),
        *(
            pytest.param(method, mode, marks=pytest.mark.slow)
            for method, mode in (
                ("suffix", "hpu-graphs"),
                ("ngram", "torch-compile"),
                ("suffix", "torch-compile"),
            )
        ),
    ],
)
def test_the_card_gives_the_tokens_of_the_cpu_and_compiles_nothing(
    method: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    expected, _ = run(folder, 36, device="cpu")

    card = {**CARD, "speculative_config": METHODS[method]}
    found, after = run(folder, 36, execution_mode=mode, **card)

    assert found == expected
    assert after.spec_decode["num_accepted_tokens"] > 40
    while_serving = [name for name in after.compilations if not name.endswith(".warmup")]
    assert after.compilations and while_serving == []
    assert (after.recompilations, after.cpu_fallbacks) == (0, 0)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.3, "seed": 5},
    "penalties": {"temperature": 0, "frequency_penalty": 0.05, "repetition_penalty": 1.02},
    "bad words": {"temperature": 0, "bad_words": ["7 8"], "logprobs": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_of_drawn_penalized_and_restricted_requests_are_accepted(
    name: str, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    prompts = requests(20)[0]
    flags = {**SHAPE, "skip_tokenizer_init": False}
    params = SamplingParams(max_tokens=40, ignore_eos=True, **SAMPLINGS[name])
    with LLM(str(folder), device="cpu", **flags) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]

    with LLM(str(folder), **{**flags, **CARD}) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        stats = llm._client.stats

    assert found == expected
    assert stats.spec_decode["num_accepted_tokens"] > 20
    assert stats.recompilations == 0


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("ngram", "hpu-graphs"),
        pytest.param("suffix", "hpu-graphs", marks=pytest.mark.slow),
        pytest.param("ngram", "torch-compile", marks=pytest.mark.slow),
        pytest.param("suffix", "torch-compile", marks=pytest.mark.slow),
    ],
)
def test_drafts_under_a_grammar_are_accepted(method: str, mode: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=1)
    pairs = GrammarSpec("regex", "((a[b-d]|[0-9]{2}),){5,20}")
    params = [
        SamplingParams(temperature=0, max_tokens=64, structured_outputs=pairs),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.3, seed=2, max_tokens=64, structured_outputs=pairs),
        SamplingParams(
            temperature=0, frequency_penalty=0.1, max_tokens=64, structured_outputs=pairs
        ),
    ] * 2
    prompts = [[number, 9 + number, number] for number in range(len(params))]
    flags = {**SHAPE, "skip_tokenizer_init": False}
    with LLM(str(folder), device="cpu", **flags) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]

    few: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    few |= {"max_prefill_batch": 1, "speculative_config": METHODS[method]}
    with LLM(str(folder), **{**flags, **CARD, **few, "execution_mode": mode}) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm._client.stats

    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(re.match("(a[b-d]|[0-9]{2}),", output.outputs[0].text) for output in outputs[::2])
    assert stats.spec_decode["num_accepted_tokens"] > 20
    while_serving = [name for name in stats.compilations if not name.endswith(".warmup")]
    assert stats.compilations and while_serving == []
    assert (stats.recompilations, stats.cpu_fallbacks) == (0, 0)
