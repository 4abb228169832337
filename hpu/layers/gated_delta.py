"""Gated DeltaNet (arXiv 2412.06464): linear attention by the delta rule, with a decay.

(q, k, v, z, b, a) = in_proj(hidden); (q, k, v) = silu(conv(q, k, v)); q and k of each head are
L2-normalized, q is divided by sqrt(head_dim); beta = sigmoid(b); g = -exp(A_log) softplus(a +
dt_bias); for each value head S_t = exp(g_t) (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T and
o_t = S_t^T q_t; output out_proj(norm(o) * silu(z)). The state of a request is S and the last inputs
of the convolution.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.model.state_space import GatedDeltaSpec
from hpu.layers.gated_norm import GatedRMSNorm
from hpu.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from hpu.layers.metadata import AttentionMetadata
from hpu.layers.state_cache import StateCache, recurrent_spec
from hpu.ops.products import Matmul
from hpu.ops.rope import Rotation
from hpu.ops.ssm import (
    causal_conv,
    gated_delta_scan,
    gated_delta_step,
    l2_norm,
    next_conv_state,
)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet layer. Parameters are allocated, not filled; the parameters of the recurrence
    are float32."""

    def __init__(
        self,
        spec: GatedDeltaSpec,
        *,
        in_proj: MergedColumnParallelLinear,
        out_proj: RowParallelLinear,
        eps: float,
    ) -> None:
        """`spec`: sizes on this rank. `in_proj` has the outputs q, k, v, z, b and a."""
        super().__init__()
        self.spec = spec
        self.in_proj = in_proj
        self.out_proj = out_proj
        parameter = in_proj.new_parameter
        self.conv_weight = parameter(spec.conv_size, 1, spec.conv_kernel)
        self.A_log = parameter(spec.num_value_heads, dtype=torch.float32)
        self.dt_bias = parameter(spec.num_value_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(parameter(spec.value_dim), spec.value_dim, eps, norm_first=True)
        conv = (spec.conv_kernel - 1, spec.conv_size)
        recurrent = (spec.num_value_heads, spec.key_dim, spec.value_dim)
        self.state = StateCache(recurrent_spec(conv, recurrent, in_proj.dtype))
        self.matmul: Matmul = torch.matmul

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden). Updates the states of the sequences."""
        spec, states = self.spec, metadata.states
        assert states is not None, "a launch of a model with states names them"
        batch, length, _ = hidden.shape
        sizes = [spec.conv_size, spec.value_size, spec.num_value_heads, spec.num_value_heads]
        inputs, gate, rate, step = self.in_proj(hidden).split_with_sizes(sizes, -1)
        conv_state, state = self.state.read(states)
        mixed = functional.silu(causal_conv(inputs, self.conv_weight, None, conv_state))
        query, key, value = mixed.split_with_sizes(
            [spec.key_size, spec.key_size, spec.value_size], -1
        )
        query, key = self._heads(query) * spec.key_dim**-0.5, self._heads(key)
        value = value.reshape(batch, length, spec.num_value_heads, spec.value_dim)
        beta = rate.float().sigmoid()
        decay = functional.softplus(step.float() + self.dt_bias) * -self.A_log.exp()
        if states.is_real is None:
            query, key, value, decay, beta = (
                tensor[:, 0] for tensor in (query, key, value, decay, beta)
            )
            out, state = gated_delta_step(query, key, value, decay, beta, state, self.matmul)
        else:
            is_padding = ~states.is_real.unsqueeze(-1)
            decay, beta = decay.masked_fill(is_padding, 0.0), beta.masked_fill(is_padding, 0.0)
            out, state = gated_delta_scan(
                *(query, key, value, decay, beta, state), matmul=self.matmul
            )
        self.state.write(states, (next_conv_state(inputs, conv_state, states.lengths), state))
        return self.out_proj(self.norm(out.reshape(batch, length, -1), gate))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        """Queries or keys (B, Q, key heads * D) -> L2-normalized heads (B, Q, value heads, D)."""
        spec = self.spec
        heads = l2_norm(x.reshape(*x.shape[:2], spec.num_key_heads, 1, spec.key_dim))
        repeats = spec.num_value_heads // spec.num_key_heads
        return heads.expand(-1, -1, -1, repeats, -1).flatten(2, 3)
