"""Gated short convolution (LFM2), in place of attention.

(B, C, x) = in_proj(hidden); output out_proj(C * conv(B * x)). The state of a request is the last
inputs of the convolution.
"""

from torch import Tensor, nn

from config.model.state_space import ShortConvSpec
from hpu.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from hpu.layers.metadata import AttentionMetadata
from hpu.layers.state_cache import StateCache, StateCacheSpec
from hpu.ops.rope import Rotation
from hpu.ops.ssm import causal_conv, next_conv_state


class ShortConv(nn.Module):
    """Gated short convolution layer. Parameters are allocated, not filled."""

    conv_bias: nn.Parameter | None

    def __init__(
        self,
        spec: ShortConvSpec,
        *,
        in_proj: MergedColumnParallelLinear,
        out_proj: RowParallelLinear,
    ) -> None:
        """`spec`: sizes on this rank. `in_proj` has the outputs B, C and x."""
        super().__init__()
        self.spec = spec
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.conv_weight = in_proj.new_parameter(spec.conv_size, 1, spec.conv_kernel)
        self.conv_bias = in_proj.new_parameter(spec.conv_size) if spec.bias else None
        shape = (spec.conv_kernel - 1, spec.conv_size)
        self.state = StateCache(StateCacheSpec((shape,), (in_proj.dtype,)))

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden). Updates the states of the sequences."""
        states = metadata.states
        assert states is not None, "a launch of a model with states names them"
        before, after, x = self.in_proj(hidden).chunk(3, -1)
        inputs = before * x
        (state,) = self.state.read(states)
        mixed = causal_conv(inputs, self.conv_weight, self.conv_bias, state)
        self.state.write(states, (next_conv_state(inputs, state, states.lengths),))
        return self.out_proj((after * mixed).to(hidden.dtype))  # type: ignore[no-any-return]
