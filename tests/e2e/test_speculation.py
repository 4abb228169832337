"""Speculation compared with the same engine without it: float32, greedy or seeded, with chunks,
prefix hits and a KV cache far too small for the batch."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from config.errors import RequestFailed
from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.transport.messages import EngineStats
from gaudiserve import LLM, RequestOutput

SHAPE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 144,
    "block_size": 8,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "skip_tokenizer_init": True,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
ALWAYS = {**NGRAM, "adaptive": False}
"""Speculation that verifies all drafts, without cost limits."""
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
SHARED_PREFIX = [5 + 7 * i % 301 for i in range(41)]
PROMPTS = [
    [9],
    [*SHARED_PREFIX, 11, 12],
    [17 + i for i in range(23)],
    [*SHARED_PREFIX, 13],
    SHARED_PREFIX[:32],
    [*SHARED_PREFIX, *range(40, 65)],
    [3 * i % 290 + 8 for i in range(8)],
    [*SHARED_PREFIX[:24], 99, 98],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def run(
    folder: Path, params: SamplingParams | list[SamplingParams], **flags: Any
) -> tuple[list[RequestOutput], EngineStats]:
    with LLM(str(folder), **{**SHAPE, **flags}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return outputs, llm._client.stats


def choices(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.stop_reason)
        for output in outputs
        for choice in output.outputs
    ]


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.3, seed=5, max_tokens=64, ignore_eos=True),
    "filtered": SamplingParams(temperature=1.0, top_p=0.5, top_k=20, seed=6, max_tokens=48),
    "penalties": SamplingParams(
        temperature=0, frequency_penalty=0.2, repetition_penalty=1.1, max_tokens=64, ignore_eos=True
    ),
    "bias": SamplingParams(temperature=0.5, seed=1, logit_bias={7: 2.0, 8: 2.5}, max_tokens=40),
    "ends": SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[*range(0, 320, 5)]),
    "n": SamplingParams(temperature=0.4, seed=3, n=3, max_tokens=32, ignore_eos=True),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_speculation_changes_no_token(folder: Path, name: str) -> None:
    plain, _ = run(folder, SAMPLINGS[name])

    speculated, stats = run(folder, SAMPLINGS[name], speculative_config=ALWAYS)

    assert choices(speculated) == choices(plain)
    counts = stats.spec_decode
    assert counts["num_draft_tokens"] >= counts["num_drafts"] > 0
    by_position = [counts.get(f"accepted.{position}", 0) for position in range(4)]
    assert counts["num_accepted_tokens"] == sum(by_position) > 0
    assert by_position == sorted(by_position, reverse=True)


def test_suffixes_of_earlier_outputs_are_accepted(folder: Path) -> None:
    params = SAMPLINGS["greedy"]
    suffix = {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, "adaptive": False}
    plain, _ = run(folder, params)

    with LLM(str(folder), **SHAPE, speculative_config=suffix) as llm:
        first = llm.generate(PROMPTS, params, use_tqdm=False)
        before = dict(llm._client.stats.spec_decode)
        second = llm.generate(PROMPTS, params, use_tqdm=False)
        after = llm._client.stats.spec_decode

    assert choices(first) == choices(second) == choices(plain)
    drafts, accepted = (
        after[f"num_{name}_tokens"] - before[f"num_{name}_tokens"] for name in ("draft", "accepted")
    )
    # The second time, all answers are in the suffix index.
    assert accepted > max(200, before["num_accepted_tokens"])
    assert accepted / drafts > before["num_accepted_tokens"] / before["num_draft_tokens"]


def test_preemptions_and_adaptive_drafts_change_no_token(folder: Path) -> None:
    plain, _ = run(folder, SAMPLINGS["greedy"])

    speculated, stats = run(folder, SAMPLINGS["greedy"], speculative_config=NGRAM)

    assert choices(speculated) == choices(plain)
    assert stats.preemptions > 0


def test_logprobs_with_speculation_equal_logprobs_without_speculation(folder: Path) -> None:
    params = SamplingParams(temperature=0.2, seed=1, max_tokens=40, logprobs=3, ignore_eos=True)
    plain, _ = run(folder, params)

    speculated, stats = run(folder, params, speculative_config=ALWAYS)

    assert choices(speculated) == choices(plain)
    assert stats.spec_decode["num_accepted_tokens"] > 0
    for first, other in zip(plain, speculated, strict=True):
        before, after = first.outputs[0].logprobs, other.outputs[0].logprobs
        assert before is not None and after is not None and len(before) == len(after)
        for position, expected in zip(after, before, strict=True):
            assert list(position) == list(expected)
            for token, logprob in expected.items():
                assert abs(position[token].logprob - logprob.logprob) < 1e-4


def test_the_compiled_decoder_verifies_drafts_without_changing_tokens(folder: Path) -> None:
    # Without preemptions: a recomputed token is rounded differently in a prompt.
    roomy = {"dtype": "bfloat16", "num_gpu_blocks_override": 400, "max_num_batched_tokens": 512}
    plain, _ = run(folder, SAMPLINGS["greedy"], **roomy)

    speculated, stats = run(folder, SAMPLINGS["greedy"], speculative_config=ALWAYS, **roomy)

    assert choices(speculated) == choices(plain)
    assert stats.spec_decode["num_accepted_tokens"] > 0


def test_requests_with_a_grammar_run_beside_drafts(folder: Path) -> None:
    digits = GrammarSpec("regex", "[0-9]{3}-[0-9]{12}")
    params = [
        SamplingParams(temperature=0, max_tokens=30, structured_outputs=digits if odd else None)
        for odd in [True, False] * 4
    ]
    plain, _ = run(folder, params, skip_tokenizer_init=False)

    speculated, stats = run(folder, params, skip_tokenizer_init=False, speculative_config=ALWAYS)

    assert choices(speculated) == choices(plain)
    assert all(re.match("[0-9]{3}-[0-9]*$", item.outputs[0].text) for item in speculated[::2])
    assert stats.spec_decode["num_accepted_tokens"] > 0


@pytest.mark.parametrize("name", ["greedy", "seeded", "penalties"])
def test_drafts_under_a_grammar_change_no_token(folder: Path, name: str) -> None:
    pairs = GrammarSpec("regex", "((a[b-d]|[0-9]{2}),){5,20}")
    params = replace(SAMPLINGS[name], ignore_eos=False, structured_outputs=pairs)
    plain, _ = run(folder, params, skip_tokenizer_init=False)

    speculated, stats = run(folder, params, skip_tokenizer_init=False, speculative_config=ALWAYS)

    assert choices(speculated) == choices(plain)
    assert stats.preemptions > 0
    counts = stats.spec_decode
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] > 0
    assert counts["accepted.1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("keys", [NGRAM, {"method": "suffix", "adaptive": False}])
def test_tensor_parallel_ranks_verify_the_same_drafts(keys: dict[str, Any], folder: Path) -> None:
    plain, _ = run(folder, SAMPLINGS["greedy"])

    speculated, stats = run(
        folder,
        SAMPLINGS["greedy"],
        speculative_config=keys,
        tensor_parallel_size=2,
        compare_ranks=True,
    )

    assert choices(speculated) == choices(plain)
    assert stats.spec_decode["num_accepted_tokens"] > 0


@pytest.mark.parametrize("method", [ALWAYS, SUFFIX], ids=["ngram", "suffix"])
def test_non_finite_logits_fail_only_their_request(method: dict[str, Any], tmp_path: Path) -> None:
    file = make_tiny("llama", tmp_path, num_hidden_layers=1) / "model.safetensors"
    tensors, poison = load_file(file), 200
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    flags = {**SHAPE, "speculative_config": method, "enable_prefix_caching": False}
    with LLM(str(tmp_path), **flags) as llm:

        def answers() -> list[Any]:
            return choices(llm.generate(PROMPTS, params, use_tqdm=False))

        expected = answers()
        with pytest.raises(RequestFailed, match="logits of output token 1 were NaN or infinite"):
            llm.generate([[5, poison, *[9] * 90]], params, use_tqdm=False)
        # Drafts are verified together with the sampled token that is not finite.
        sampled = replace(params, logit_bias={poison: 100.0})
        with pytest.raises(RequestFailed, match="logits of output token 2 were NaN or infinite"):
            llm.generate([[5, 6, 7, 8] * 20], sampled, use_tqdm=False)

        assert answers() == expected
        assert llm._client.stats.spec_decode["num_draft_tokens"] > 50
