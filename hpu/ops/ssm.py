"""Operators of layers with a fixed-size state per request: causal convolution, and the scans of
Mamba 2 and of the gated delta rule, over the chunks of a prompt and for a single token.

Plain torch operations in static shapes: loops depend on shapes, not on data. A padding token must
leave the state unchanged: its step size (Mamba 2), or the logarithm of its decay and its beta
(gated delta rule), must be 0. Tensors have at most 5 dimensions, the maximum of Gaudi kernels.
Parameters `matmul` multiply float32 matrices, which torch.matmul cannot do on some cards.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from config.model.state_space import GATED_DELTA_CHUNK, MAMBA2_CHUNK
from hpu.ops.products import Matmul

L2_EPS = 1e-6
"""Epsilon of the L2 norm of queries and keys in the gated delta rule."""


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
    """Depthwise causal convolution over K inputs (the token and the K - 1 inputs before it), in
    float32.

    `x` (B, Q, C); `weight` (C, 1, K), the last tap applies to the token itself; `bias` (C);
    `state` (B, K - 1, C): the inputs before the first token, 0 where there is no input. Returns
    (B, Q, C) float32.
    """
    num_taps, length = weight.shape[-1], x.shape[1]
    window = torch.cat((state, x), dim=1).float()
    taps = weight.float().unbind(-1)
    out = window[:, :length] * taps[0].view(-1)
    for tap in range(1, num_taps):
        out = out + window[:, tap : tap + length] * taps[tap].view(-1)
    return out if bias is None else out + bias.float()


def next_conv_state(x: Tensor, state: Tensor, lengths: Tensor | None) -> Tensor:
    """Convolution state after the first `lengths` (B) tokens of each row: the last K - 1 inputs,
    (B, K - 1, C). `state`: the inputs before the tokens. `lengths` None: all tokens are real."""
    window = torch.cat((state, x), dim=1)
    batch, total, channels = window.shape
    size = state.shape[1]
    if lengths is None:
        return window[:, total - size :]
    offsets = torch.arange(size, device=x.device, dtype=lengths.dtype)
    rows = torch.arange(batch, device=x.device, dtype=lengths.dtype) * total
    index = (rows + lengths).unsqueeze(1) + offsets
    return window.view(batch * total, channels).index_select(0, index.view(-1)).view_as(state)


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    chunk: int = MAMBA2_CHUNK,
    matmul: Matmul = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(dt_t a) S_(t-1) + dt_t x_t b_t^T and y_t = S_t c_t, for each head, in chunks: the
    state space duality of Mamba 2 (arXiv 2405.21060, section 6).

    `x` (B, Q, heads, P), `dt` (B, Q, heads), `a` (heads) negative, `b` and `c` (B, Q, groups, N),
    where adjacent heads share a group, and `state` (B, heads, P, N), all float32. Returns y (B,
    Q, heads, P) and the state after the last token.
    """
    batch, length, heads, dim = x.shape
    groups, size = b.shape[2:]
    per_group = heads // groups
    chunk = min(chunk, length)
    count = -(-length // chunk)
    padding = count * chunk - length
    decay = dt * a
    if padding:
        x, b, c = (functional.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (x, b, c))
        dt, decay = (functional.pad(tensor, (0, 0, 0, padding)) for tensor in (dt, decay))

    def fold(tensor: Tensor) -> Tensor:
        """(B, Q, groups or heads, ...) -> (M, L, features), where M counts the groups of all
        chunks."""
        tensor = tensor.reshape(batch * count, chunk, groups, -1).transpose(1, 2)
        return tensor.reshape(batch * count * groups, chunk, -1)

    def by_head(tensor: Tensor) -> Tensor:
        """(M, L, heads per group * D) -> (M, heads per group, L, D)."""
        # Contiguous: the output order of an operation on permuted tensors depends on the device.
        return tensor.view(tensor.shape[0], chunk, per_group, -1).transpose(1, 2).contiguous()

    b, c = fold(b), fold(c)
    dt, sums = by_head(fold(dt)), by_head(fold(decay)).squeeze(-1).cumsum(-1)
    values = by_head(fold(x)) * dt
    # Within a chunk: attention of c over b, weighted by the decay between the two tokens.
    scores = matmul(c, b.transpose(1, 2)).unsqueeze(1) * _decays(sums)
    inner = matmul(scores, values)
    # Contribution of each chunk to the state at its end.
    last = sums[..., -1:]
    rest = (values * (last - sums).exp().unsqueeze(-1)).transpose(2, 3)
    added = matmul(rest.reshape(-1, per_group * dim, chunk), b)
    added = added.view(batch, count, heads, dim * size).transpose(1, 2)
    # State at the start of each chunk and after the last chunk, from all earlier contributions.
    starts = torch.cat((state.reshape(batch, heads, 1, dim * size), added), dim=2)
    starts = matmul(_chunk_decays(last.view(batch, count, heads).transpose(1, 2)), starts)
    before = starts[:, :, :count].transpose(1, 2).reshape(-1, per_group * dim, size)
    outer = by_head(matmul(c, before.transpose(1, 2)))
    out = inner + outer * sums.exp().unsqueeze(-1)
    # (M, heads per group, L, P) -> (B, Q, heads, P).
    out = out.transpose(1, 2).reshape(batch * count, groups, chunk, per_group * dim)
    out = out.transpose(1, 2).reshape(batch, count * chunk, heads, dim)[:, :length]
    return out, starts[:, :, count].view(batch, heads, dim, size)


def mamba2_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    matmul: Matmul = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """`mamba2_scan` for a single token: tensors without the token dimension."""
    batch, heads, dim = x.shape
    groups, size = b.shape[1:]
    added = (x * dt.unsqueeze(-1)).view(batch, groups, -1, 1) * b.unsqueeze(2)
    decay = (dt * a).exp().view(batch, heads, 1, 1)
    state = state * decay + added.view(batch, heads, dim, size)
    out = matmul(state.view(batch, groups, -1, size), c.unsqueeze(-1))
    return out.view(batch, heads, dim), state


def gated_delta_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int = GATED_DELTA_CHUNK,
    matmul: Matmul = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T and o_t = S_t^T q_t, for
    each head, in chunks by the UT transform (gated DeltaNet, arXiv 2412.06464, section 3.3).

    `query` and `key` (B, Q, heads, K), normalized and scaled, `value` (B, Q, heads, V), `decay` g
    (B, Q, heads), at most 0, `beta` (B, Q, heads) and `state` (B, heads, K, V), all float32.
    Returns o (B, Q, heads, V) and the state after the last token.
    """
    batch, length, heads, key_dim = key.shape
    value_dim = value.shape[-1]
    chunk = min(chunk, length)
    count = -(-length // chunk)
    padding = count * chunk - length
    if padding:
        query, key, value = (
            functional.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (query, key, value)
        )
        decay, beta = (functional.pad(tensor, (0, 0, 0, padding)) for tensor in (decay, beta))

    def fold(tensor: Tensor) -> Tensor:
        """(B, Q, heads, D) -> (B * heads, chunks, L, D). Contiguous, so that a compiled recipe
        and its trace agree on views."""
        return tensor.transpose(1, 2).reshape(batch * heads, count, chunk, -1).contiguous()

    query, key, value = fold(query), fold(key), fold(value)
    beta = fold(beta.unsqueeze(-1))
    sums = fold(decay.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    decays, growth = _decays(sums), sums.exp().unsqueeze(-1)
    keys = key.transpose(2, 3)
    inverse = unit_lower_inverse((matmul(key * beta, keys) * decays).tril(-1), matmul)
    values = matmul(inverse, value * beta)
    reads = matmul(inverse, key * (beta * growth))
    last = sums[..., -1:]
    writes = (key * (last - sums).exp().unsqueeze(-1)).transpose(2, 3)
    last = last.exp().unsqueeze(-1)
    state = state.reshape(batch * heads, key_dim, value_dim)
    starts, news = [], []
    for index in range(count):
        starts.append(state)
        new = values[:, index] - matmul(reads[:, index], state)
        news.append(new)
        state = state * last[:, index] + matmul(writes[:, index], new)
    out = matmul(query * growth, torch.stack(starts, dim=1))
    out = out + matmul(matmul(query, keys) * decays, torch.stack(news, dim=1))
    out = out.view(batch, heads, count * chunk, value_dim).transpose(1, 2)[:, :length]
    return out, state.view(batch, heads, key_dim, value_dim)


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    matmul: Matmul = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_scan` for a single token: tensors without the token dimension."""
    state = state * decay.exp().unsqueeze(-1).unsqueeze(-1)
    key = key.unsqueeze(2)
    delta = (value.unsqueeze(2) - matmul(key, state)) * beta.unsqueeze(-1).unsqueeze(-1)
    state = state + key.transpose(2, 3) * delta
    return matmul(query.unsqueeze(2), state).squeeze(2), state


def l2_norm(x: Tensor) -> Tensor:
    """`x` (..., D) divided by its L2 norm; L2_EPS is added to the squared norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def unit_lower_inverse(lower: Tensor, matmul: Matmul = torch.matmul) -> Tensor:
    """(I + `lower`)^-1 of strictly lower triangular matrices (..., L, L).

    Block inversion with block sizes that double, ((A, 0), (C, B))^-1 = ((A^-1, 0), (-B^-1 C A^-1,
    B^-1)): a few matmuls of whole matrices, with small rounding errors. A product of powers
    of `lower` would need fewer operations, but the powers grow without bound for similar keys.
    Gaudi has no triangular solver (aten::linalg_solve_triangular is not registered).
    """
    length = lower.shape[-1]
    index = torch.arange(length, device=lower.device)
    unit = (index.unsqueeze(1) == index).to(lower.dtype)
    inverse = unit - lower.masked_fill(_outside_pairs(index, 1), 0.0)
    size = 2
    while size < length:
        below = lower.masked_fill(_outside_pairs(index, size), 0.0)
        inverse = inverse - matmul(matmul(inverse, below), inverse)
        size *= 2
    return inverse


def _outside_pairs(index: Tensor, size: int) -> Tensor:
    """(L, L) bool: False where the row is in the second block, and the column in the first
    block, of a pair of blocks of `size`."""
    blocks = torch.div(index, size, rounding_mode="floor")
    rows = blocks.unsqueeze(1)
    return (rows - blocks != 1) | (torch.remainder(rows, 2) == 0)


def _decays(sums: Tensor) -> Tensor:
    """exp(sums_i - sums_j) for j <= i, 0 above the diagonal: (..., L) to (..., L, L)."""
    length = sums.shape[-1]
    index = torch.arange(length, device=sums.device)
    between = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    # Mask before the exponential, which could be infinite.
    return between.masked_fill(index > index.unsqueeze(1), -math.inf).exp()


def _chunk_decays(totals: Tensor) -> Tensor:
    """Decay between chunk boundaries, from the decay exponents of the chunks: (..., count) ->
    (..., count + 1, count + 1), lower triangular. Entry (i, j) is the decay from the start of
    chunk j to the start of chunk i; the last boundary is the end of the last chunk.

    Exponents are summed per segment: differences of a cumulative sum lose precision in float32
    on long prompts.
    """
    count = totals.shape[-1]
    chunks = torch.arange(count, device=totals.device).unsqueeze(1)
    begins = torch.arange(count + 1, device=totals.device)
    between = totals.unsqueeze(-1).expand(*totals.shape, count + 1)
    between = functional.pad(between.masked_fill(chunks < begins, 0.0).cumsum(-2), (0, 0, 1, 0))
    return between.masked_fill(begins > begins.unsqueeze(1), -math.inf).exp()
