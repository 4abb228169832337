"""The batched sampler gives each row the same result as a slow, simple sampler gives the row
alone."""

import numpy as np
import pytest
import slow_sampler
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from hpu.backends.cpu import CpuBackend
from hpu.protocol import RequestSampling
from hpu.sampling import filters
from hpu.sampling.ops import SamplerOutput
from hpu.sampling.rng import uniforms
from hpu.sampling.sampler import Sampler

CPU = CpuBackend(torch.get_num_threads())
GREEDY = RequestSampling(temperature=0.0)


def _sampler(
    vocab_size: int, rows: list[RequestSampling], prompt: list[int] | None = None
) -> Sampler:
    sampler = Sampler(len(rows), vocab_size, CPU, static_shapes=False)
    tokens = np.array(prompt or [0], dtype=np.uint32)
    for row, sampling in enumerate(rows):
        sampler.add_request(row, sampling, tokens, len(tokens))
    return sampler


def _logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


def _tokens(sampler: Sampler, logits: Tensor, rows: list[int]) -> list[int]:
    tokens: list[int] = sampler.sample(logits, rows).tokens[: len(rows)].tolist()
    return tokens


VOCAB = 24
_token = st.integers(0, VOCAB - 1)
_samplings = st.builds(
    RequestSampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, VOCAB, 100]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 2.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    min_tokens=st.integers(0, 4),
    end_token_ids=st.lists(_token, max_size=3).map(tuple),
    logit_bias=st.dictionaries(_token, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_token_ids=st.none() | st.lists(_token, min_size=8, max_size=16).map(tuple),
    bad_words=st.lists(st.lists(_token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    num_logprobs=st.integers(-1, 3),
)


@settings(max_examples=150)
@given(
    st.lists(_samplings, min_size=1, max_size=4),
    st.lists(_token, min_size=1, max_size=6),
    st.integers(0, 2**31),
)
def test_every_combination_equals_the_slow_sampler(
    asked: list[RequestSampling], prompt: list[int], seed: int
) -> None:
    sampler = _sampler(VOCAB, asked, prompt)
    generated: list[list[int]] = [[] for _ in asked]
    rows = list(range(len(asked)))

    for step in range(6):
        logits = _logits(len(rows) + 1, VOCAB, seed + step)
        found = _tokens(sampler, logits, rows)
        for row in rows:
            raw = logits[row].double().numpy()
            left = slow_sampler.scores(raw, asked[row], prompt, generated[row])
            if not np.isfinite(left.max()):
                assert found[row] == -1
                return
            wanted = slow_sampler.sample(raw, asked[row], prompt, generated[row])
            assert found[row] == wanted, (asked[row], step)
            generated[row].append(wanted)


@settings(max_examples=60)
@given(st.lists(_samplings, min_size=2, max_size=4), st.integers(0, 2**31))
def test_other_requests_change_no_bit_of_a_requests_result(
    asked: list[RequestSampling], seed: int
) -> None:
    together = _sampler(VOCAB, asked)
    alone = [_sampler(VOCAB, [sampling]) for sampling in asked]

    for step in range(4):
        logits = _logits(len(asked), VOCAB, seed + step).bfloat16()
        mixed = together.sample(logits, list(range(len(asked))))
        for row, sampler in enumerate(alone):
            _same(sampler.sample(logits[row : row + 1], [0]), mixed, row, asked[row].num_logprobs)


def _same(alone: SamplerOutput, mixed: SamplerOutput, row: int, k: int) -> None:
    assert alone.tokens[0] == mixed.tokens[row]
    if k >= 0:
        assert alone.logprobs is not None and mixed.logprobs is not None
        assert torch.equal(alone.logprobs.ids[0], mixed.logprobs.ids[row, : k + 1])
        values = mixed.logprobs.values[row, : k + 1]
        assert torch.equal(alone.logprobs.values[0], values)
        assert alone.logprobs.ranks[0] == mixed.logprobs.ranks[row]


ALL = RequestSampling(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.001,
    seed=5,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    min_tokens=3,
    end_token_ids=(1, 2),
    logit_bias=((7, 1.5),),
    allowed_token_ids=tuple(range(0, 49_000, 2)),
    bad_words=((4, 6), (8,)),
    num_logprobs=5,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_request_is_not_changed_by_requests_with_all_settings(
    dtype: torch.dtype,
) -> None:
    vocab_size = 49_152
    plain = RequestSampling(seed=3)
    nucleus = RequestSampling(seed=4, top_p=0.95)
    rows = [plain, ALL, nucleus, GREEDY, ALL]
    together = _sampler(vocab_size, rows)
    alone = [_sampler(vocab_size, [sampling]) for sampling in rows]

    for step in range(4):
        logits = _logits(5, vocab_size, step).to(dtype)
        mixed = _tokens(together, logits, [0, 1, 2, 3, 4])
        assert mixed == [
            _tokens(sampler, logits[row : row + 1], [0])[0] for row, sampler in enumerate(alone)
        ]


def test_threads_and_batch_sizes_change_no_result() -> None:
    vocab_size, rows = 49_152, [RequestSampling(seed=s, top_p=0.9) for s in range(6)]
    logits = _logits(6, vocab_size)
    threads = torch.get_num_threads()

    try:
        torch.set_num_threads(1)
        wanted = _tokens(_sampler(vocab_size, rows), logits, list(range(6)))
        torch.set_num_threads(2)
        single = [
            _tokens(_sampler(vocab_size, [r]), logits[i : i + 1], [0]) for i, r in enumerate(rows)
        ]
    finally:
        torch.set_num_threads(threads)

    assert [tokens[0] for tokens in single] == wanted


def test_greedy_takes_the_first_of_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    greedy = [
        GREEDY,
        RequestSampling(top_k=1),
        RequestSampling(min_p=1.0),
        RequestSampling(top_p=1e-9),
    ]

    tokens = _tokens(_sampler(4, greedy), logits.expand(4, 4), [0, 1, 2, 3])

    assert tokens == [1, 1, 1, 1]


def test_a_tiny_temperature_gives_the_greedy_token_and_no_failure() -> None:
    rows = [RequestSampling(temperature=t, seed=1) for t in (1e-6, 1e-30, 5e-324)]

    tokens = _tokens(_sampler(50, rows), _logits(1, 50, spread=100.0).expand(3, 50), [0, 1, 2])

    assert tokens == [int(_logits(1, 50).argmax())] * 3


def test_nan_logits_are_reported_only_for_their_request() -> None:
    logits = _logits(6, 30)
    logits[0, 7] = float("nan")
    logits[2, 3] = float("nan")
    logits[4, 3] = float("inf")
    masked = RequestSampling(
        allowed_token_ids=(1, 2), frequency_penalty=1.0, logit_bias=((1, 2.0),)
    )
    rows = [GREEDY, GREEDY, masked, masked, RequestSampling(top_p=0.5), RequestSampling(top_p=0.5)]

    tokens = _tokens(_sampler(30, rows), logits, list(range(6)))

    assert [token == -1 for token in tokens] == [True, False] * 3


def test_a_request_without_allowed_tokens_fails() -> None:
    barred = RequestSampling(allowed_token_ids=(3,), min_tokens=2, end_token_ids=(3,))

    tokens = _tokens(_sampler(8, [barred, GREEDY]), _logits(2, 8), [0, 1])

    assert tokens[0] == -1 and tokens[1] >= 0


def test_end_tokens_are_allowed_when_min_tokens_is_reached() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    sampler = _sampler(3, [RequestSampling(temperature=0.0, min_tokens=2, end_token_ids=(1,))])

    tokens = [_tokens(sampler, logits, [0])[0] for _ in range(4)]

    assert tokens == [2, 2, 1, 1]


def test_a_bad_word_of_several_tokens_forbids_its_last_token_after_its_first_tokens() -> None:
    sampler = _sampler(4, [RequestSampling(temperature=0.0, bad_words=((1, 2), (1, 3, 3)))])
    best = [1, 2, 2, 1, 3, 3]

    tokens = [_tokens(sampler, torch.eye(4)[[token]], [0])[0] for token in best]

    # After 1, token 2 is forbidden and 0 is sampled instead; after 1 3, a second 3.
    assert tokens == [1, 0, 2, 1, 3, 0]


def test_a_longer_bad_word_keeps_the_history_of_other_requests() -> None:
    sampler = Sampler(2, 4, CPU, static_shapes=False)
    prompt = np.array([0], dtype=np.uint32)
    sampler.add_request(0, RequestSampling(temperature=0.0, bad_words=((1, 2),)), prompt, 1)
    assert _tokens(sampler, torch.eye(4)[[1]], [0]) == [1]

    sampler.add_request(1, RequestSampling(temperature=0.0, bad_words=((3, 3, 3, 3),)), prompt, 1)

    assert _tokens(sampler, torch.eye(4)[[2, 3]], [0, 1]) == [0, 3]


def test_a_preempted_request_samples_as_without_preemption() -> None:
    asked = replace(ALL, allowed_token_ids=None, top_p=0.95)
    steady = _sampler(40, [asked], prompt=[3, 4])
    tokens = [3, 4]

    for step in range(8):
        logits = _logits(1, 40, step)
        wanted = _tokens(steady, logits, [0])[0]
        fresh = Sampler(1, 40, CPU, static_shapes=False)
        fresh.add_request(0, asked, np.array(tokens, dtype=np.uint32), 2)
        assert _tokens(fresh, logits, [0]) == [wanted]
        tokens.append(wanted)


def test_a_reused_index_forgets_the_previous_sequence() -> None:
    penalised = RequestSampling(temperature=0.0, frequency_penalty=2.0)
    sampler = _sampler(3, [penalised])
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    assert [_tokens(sampler, logits, [0])[0] for _ in range(2)] == [0, 2]

    sampler.remove_request(0)
    sampler.add_request(0, penalised, np.array([1], dtype=np.uint32), 1)

    assert _tokens(sampler, logits, [0]) == [0]


def test_order_of_requests_and_padding_change_no_result() -> None:
    rows = [RequestSampling(seed=s, frequency_penalty=1.0, top_k=3) for s in range(4)]
    logits = _logits(4, 20)
    wanted = _tokens(_sampler(20, rows), logits, [0, 1, 2, 3])
    padded = torch.full((6, 20), float("nan"))
    padded[:3] = logits[[3, 0, 2]]

    tokens = _tokens(_sampler(20, rows), padded, [3, 0, 2])

    assert tokens == [wanted[3], wanted[0], wanted[2]]


def test_logits_are_not_modified() -> None:
    logits = _logits(2, 49_152)
    before = logits.clone()

    _tokens(_sampler(49_152, [ALL, GREEDY]), logits, [0, 1])

    assert torch.equal(logits, before)


def test_tokens_have_the_index_dtype() -> None:
    narrow = CpuBackend(1)
    narrow.index_dtype = torch.int32
    sampler = Sampler(1, 300, narrow, static_shapes=False)
    sampler.add_request(0, RequestSampling(top_p=0.9, top_k=5), np.array([1], dtype=np.uint32), 1)

    tokens = sampler.sample(_logits(1, 300), [0]).tokens

    assert tokens.dtype == torch.int32


def _counts_of_draws(asked: RequestSampling, logits: Tensor, draws: int) -> np.ndarray:
    rows = 500
    sampler = _sampler(logits.shape[0], [replace(asked, seed=s) for s in range(rows)])
    batch = logits.expand(rows, -1)
    tokens = [_tokens(sampler, batch, list(range(rows))) for _ in range(draws // rows)]
    return np.bincount(np.array(tokens).ravel(), minlength=logits.shape[0])


@pytest.mark.parametrize(
    "asked",
    [
        RequestSampling(),
        RequestSampling(temperature=0.5),
        RequestSampling(top_k=4),
        RequestSampling(top_p=0.8),
        RequestSampling(min_p=0.1, temperature=1.5),
    ],
)
def test_draws_follow_the_probabilities(asked: RequestSampling) -> None:
    logits, draws = _logits(1, 12, spread=1.0)[0], 20_000

    counts = _counts_of_draws(asked, logits, draws)

    wanted = slow_sampler.probabilities(logits.double().numpy(), asked) * draws
    assert not counts[wanted == 0].any()
    kept = wanted > 0
    chi_square = float((((counts - wanted) ** 2)[kept] / wanted[kept]).sum())
    # The 0.9999 quantile for 11 degrees of freedom; fewer degrees have a lower quantile.
    assert chi_square < 37.4


def test_random_numbers_are_even_and_never_reach_the_ends() -> None:
    seeds = np.arange(2000, dtype=np.uint64)
    steps = np.arange(50, dtype=np.int64)

    for dtype in (np.float64, np.float32):
        numbers = np.stack([uniforms(seeds, np.full(2000, step), dtype) for step in steps])
        assert numbers.min() > 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 161  # 99 degrees of freedom, 0.9999 quantile.
        for shifted in (numbers[1:, :], numbers[:, 1:]):
            both = np.corrcoef(shifted.ravel(), numbers[: len(shifted), : shifted.shape[1]].ravel())
            assert abs(both[0, 1]) < 0.02


def test_the_random_number_of_a_seed_and_count_is_fixed() -> None:
    number = uniforms(np.array([42], dtype=np.uint64), np.array([7]))

    assert number.tolist() == [0.734720458462364]


@settings(max_examples=80)
@given(st.integers(0, 2**31), st.floats(1e-6, 1 - 1e-9), st.sampled_from([5, 300, 5000]))
def test_both_nucleus_implementations_agree(seed: int, top_p: float, vocab_size: int) -> None:
    weights = torch.softmax(_logits(2, vocab_size, seed, spread=0.5).bfloat16().float(), dim=-1)
    mass = filters.totals(weights, torch.float64) * top_p

    by_sort = filters.nucleus_by_sort(weights, mass)
    in_chunks = filters.nucleus(weights.sort(dim=-1, descending=True).values, mass)

    kept = filters.cut(weights, by_sort) > 0
    assert torch.equal(kept, filters.cut(weights, in_chunks) > 0)
    assert torch.equal(kept, weights >= by_sort)


def test_a_nucleus_of_a_flat_row_is_found_beyond_the_first_few_thousand() -> None:
    weights = torch.linspace(1.0, 1.1, 20_000).unsqueeze(0)
    mass = filters.totals(weights, torch.float64) * 0.9

    threshold = filters.nucleus_by_sort(weights, mass)

    kept = filters.cut(weights, threshold) > 0
    total = float(weights[kept].double().sum())
    assert total >= float(mass) and total - float(weights[kept].min()) < float(mass)


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from([3, 256, 257, 1000]), st.floats(1e-12, 1 - 1e-12))
def test_a_token_of_zero_weight_is_never_drawn(seed: int, vocab_size: int, number: float) -> None:
    weights = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(seed))
    weights = torch.where(weights > 0.7, weights * 1e-20, 0.0)
    weights[:, seed % vocab_size] = 1e-3
    numbers = torch.full((3, 1), number, dtype=torch.float64)

    tokens = filters.draw(weights, numbers)

    assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()


def test_the_first_and_the_last_of_150001_tokens_can_be_drawn() -> None:
    vocab_size = 150_001
    weights = torch.full((2, vocab_size), 1.0 / vocab_size)
    edges = torch.tensor([[0.5 / vocab_size], [(vocab_size - 0.5) / vocab_size]]).double()

    tokens = filters.draw(weights, edges)

    assert tokens.tolist() == [0, vocab_size - 1]


def test_an_all_greedy_batch_computes_only_argmax() -> None:
    sampler = _sampler(1000, [GREEDY, GREEDY])
    logits = _logits(2, 1000).bfloat16()
    _tokens(sampler, logits, [0, 1])

    with torch.profiler.profile() as profile:
        sampler.sample(logits, [0, 1])

    names = {event.key for event in profile.key_averages()}
    assert "aten::gather" in names
    assert not names & {
        "aten::max",
        "aten::sort",
        "aten::topk",
        "aten::softmax",
        "aten::log_softmax",
    }
    assert not any("float" in name or name == "aten::cumsum" for name in names)
