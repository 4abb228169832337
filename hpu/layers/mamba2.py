"""Mamba 2 (arXiv 2405.21060): a selective state space in place of attention.

(z, x, B, C, d) = in_proj(hidden); (x, B, C) = silu(conv(x, B, C)); dt = softplus(d + dt_bias); for
each head S_t = exp(-dt_t exp(A_log)) S_(t-1) + dt_t x_t B_t^T and y_t = S_t C_t + D x_t; output
out_proj(norm(y * silu(z))). The state of a request is S and the last inputs of the convolution.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.model.state_space import Mamba2Spec
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.gated_norm import GatedRMSNorm
from hpu.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from hpu.layers.metadata import AttentionMetadata
from hpu.layers.state_cache import StateCache, recurrent_spec
from hpu.ops.products import Matmul
from hpu.ops.rope import Rotation
from hpu.ops.ssm import causal_conv, mamba2_scan, mamba2_step, next_conv_state


class Mamba2Mixer(nn.Module):
    """Mamba 2 layer. Parameters are allocated, not filled; the parameters of the recurrence are
    float32."""

    conv_bias: nn.Parameter | None

    def __init__(
        self,
        spec: Mamba2Spec,
        *,
        in_proj: MergedColumnParallelLinear,
        out_proj: RowParallelLinear,
        eps: float,
        group: ProcessGroup = SINGLE,
        ranks_per_group: int = 1,
    ) -> None:
        """`spec`: sizes on this rank. `in_proj` has the outputs z, x, B, C and d.
        `ranks_per_group`: number of adjacent ranks in `group` that share B and C."""
        super().__init__()
        self.spec = spec
        self.in_proj = in_proj
        self.out_proj = out_proj
        parameter = in_proj.new_parameter
        self.conv_weight = parameter(spec.conv_size, 1, spec.conv_kernel)
        self.conv_bias = parameter(spec.conv_size) if spec.conv_bias else None
        self.A_log = parameter(spec.num_heads, dtype=torch.float32)
        self.D = parameter(spec.num_heads, dtype=torch.float32)
        self.dt_bias = parameter(spec.num_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(
            parameter(spec.inner_size),
            spec.inner_size // spec.num_groups,
            eps,
            norm_first=False,
            ranks=group,
            ranks_per_group=ranks_per_group,
        )
        conv = (spec.conv_kernel - 1, spec.conv_size)
        recurrent = (spec.num_heads, spec.head_dim, spec.state_size)
        self.state = StateCache(recurrent_spec(conv, recurrent, in_proj.dtype))
        self.matmul: Matmul = torch.matmul

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden). Updates the states of the sequences."""
        spec, states = self.spec, metadata.states
        assert states is not None, "a launch of a model with states names them"
        batch, length, _ = hidden.shape
        sizes = [spec.inner_size, spec.conv_size, spec.num_heads]
        gate, inputs, step = self.in_proj(hidden).split_with_sizes(sizes, -1)
        conv_state, state = self.state.read(states)
        mixed = functional.silu(causal_conv(inputs, self.conv_weight, self.conv_bias, conv_state))
        sizes = [spec.inner_size, spec.group_size, spec.group_size]
        x, b, c = mixed.split_with_sizes(sizes, -1)
        x = x.reshape(batch, length, spec.num_heads, spec.head_dim)
        b, c = (
            tensor.reshape(batch, length, spec.num_groups, spec.state_size) for tensor in (b, c)
        )
        dt = functional.softplus(step.float() + self.dt_bias)
        a = -self.A_log.exp()
        if states.is_real is None:
            out, state = mamba2_step(*(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], state), self.matmul)
        else:
            dt = dt.masked_fill(~states.is_real.unsqueeze(-1), 0.0)
            out, state = mamba2_scan(x, dt, a, b, c, state, matmul=self.matmul)
        self.state.write(states, (next_conv_state(inputs, conv_state, states.lengths), state))
        out = out.view(x.shape) + self.D.unsqueeze(-1) * x
        return self.out_proj(self.norm(out.view(batch, length, -1), gate))  # type: ignore[no-any-return]
