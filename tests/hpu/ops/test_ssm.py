"""Chunked scans compared with their recurrences token by token."""

import pytest
import torch
from torch import Tensor

from hpu.ops.ssm import (
    causal_conv,
    gated_delta_scan,
    gated_delta_step,
    l2_norm,
    mamba2_scan,
    mamba2_step,
    next_conv_state,
    unit_lower_inverse,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 7, 16, 33])
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_in_chunks_equals_its_recurrence(groups: int, length: int) -> None:
    batch, heads, dim, size = 3, 4, 5, 6
    x, dt = random(batch, length, heads, dim), random(batch, length, heads, seed=1).exp()
    b, c = (random(batch, length, groups, size, seed=seed) for seed in (2, 3))
    a, state = -random(heads, seed=4).exp(), random(batch, heads, dim, size, seed=5)

    found, last = mamba2_scan(x, dt, a, b, c, state, chunk=8)

    for token in range(length):
        expected, state = mamba2_step(x[:, token], dt[:, token], a, b[:, token], c[:, token], state)
        torch.testing.assert_close(found[:, token], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=1e-4, rtol=1e-4)


def test_a_mamba2_step_equals_the_formula() -> None:
    x, dt, a = random(1, 2, 3), random(1, 2, seed=1).exp(), -random(2, seed=2).exp()
    b, c, state = random(1, 1, 4, seed=3), random(1, 1, 4, seed=4), random(1, 2, 3, 4, seed=5)

    found, last = mamba2_step(x, dt, a, b, c, state)

    for head in range(2):
        step = dt[0, head]
        expected = (step * a[head]).exp() * state[0, head] + step * torch.outer(x[0, head], b[0, 0])
        torch.testing.assert_close(last[0, head], expected)
        torch.testing.assert_close(found[0, head], expected @ c[0, 0])


def test_mamba2_is_precise_after_a_large_decay() -> None:
    # In float32, differences of cumulative sums over all chunks would be off by several percent.
    length, heads = 64, 1
    dt, a = torch.full((1, length, heads), 1e-3), torch.tensor([-1.0])
    dt[:, :8] = 1e5
    x, ones = torch.ones(1, length, heads, 1), torch.ones(1, length, 1, 1)
    state = torch.zeros(1, heads, 1, 1)

    found, _ = mamba2_scan(x, dt, a, ones, ones, state, chunk=8)

    for token in range(length):
        expected, state = mamba2_step(
            x[:, token], dt[:, token], a, ones[:, token], ones[:, token], state
        )
        torch.testing.assert_close(found[:, token], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_the_gated_delta_rule_in_chunks_equals_its_recurrence(length: int) -> None:
    batch, heads, key_dim, value_dim = 3, 4, 5, 6
    query, key = (l2_norm(random(batch, length, heads, key_dim, seed=seed)) for seed in (0, 1))
    value = random(batch, length, heads, value_dim, seed=2)
    decay = -random(batch, length, heads, seed=3).exp()
    beta = random(batch, length, heads, seed=4).sigmoid()
    state = random(batch, heads, key_dim, value_dim, seed=5)

    found, last = gated_delta_scan(query, key, value, decay, beta, state, chunk=8)

    for token in range(length):
        q, k, v, g, b = (item[:, token] for item in (query, key, value, decay, beta))
        expected, state = gated_delta_step(q, k, v, g, b, state)
        torch.testing.assert_close(found[:, token], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=1e-4, rtol=1e-4)


def test_a_gated_delta_step_equals_the_formula() -> None:
    query, key = random(1, 1, 3), l2_norm(random(1, 1, 3, seed=1))
    value, state = random(1, 1, 2, seed=2), random(1, 1, 3, 2, seed=3)
    decay, beta = torch.tensor([[-0.3]]), torch.tensor([[0.7]])

    found, last = gated_delta_step(query, key, value, decay, beta, state)

    k, v = key[0, 0], value[0, 0]
    kept = (torch.eye(3) - beta * torch.outer(k, k)) @ state[0, 0] * decay.exp()
    expected = kept + beta * torch.outer(k, v)
    torch.testing.assert_close(last[0, 0], expected)
    torch.testing.assert_close(found[0, 0], expected.T @ query[0, 0])


def test_the_gated_delta_rule_is_precise_for_equal_keys() -> None:
    # Repeated tokens without decay: powers of this matrix exceed 10^17.
    length, size = 64, 4
    key = l2_norm(torch.ones(1, length, 1, size))
    value, beta = random(1, length, 1, size), torch.ones(1, length, 1)
    state = torch.zeros(1, 1, size, size)

    found, _ = gated_delta_scan(key, key, value, torch.zeros(1, length, 1), beta, state)

    torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 33])
def test_the_inverse_of_a_unit_lower_triangular_matrix_equals_torch(length: int) -> None:
    lower = random(3, length, length).tril(-1)

    inverse = unit_lower_inverse(lower)

    expected = torch.linalg.inv((lower + torch.eye(length)).double()).float()
    torch.testing.assert_close(inverse, expected, atol=1e-3, rtol=1e-3)


def test_padding_changes_no_state() -> None:
    x, state = random(2, 9, 3, 4), random(2, 3, 4, 4, seed=1)
    b, log = random(2, 9, 3, 4, seed=2), -random(2, 9, 3, seed=3).exp()
    is_real = torch.arange(9).unsqueeze(0) < torch.tensor([[4], [0]])
    none = log.masked_fill(~is_real.unsqueeze(-1), 0.0)

    _, mamba = mamba2_scan(x, -none, torch.full((3,), -1.0), b, b, state, chunk=4)
    _, delta = gated_delta_scan(b, b, x, none, -none, state, chunk=4)

    torch.testing.assert_close(mamba[1], state[1])
    torch.testing.assert_close(delta[1], state[1])
    first = slice(0, 1), slice(0, 4)
    _, expected = mamba2_scan(
        x[first], -log[first], torch.full((3,), -1.0), b[first], b[first], state[:1], chunk=4
    )
    torch.testing.assert_close(mamba[:1], expected, atol=1e-4, rtol=1e-4)


def test_a_chunked_convolution_equals_the_whole_convolution() -> None:
    x, weight, bias = random(2, 9, 3), random(3, 1, 4, seed=1), random(3, seed=2)
    none = torch.zeros(2, 3, 3)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight, bias, groups=3).transpose(1, 2)

    first = causal_conv(x[:, :2], weight, bias, none)
    # Only two of the five tokens in a row are real.
    state = next_conv_state(x[:, :5], none, torch.tensor([2, 2]))
    rest = causal_conv(x[:, 2:], weight, bias, state)

    torch.testing.assert_close(torch.cat((first, rest), dim=1), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(state[:, 1:], x[:, :2])
    assert torch.equal(next_conv_state(x, none, None), x[:, 6:])
