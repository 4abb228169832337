"""A layer of the decoder: attention and MLP with the norms before them. Knows no families and no
files."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.errors import ConfigError
from config.model.json_fields import shown
from hpu.layers.attention import Attention, HeadNorm
from hpu.layers.linear import Linear
from hpu.layers.metadata import AttentionMetadata, Windows
from hpu.native.decoder import LayerWeights
from hpu.native.library import PackedLinear
from hpu.ops.kernels import Kernels
from hpu.ops.norm import mirrored_rms_norm, rms_norm
from hpu.ops.rope import Rotation

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}

MIRRORED_ROWS = 8
"""BatchState up to which a packed norm takes its short form; measured equal at 32."""


def activation_named(name: str) -> Callable[[Tensor], Tensor]:
    """What a checkpoint's `hidden_act` names. Raises ConfigError."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act is {shown(name)}, it must be one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """down(act(gate) * up), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._activation = activation_named(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(self._activation(gate) * up)  # type: ignore[no-any-return]


class Norm(nn.Module):
    """RMS norm of the hidden states."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.eps = eps
        self._mirror: tuple[Tensor, Tensor] | None = None
        self._kernels: Kernels | None = None

    def fuse(self, kernels: Kernels) -> None:
        """Run on fused kernels from now on."""
        self._kernels = kernels

    def pack(self) -> None:
        """Prepare the short form for few rows."""
        signs = torch.tensor([[1.0], [-1.0]], dtype=self.weight.dtype, device=self.weight.device)
        self._mirror = signs, self.weight.detach().expand(2, -1).contiguous()

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) to the same."""
        if self._kernels is not None:
            return self._kernels.rms_norm(hidden, self.weight, self.eps)
        if self._mirror is not None and hidden.shape[0] * hidden.shape[1] <= MIRRORED_ROWS:
            return mirrored_rms_norm(hidden, *self._mirror, self.eps)
        return rms_norm(hidden, self.weight, self.eps)


class Layer(nn.Module):
    """Attention and MLP with the norms before them; each adds `multiplier` times its output."""

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        attention_norm: Norm,
        mlp_norm: Norm,
        *,
        multiplier: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm
        self._multiplier = multiplier

    def forward(self, total: Tensor, rotation: Rotation, plan: AttentionMetadata) -> Tensor:
        """(B, Q, hidden) to the same."""
        delta = self.attention(self.attention_norm(total), rotation, plan)
        total = torch.add(total, delta, alpha=self._multiplier)
        delta = self.mlp(self.mlp_norm(total))
        return torch.add(total, delta, alpha=self._multiplier)

    def native(self, windows: Windows) -> LayerWeights | None:
        """What the compiled library reads; None unless all products are its own."""
        attention, mlp = self.attention, self.mlp
        qkv, out = attention.qkv.product, attention.out.product
        gate_up, down = mlp.gate_up.product, mlp.down.product
        if not (
            isinstance(qkv, PackedLinear)
            and isinstance(out, PackedLinear)
            and isinstance(gate_up, PackedLinear)
            and isinstance(down, PackedLinear)
        ):
            return None
        head_norm, (keys, values) = attention.head_norm, attention.caches
        return LayerWeights(
            *(qkv, out, gate_up, down),
            *(self.attention_norm.weight, self.mlp_norm.weight),
            head_norm.weight if isinstance(head_norm, HeadNorm) else None,
            *(keys, values),
            (windows.size or 0) if attention.is_windowed else 0,
        )
