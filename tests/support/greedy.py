"""Greedy tokens and the logits before each token, from transformers and from a model with paged
caches."""

from pathlib import Path
from typing import Any

import torch
from paged_harness import PagedHarness
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpu.models.base import CausalLM

Greedy = list[tuple[list[int], Tensor]]
"""(tokens, logits (tokens, vocab) before each token) of each prompt."""


def random_prompts(*lengths: int) -> list[list[int]]:
    """Random prompts; equal lengths give equal prompts."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(4, 320, (length,), generator=random).tolist() for length in lengths]


def load_reference(folder: Path) -> Any:
    """The model of transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder).float()  # type: ignore[no-untyped-call]  # theirs


def greedy_by_transformers(
    reference: Any, prompts: list[list[int]], answers: list[list[int]]
) -> Greedy:
    """The most likely token after every prefix of each answer, which equals the answer exactly if a
    greedy search gives it. This needs a launch per prompt, while a search needs a launch per
    token."""
    results = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
        results.append((logits[len(prompt) - 1 :].argmax(-1).tolist(), logits))
    return results


def assert_same_as_transformers(
    found: Greedy, prompts: list[list[int]], reference: Any, tolerance: float
) -> None:
    """Assert that the tokens equal a greedy search by `reference` and that the logits differ by
    less than `tolerance`."""
    expected = greedy_by_transformers(reference, prompts, tokens_of(found))
    for (tokens, logits), (expected_tokens, expected_logits) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        assert len(set(tokens)) > 3, "a model that repeats itself proves nothing"
        assert (logits - expected_logits).abs().max() < tolerance


def assert_greedy_within(
    margin: float, prompts: list[list[int]], answers: list[list[int]], reference: Any
) -> None:
    """Assert that each token of the answers is within `margin` of the largest logit of `reference`.
    For 16-bit models, where rounding decides between nearly equal logits."""
    expected = greedy_by_transformers(reference, prompts, answers)
    for answer, (_, all_logits) in zip(answers, expected, strict=True):
        logits = all_logits[-len(answer) :]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        assert (logits.amax(1) - chosen).max() < margin


def tokens_of(found: Greedy) -> list[list[int]]:
    return [tokens for tokens, _ in found]


def greedy_by_pages(
    model: CausalLM,
    prompts: list[list[int]],
    count: int,
    *,
    cache_dtype: torch.dtype | None = None,
) -> Greedy:
    """Greedy results from chunked prefills and padded decodes with all rows in parallel."""
    harness = PagedHarness(model, cache_dtype=cache_dtype)
    rows = range(len(prompts))
    logits: dict[int, list[Tensor]] = {row: [] for row in rows}
    fed = dict.fromkeys(rows, 0)
    chunk = 11
    while pending := [row for row in rows if fed[row] < len(prompts[row])]:
        new = {row: prompts[row][fed[row] : fed[row] + chunk] for row in pending}
        for row, part in harness.prefill(new, pad_rows=1, pad_query=2, pad_blocks=1).items():
            logits[row].append(part)
            fed[row] += len(part)
    tokens = {row: [int(logits[row][-1][-1].argmax())] for row in rows}
    for step in range(count - 1):
        last = {row: tokens[row][-1] for row in rows}
        for row, item in harness.decode(last, pad_rows=step % 3, pad_blocks=step % 5).items():
            logits[row].append(item.unsqueeze(0))
            tokens[row].append(int(item.argmax()))
    return [(tokens[row], torch.cat(logits[row])) for row in rows]
