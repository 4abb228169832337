"""Answers of an engine to every kind of request, to compare configurations with several
processes."""

import math
from typing import Any

from config.params.beam_search import BeamSearchParams
from gaudiserve import LLM, SamplingParams

LENGTH = 24
"""Number of new tokens of most requests."""
SHORT_OF_BLOCKS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 144,
    "block_size": 8,
    # Blocks for little more than one context, so that requests are preempted.
    "num_gpu_blocks_override": 22,
    "max_num_seqs": 6,
    # The longer prompts are prefilled in chunks.
    "max_num_batched_tokens": 24,
    "bucketing_strategy": "exponential",
}
SHARED_PREFIX = [5 + 7 * i % 301 for i in range(41)]
PROMPTS = [
    [9],
    [*SHARED_PREFIX, 11, 12],
    [17 + i for i in range(23)],
    [*SHARED_PREFIX, *range(40, 65)],
    [3 * i % 290 + 8 for i in range(8)],
]
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
DRAWN = GREEDY.replace(temperature=0.9, seed=7, logprobs=1)
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    *((prompt, GREEDY) for prompt in PROMPTS),
    (PROMPTS[1], DRAWN.replace(n=2)),
    (PROMPTS[2], DRAWN.replace(top_k=20, top_p=0.9, min_p=0.01, seed=8)),
    (PROMPTS[4], DRAWN.replace(repetition_penalty=1.2, presence_penalty=0.5, seed=9)),
    (PROMPTS[3], GREEDY.replace(logit_bias={30: -100.0, 31: 2.0}, frequency_penalty=0.3)),
    (PROMPTS[1], GREEDY.replace(prompt_logprobs=2, max_tokens=2)),
    (PROMPTS[4], GREEDY.replace(structured_outputs={"json": SCHEMA}, ignore_eos=False)),
    (PROMPTS[0], DRAWN.replace(structured_outputs={"regex": "[a-z]{3}[0-9]{1,4}"})),
]

Answer = tuple[list[int], list[dict[int, float] | None]]
"""Token ids of a choice, and its log-probabilities by position and token."""


def answers(llm: LLM) -> list[Answer]:
    """Answers to REQUESTS in one batch, followed by a beam search."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in REQUESTS]
    outputs = llm.generate(prompts, [sampling for _, sampling in REQUESTS], use_tqdm=False)
    found: list[Answer] = []
    for output in outputs:
        found += [
            (list(choice.token_ids), [_numbers(item) for item in choice.logprobs or []])
            for choice in output.outputs
        ]
        found.append(([], [_numbers(item) for item in output.prompt_logprobs or []]))
    search = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    (beams,) = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}], search)
    found += [(list(beam.tokens), [{0: beam.cum_logprob}]) for beam in beams.sequences]
    return found


def _numbers(position: Any) -> dict[int, float] | None:
    """{token: log-probability}; None for the first token of a prompt."""
    if position is None:
        return None
    return {token: value.logprob for token, value in position.items()}


def difference(found: list[Answer], expected: list[Answer], tolerance: float = 1e-3) -> str:
    """The first difference between the answers of two engines; empty if they agree."""
    if len(found) != len(expected):
        return f"{len(found)} answers and {len(expected)}"
    for index, (first, other) in enumerate(zip(found, expected, strict=True)):
        if first[0] != other[0]:
            return f"answer {index}: tokens {first[0]} and {other[0]}"
        for position, pair in enumerate(zip(first[1], other[1], strict=True)):
            if not _is_near(*pair, tolerance):
                return f"answer {index}, position {position}: {pair[0]} and {pair[1]}"
    return ""


def _is_near(
    first: dict[int, float] | None, other: dict[int, float] | None, tolerance: float
) -> bool:
    if first is None or other is None:
        return first is other
    return first.keys() == other.keys() and all(
        math.isclose(first[token], other[token], abs_tol=tolerance) for token in first
    )
