"""Greedy tokens and the logits before each, by transformers and by a model over paged caches."""

from pathlib import Path
from typing import Any

import torch
from paged_harness import PagedHarness
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpu.models.base import CausalLM


def greedy_by_transformers(
    folder: Path, prompts: list[list[int]], count: int
) -> list[tuple[list[int], Tensor]]:
    """For each prompt `count` greedy tokens, and the logits (tokens, vocab) before each."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).float()  # type: ignore[no-untyped-call]  # theirs
    results = []
    for prompt in prompts:
        ids, cache, gathered = list(prompt), None, []
        feed = torch.tensor([prompt])
        for _ in range(count):
            out = model(feed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            gathered.append(out.logits[0])
            ids.append(int(out.logits[0, -1].argmax()))
            feed = torch.tensor([ids[-1:]])
        results.append((ids[len(prompt) :], torch.cat(gathered)))
    return results


def greedy_by_pages(
    model: CausalLM, prompts: list[list[int]], count: int
) -> list[tuple[list[int], Tensor]]:
    """The same through chunked prefills and padded decodes, all rows side by side."""
    harness = PagedHarness(model)
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
        for row, one in harness.decode(last, pad_rows=step % 3, pad_blocks=step % 5).items():
            logits[row].append(one.unsqueeze(0))
            tokens[row].append(int(one.argmax()))
    return [(tokens[row], torch.cat(logits[row])) for row in rows]
