"""Sampling on the emulated card: after warm-up, no settings compile, wait or allocate memory."""

import random

import numpy as np
import pytest
import torch
from emulated import emulated
from random_sampling import Float32Sums, random_history, random_sampling
from torch import Tensor

from config.execution import HPU_GRAPHS, TORCH_COMPILE, ExecutionConfig, ModeChoice
from hpu.backends.base import Backend
from hpu.backends.gaudi import GaudiBackend
from hpu.protocol import RequestSampling
from hpu.sampling.logprobs import LogprobsMode, top_logprobs
from hpu.sampling.sampler import DRAWN, GREEDY, MANY_WORDS, SORTED, UNFILTERED, Sampler

VOCAB = 300
ROWS = 5
WIDTHS = (1, 2, 4)


def _upload(backend: Backend, logits: Tensor) -> Tensor:
    target = backend.zeros(tuple(logits.shape), logits.dtype)
    backend.upload(target, logits)
    backend.event()
    return target


def _warm(backend: Backend, sampler: Sampler) -> None:
    for width in WIDTHS:
        for sampling in sampler.warmup_settings:
            sampler.add_request(0, sampling, np.zeros(1, np.uint32), 1)
            logits = torch.zeros(width, VOCAB, dtype=torch.bfloat16)
            sampler.sample(_upload(backend, logits), [0])
            sampler.remove_request(0)
    backend.synchronize()


@pytest.mark.parametrize("mode", [HPU_GRAPHS, TORCH_COMPILE])
@pytest.mark.parametrize("sampling", [GREEDY, UNFILTERED, DRAWN, SORTED, MANY_WORDS])
def test_the_first_of_equal_tokens_is_sampled_and_nan_is_reported(
    sampling: RequestSampling, mode: str
) -> None:
    choice = ModeChoice(mode, "the test's")
    # Tied maxima in row 0; NaN, all -inf and +inf in rows 1 to 3.
    logits = torch.zeros(4, VOCAB)
    logits[0, [7, 9, 200]] = 50.0
    logits[1, 5], logits[1, 100] = float("nan"), 50.0
    logits[2] = float("-inf")
    logits[3, 8], logits[3, 100] = float("inf"), 50.0
    top_k = RequestSampling(top_k=1, num_logprobs=2) if sampling != GREEDY else sampling

    with torch.inference_mode(), emulated(lazy=choice.is_lazy, strict=True):
        backend = GaudiBackend(ExecutionConfig(), choice)
        sampler = Sampler(ROWS, VOCAB, backend, static_shapes=True)
        for row in range(4):
            sampler.add_request(row, sampling if row else top_k, np.zeros(1, np.uint32), 1)
        sampled = sampler.sample(_upload(backend, logits), [0, 1, 2, 3])
        tokens = sampled.tokens.tolist()
        backend.close()

    assert tokens == [7, -1, -1, -1]


def test_the_first_of_equal_tokens_is_the_most_likely_token() -> None:
    choice = ModeChoice(HPU_GRAPHS, "the test's")
    logits = torch.zeros(1, VOCAB)

    with torch.inference_mode(), emulated(strict=True):
        backend = GaudiBackend(ExecutionConfig(), choice)
        chosen = _upload(backend, torch.tensor([3], dtype=torch.int32))
        top = top_logprobs(_upload(backend, logits), chosen, 4)
        ids = top.ids.tolist()
        backend.close()

    assert ids[0][:2] == [3, 0]


@pytest.mark.parametrize(
    ("mode", "calls", "reports"),
    [
        (HPU_GRAPHS, 100, "raw_logprobs"),
        (HPU_GRAPHS, 50, "processed_logprobs"),
        pytest.param(TORCH_COMPILE, 50, "processed_logits", marks=pytest.mark.slow),
    ],
)
def test_after_warmup_no_mix_of_settings_compiles_waits_or_allocates(
    mode: str, calls: int, reports: str
) -> None:
    choice = ModeChoice(mode, "the test's")
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    plain = Sampler(ROWS, VOCAB, Float32Sums(torch.get_num_threads()), static_shapes=False)

    with torch.inference_mode(), emulated(lazy=choice.is_lazy, strict=True) as card:
        backend = GaudiBackend(ExecutionConfig(), choice)
        sampler = Sampler(ROWS, VOCAB, backend, LogprobsMode.named(reports), static_shapes=True)
        _warm(backend, sampler)
        compiled, in_use = card.counters.counts["compilations"], card.memory.in_use
        synced = card.counters.counts["syncs"]
        card.end_warmup()
        for step in range(calls):
            rows = rng.sample(range(ROWS), rng.randint(1, max(WIDTHS)))
            fresh = range(ROWS) if step == 0 else rows[: rng.choice((0, 1, 2))]
            width = next(width for width in WIDTHS if width >= len(rows))
            logits = torch.randn(width, VOCAB, generator=generator).bfloat16() * 3
            with card.step():
                for row in fresh:
                    tokens, num_prompt = random_history(rng, VOCAB)
                    sampling = random_sampling(rng, VOCAB)
                    for either in (sampler, plain):
                        either.remove_request(row)
                        either.add_request(row, sampling, tokens, num_prompt)
                sampled = sampler.sample(_upload(backend, logits), rows)
                found = backend.to_host(sampled.tokens)
                end = backend.event()
            end.wait()
            wanted = plain.sample(logits, rows).tokens
            assert found[: len(rows)].tolist() == wanted[: len(rows)].tolist()
            del sampled
            assert card.memory.in_use == in_use

        counts = card.counters.counts
        assert counts["compilations"] == compiled > 0
        assert (counts["syncs"], counts["fallbacks"], card.counters.misuses) == (synced, 0, [])
        backend.close()
