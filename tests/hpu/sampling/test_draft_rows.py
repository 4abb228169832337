"""Rows after drafts get the same samples as the same tokens sampled step by step."""

import numpy as np
import pytest
import torch

from hpu.backends.cpu import CpuBackend
from hpu.protocol import RequestSampling
from hpu.sampling.draft_rows import NO_TOKEN, SamplingRows
from hpu.sampling.sampler import Sampler

VOCAB, BATCH, DRAFTS = 60, 8, 3
SETTINGS = [
    RequestSampling(temperature=0.0),
    RequestSampling(seed=1),
    RequestSampling(seed=2, top_k=5, top_p=0.7, frequency_penalty=0.5),
    RequestSampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5),
    RequestSampling(temperature=0.0, bad_words=((7,), (8, 9)), num_logprobs=2),
    RequestSampling(temperature=0.0, min_tokens=7, end_token_ids=(*range(0, VOCAB, 2),)),
    RequestSampling(seed=3, logit_bias=((4, 3.0),), temperature=0.5),
]
PROMPT = np.array([3, 8, 9, 8], np.uint32)


def make_sampler() -> Sampler:
    sampler = Sampler(BATCH, VOCAB, CpuBackend(torch.get_num_threads()), static_shapes=True)
    sampler.expect_drafts(DRAFTS, max_inflight_steps=2)
    for index, settings in enumerate(SETTINGS):
        sampler.add_request(index, settings, PROMPT, 3)
    return sampler


@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_after_drafts_equal_sequential_sampling(ahead: int) -> None:
    generator = torch.Generator().manual_seed(5)
    requests = list(range(len(SETTINGS)))
    logits = 3 * torch.randn(ahead + 2 * (1 + DRAFTS), BATCH, VOCAB, generator=generator)
    one_by_one, sampler = make_sampler(), make_sampler()
    expected = [one_by_one.sample(step, requests).tokens for step in logits]
    for step in logits[:ahead]:
        sampler.sample(step, requests)
    for index in requests:
        # The host does not know the last sampled tokens yet, so its count is behind.
        sampler.advance(index, -ahead)

    known = sampler.num_generated(requests)
    for first in (ahead, ahead + 1 + DRAFTS):
        tokens = torch.stack(expected[first : first + 1 + DRAFTS])
        sampled = sampler.sample_drafts(
            logits[first : first + 1 + DRAFTS].reshape(-1, VOCAB),
            SamplingRows(
                requests,
                drafts=tokens[:DRAFTS].t().contiguous(),
                ahead=torch.full((BATCH,), ahead),
                num_generated=known + (first - ahead),
            ),
        )
        sampled.append(tokens.t().contiguous())

        found = sampled.tokens.view(1 + DRAFTS, BATCH)[:, : len(requests)]
        assert torch.equal(found, tokens[:, : len(requests)])


def test_rejected_tokens_leave_no_trace() -> None:
    generator = torch.Generator().manual_seed(6)
    requests = list(range(len(SETTINGS)))
    logits = 3 * torch.randn(3, BATCH, VOCAB, generator=generator)
    one_by_one, sampler = make_sampler(), make_sampler()
    first, second, third = (one_by_one.sample(step, requests).tokens for step in logits)
    wrong = torch.zeros(BATCH, DRAFTS, dtype=first.dtype)
    zeros = torch.zeros(BATCH, dtype=first.dtype)
    rows = torch.cat((logits[0], *[torch.randn(BATCH, VOCAB)] * DRAFTS))
    none = torch.full((BATCH, DRAFTS), NO_TOKEN, dtype=first.dtype)

    sampled = sampler.sample_drafts(
        rows, SamplingRows(requests, wrong, zeros, sampler.num_generated(requests))
    )
    sampled.append(torch.cat((sampled.tokens[:BATCH].unsqueeze(1), none), dim=1))
    for index in requests:
        sampler.advance(index, 1)

    count = len(requests)
    assert torch.equal(sampled.tokens[:count], first[:count])
    assert torch.equal(sampler.sample(logits[1], requests).tokens[:count], second[:count])
    assert torch.equal(sampler.sample(logits[2], requests).tokens[:count], third[:count])


def test_each_row_uses_the_bitmask_after_its_drafts() -> None:
    sampler = Sampler(BATCH, VOCAB, CpuBackend(torch.get_num_threads()), static_shapes=True)
    sampler.expect_drafts(DRAFTS, max_inflight_steps=2)
    sampler.add_request(0, RequestSampling(temperature=0.0, masked=True), PROMPT, 3)
    sampler.add_request(1, RequestSampling(temperature=0.0), PROMPT, 3)
    allowed = [11, 22, 33]
    words = np.zeros((3, -(-VOCAB // 32)), np.int32)
    for row, token in zip(words, allowed, strict=True):
        row[token // 32] = 1 << token % 32
    logits = torch.randn((1 + DRAFTS) * BATCH, VOCAB)

    sampler.set_draft_bitmasks(0, words)
    sampled = sampler.sample_drafts(
        logits,
        SamplingRows(
            [0, 1],
            drafts=torch.zeros((BATCH, DRAFTS), dtype=torch.int64),
            ahead=torch.zeros(BATCH, dtype=torch.int64),
            num_generated=sampler.num_generated([0, 1]),
        ),
    )

    rows = sampled.tokens.view(1 + DRAFTS, BATCH)
    assert rows[:3, 0].tolist() == allowed
    assert torch.equal(rows[:, 1], logits.view(1 + DRAFTS, BATCH, VOCAB)[:, 1].argmax(-1))
    assert sampled.limits is not None and sampled.limits[:2].tolist() == [2, DRAFTS]
