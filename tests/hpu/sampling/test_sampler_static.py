"""The sampler gives the same tokens with and without static shapes, for all settings."""

import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from card_memory import CardMemory
from random_sampling import Float32Sums, random_history, random_mask, random_sampling
from torch import Tensor

from config.engine import LOGPROBS_MODES
from config.params.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from hpu.backends.base import Function
from hpu.backends.cpu import CpuBackend
from hpu.protocol import RequestSampling
from hpu.sampling import filters
from hpu.sampling.logprobs import RAW, LogprobsMode
from hpu.sampling.ops import SamplerOutput
from hpu.sampling.params import FEW_TOP_K, Params
from hpu.sampling.sampler import Sampler
from hpu.sampling.static_ops import draw

VOCAB = 300
ROWS = 5
PROMPT = np.array([0], dtype=np.uint32)


def _static(max_rows: int, vocab_size: int, mode: LogprobsMode = RAW) -> Sampler:
    backend = CpuBackend(torch.get_num_threads())
    return Sampler(max_rows, vocab_size, backend, mode, static_shapes=True)


def _plain(max_rows: int, vocab_size: int, mode: LogprobsMode = RAW) -> Sampler:
    backend = Float32Sums(torch.get_num_threads())
    return Sampler(max_rows, vocab_size, backend, mode, static_shapes=False)


def _logits(rng: random.Random, width: int, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    logits = torch.randn(width, VOCAB, generator=generator) * 3
    logits[:, :4] += 5
    logits[num_rows:] = float("nan")
    if rng.random() < 0.1:
        logits[0, 7] = float("nan")
    return logits.bfloat16() if rng.random() < 0.5 else logits


def _same(wanted: SamplerOutput, found: SamplerOutput, count: int) -> None:
    assert found.tokens[:count].tolist() == wanted.tokens[:count].tolist()
    assert (found.logprobs is None) == (wanted.logprobs is None)
    if wanted.logprobs is not None and found.logprobs is not None:
        some = slice(None, wanted.logprobs.k + 1)
        assert torch.equal(found.logprobs.ids[:count, some], wanted.logprobs.ids[:count])
        assert torch.equal(found.logprobs.ranks[:count], wanted.logprobs.ranks[:count])
        values = found.logprobs.values[:count, some]
        assert torch.allclose(
            values, wanted.logprobs.values[:count], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(("seed", "name"), list(enumerate(LOGPROBS_MODES)))
def test_every_mix_gives_the_same_tokens_with_padding_and_reused_indices(
    seed: int, name: str
) -> None:
    rng, mode = random.Random(seed), LogprobsMode.named(name)
    plain, padded = _plain(ROWS, VOCAB, mode), _static(ROWS, VOCAB, mode)
    broken, masked = 0, [False] * ROWS

    for step in range(200):
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        for row in range(ROWS) if step == 0 else rows[: rng.choice((0, 0, 1, 2))]:
            sampling, (tokens, num_prompt) = (
                random_sampling(rng, VOCAB),
                random_history(rng, VOCAB),
            )
            for sampler in (plain, padded):
                sampler.remove_request(row)
                sampler.add_request(row, sampling, tokens, num_prompt)
            masked[row] = sampling.masked
        for row in rows:
            # Sometimes without a mask, as in a warm-up.
            if masked[row] and rng.random() < 0.9:
                words = random_mask(rng, VOCAB)
                plain.set_bitmasks([row], words)
                padded.set_bitmasks([row], words)
        logits = _logits(rng, rng.choice((len(rows), ROWS + 1, 8)), len(rows))
        before = logits.clone()
        found = padded.sample(logits, rows)

        _same(plain.sample(logits, rows), found, len(rows))
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        broken += int((found.tokens[: len(rows)] < 0).sum())

    assert broken > 0


def test_a_mask_applies_only_to_its_request() -> None:
    sampler, asked = _static(2, 40), RequestSampling(temperature=0.0, masked=True)
    logits = torch.arange(40.0).expand(2, 40)
    only = np.zeros((1, 2), dtype="<i4")
    only[0, 0] = -(2**31)
    sampler.add_request(0, asked, PROMPT, 1)
    sampler.add_request(1, asked, PROMPT, 1)

    sampler.set_bitmasks([0], only)
    found = [sampler.sample(logits, [0, 1]).tokens.tolist()]
    sampler.add_request(0, RequestSampling(temperature=0.0), PROMPT, 1)
    found.append(sampler.sample(logits, [0, 1]).tokens.tolist())

    # The sign bit of the first word is token 31.
    assert found == [[31, 39], [39, 39]]


def test_bad_words_at_the_limits_of_length_and_number_are_enforced() -> None:
    most = tuple((1,) * (MAX_BAD_WORD_TOKENS - 1) + (end,) for end in (2, 3)) * (MAX_BAD_WORDS // 2)
    asked = [RequestSampling(temperature=0.0, bad_words=words) for words in (most, ((1, 2),), ())]
    history = np.array([0] + [1] * (MAX_BAD_WORD_TOKENS - 2), dtype=np.uint32)
    sampler = _static(3, 5)
    for row, sampling in enumerate(asked):
        sampler.add_request(row, sampling, history, 1)
    logits = torch.tensor([0.0, 1.0, 9.0, 5.0, 2.0]).expand(4, 5)

    first = sampler.sample(torch.eye(5)[[1, 1, 1, 1]], [0, 1, 2]).tokens.tolist()
    second = sampler.sample(logits, [0, 1, 2]).tokens.tolist()

    assert (first[:3], second[:3]) == ([1, 1, 1], [4, 3, 2])


def test_a_preempted_request_samples_as_without_preemption() -> None:
    asked = RequestSampling(
        temperature=0.8,
        seed=5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=4,
        end_token_ids=(1,),
        bad_words=((2, 3), (4,)),
    )
    rng = random.Random(3)
    steady, tokens = _static(1, VOCAB), [3, 4]
    steady.add_request(0, asked, np.array(tokens, dtype=np.uint32), 2)

    for _ in range(8):
        logits = _logits(rng, 2, 1)[:, :].nan_to_num()
        wanted = int(steady.sample(logits, [0]).tokens[0])
        fresh = _static(1, VOCAB)
        fresh.add_request(0, asked, np.array(tokens, dtype=np.uint32), 2)
        assert int(fresh.sample(logits, [0]).tokens[0]) == wanted
        tokens.append(wanted)


def test_host_tensors_of_uploads_are_kept_until_their_launch() -> None:
    sampler = Sampler(2, 8, CardMemory(1), static_shapes=True)
    greedy, drawn = RequestSampling(temperature=0.0), RequestSampling(logit_bias=((1, 1.0),))

    sampler.add_request(0, greedy, PROMPT, 1)
    without = sampler.sample(torch.zeros(2, 8), [0]).pinned
    sampler.add_request(1, drawn, PROMPT, 1)
    kept = [len(sampler.sample(torch.zeros(2, 8), [0, 1]).pinned) for _ in range(2)]

    # The first step uploads a row of the bias table and its position; each step uploads numbers and
    # positions.
    assert (without, kept) == ((), [4, 2])


def test_the_warm_up_settings_fit_a_vocabulary_of_two_tokens() -> None:
    sampler = _static(6, 2)

    for sampling in sampler.warmup_settings:
        sampler.add_request(0, sampling, PROMPT, 1)
        sampler.sample(torch.zeros(3, 2), [0])
        sampler.remove_request(0)


@pytest.mark.parametrize("vocab_size", [5, 300, 5000])
def test_the_kth_of_the_largest_weights_is_the_threshold_of_top_k(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, vocab_size, generator=generator).bfloat16().float() * 9
    weights = torch.softmax(logits, dim=-1)
    top_k = torch.randint(0, vocab_size, (20, 1), generator=generator)
    largest = weights.sort(dim=-1, descending=True).values

    found = filters.top_values_threshold(largest, top_k.float())

    wanted = filters.top_k_by_sort(weights, top_k, vocab_size).clamp(min=filters.TINY)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("top_k", [1, 2, FEW_TOP_K])
@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.9, 1.0])
def test_a_draw_from_the_largest_weights_equals_a_draw_from_all(top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    # Scores in bfloat16 often tie, also at the k-th place.
    scores = (torch.randn(40, 2000, generator=generator) * 2).bfloat16().float()
    params = torch.tensor(Params(greedy=0.0, top_k=float(top_k), top_p=top_p))
    params = params.unsqueeze(1).repeat(1, 40)
    params[0] = torch.rand(40, generator=generator)

    few, some = draw(scores, params.view(-1), FEW_TOP_K)
    whole, every = draw(scores, params.view(-1), 2000)

    assert torch.equal(few.tokens, whole.tokens)
    assert torch.equal(some, every)
    if (top_k, top_p) == (FEW_TOP_K, 1.0):
        assert (some > 0).sum(-1).max() > FEW_TOP_K


class TracingBackend(CpuBackend):
    """CpuBackend that traces functions with torch.compile and generates no code."""

    def compiled(self, function: Function) -> Function:
        options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
        return cast(Function, torch.compile(function, **options))


# Without this, a back end in a lazy mode would switch tracing off.
@torch._dynamo.config.patch(disable=False)
def test_every_stage_is_traced_without_a_graph_break() -> None:
    mode, generator = LogprobsMode.named("processed_logprobs"), torch.Generator().manual_seed(0)
    traced = Sampler(3, VOCAB, TracingBackend(1), mode, static_shapes=True)
    plain = _static(3, VOCAB, mode)

    for sampling in plain.warmup_settings:
        logits = torch.randn(2, VOCAB, generator=generator).bfloat16()
        for sampler in (traced, plain):
            sampler.add_request(0, sampling, PROMPT, 1)
        with torch.inference_mode():
            _same(plain.sample(logits, [0]), traced.sample(logits, [0]), 1)
