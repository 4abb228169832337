"""MLPs, and the activation functions that checkpoints name."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.checkpoint.operations import HIDDEN_ACTS, Activation
from config.errors import ConfigError
from config.model.decoder_spec import ClampedSwiGLU
from config.model.json_fields import shown
from hpu.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear

_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
ACTIVATIONS = {name: _FUNCTIONS[kind] for name, kind in HIDDEN_ACTS.items()}
"""Activation functions by hidden_act."""


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Activation function for a checkpoint's `hidden_act`. Raises ConfigError for an unknown
    name."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act is {shown(name)}, it must be one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def gated_activation(activation: str | ClampedSwiGLU) -> Callable[[Tensor], Tensor]:
    """Function of (..., 2 * inner) features: act(gate) * up with gate before up, for the
    checkpoint's `hidden_act`; or a clamped SwiGLU. Raises ConfigError for an unknown name."""
    if isinstance(activation, ClampedSwiGLU):
        return partial(_clamped_swiglu, form=activation)
    function = get_activation(activation)

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return apply


def _clamped_swiglu(gate_up: Tensor, form: ClampedSwiGLU) -> Tensor:
    if form.interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=form.limit)
    return (up.clamp(-form.limit, form.limit) + 1) * (gate * torch.sigmoid(form.alpha * gate))


class GatedMLP(nn.Module):
    """down(act(gate) * up), or a clamped SwiGLU of gate and up, with both in one matmul."""

    def __init__(
        self,
        gate_up_proj: MergedColumnParallelLinear,
        down_proj: RowParallelLinear,
        activation: str | ClampedSwiGLU,
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._activation = gated_activation(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        return self.down_proj(self._activation(self.gate_up_proj(hidden)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(act(up))."""

    def __init__(
        self, up_proj: ColumnParallelLinear, down_proj: RowParallelLinear, activation: str
    ) -> None:
        super().__init__()
        self.up_proj = up_proj
        self.down_proj = down_proj
        self._activation = get_activation(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) -> (B, Q, hidden)."""
        return self.down_proj(self._activation(self.up_proj(hidden)))  # type: ignore[no-any-return]
