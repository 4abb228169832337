"""Rotary position embedding (RoPE): scaled frequencies, the cos/sin table, and the rotation."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.checkpoint.operations import ROPE_TYPES
from config.errors import ConfigError
from config.model.json_fields import shown
from config.model.model_config import ModelConfig, RopeConfig, RopeScaling
from hpu.ops.kernels import Kernels


class Rotation(NamedTuple):
    """Cosines and sines at the positions of a launch, (B, Q, 1, rotated size) each."""

    cos: Tensor
    sin: Tensor
    """The first half is negated, for x * cos + (x2, x1) * sin. With fused kernels it is not negated
    (RotaryEmbedding.restore_sin_sign): `Kernels.rotate` computes x * cos + (-x2, x1) * sin."""


def _default(theta: float, size: int) -> Tensor:
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return torch.pow(torch.tensor(theta, dtype=torch.float32), exponents).reciprocal()


def _dynamic(
    theta: float, scaling: RopeScaling, size: int, length: int, max_position: int
) -> Tensor:
    """NTK-aware scaling: default frequencies within the trained length. For longer sequences all
    positions use the base that the longest served sequence needs, because cached keys are never
    rotated again."""
    ratio = max(length, max_position) / max_position
    growth = scaling.factor * ratio - (scaling.factor - 1)
    return _default(theta * growth ** (size / (size - 2)), size)


def _llama3(theta: float, scaling: RopeScaling, size: int, max_position: int) -> Tensor:
    """Llama 3 scaling: low frequencies are divided by the factor, high frequencies are
    unchanged, with a smooth transition between."""
    default = _default(theta, size)
    original = scaling.original_max_position or max_position
    rotations = original * default / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low == high:
        # Llama 4 Scout is published with equal factors: no transition.
        smooth = (rotations >= low).float()
    else:
        smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return default / scaling.factor * (1 - smooth) + default * smooth


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def get_mscale(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return get_mscale(scaling.mscale) / get_mscale(scaling.mscale_all_dim)
    return get_mscale(1.0)


def _yarn(theta: float, scaling: RopeScaling, size: int, max_position: int) -> Tensor:
    """YaRN scaling: high-frequency dimensions are unchanged, low-frequency dimensions are
    interpolated, with a linear ramp between."""
    default = _default(theta, size)
    original = scaling.original_max_position or max_position

    def dimension(rotations: float) -> float:
        """Dimension that rotates `rotations` times within the original length."""
        wavelengths = math.log(original / (rotations * 2 * math.pi))
        return size * wavelengths / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return default / scaling.factor * ramp + default * (1 - ramp)


def _longrope(
    theta: float, scaling: RopeScaling, size: int, length: int, max_position: int
) -> tuple[Tensor, float]:
    """LongRoPE: a factor per dimension. All positions use the long factors if sequences beyond
    the original length may be served, because cached keys are never rotated again."""
    original = scaling.original_max_position or max_position
    factors = scaling.long_factor if length > original else scaling.short_factor
    if len(factors) != size // 2:
        raise ConfigError(
            f"longrope has {len(factors)} factors, it must have {size // 2} for {size} rope "
            "dimensions of a head"
        )
    attention = scaling.attention_factor
    if attention is None:
        growth = max(math.log(max(scaling.factor, 1.0)), 0.0)
        attention = math.sqrt(1 + growth / math.log(original))
    return _default(theta, size) / torch.tensor(factors), attention


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, *, length: int, max_position: int
) -> tuple[Tensor, float]:
    """(frequencies (rotated size / 2) in float32, factor on cos and sin) for sequences of at most
    `length` tokens of a model trained for `max_position`. Raises ConfigError."""
    theta, size, scaling = rope.theta, rope.rotated_size(head_dim), rope.scaling
    kind = "default" if scaling is None else scaling.kind
    if scaling is None or kind == "default":
        return _default(theta, size), 1.0
    if kind == "linear":
        return _default(theta, size) / scaling.factor, 1.0
    if kind == "dynamic":
        return _dynamic(theta, scaling, size, length, max_position), 1.0
    if kind == "llama3":
        return _llama3(theta, scaling, size, max_position), 1.0
    if kind == "yarn":
        return _yarn(theta, scaling, size, max_position), _yarn_attention_factor(scaling)
    if kind == "longrope":
        return _longrope(theta, scaling, size, length, max_position)
    raise ConfigError(f"rope scaling {shown(kind)} is not one of {', '.join(ROPE_TYPES)}")


class RotaryEmbedding(nn.Module):
    """Cosines and sines by position: `table` (length, 2 * rotated size), cos before sin."""

    table: Tensor

    def __init__(
        self,
        config: ModelConfig,
        rope: RopeConfig,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`rope`: the RoPE configuration to use, a field of `config`."""
        super().__init__()
        frequencies, factor = inverse_frequencies(
            rope, config.head_dim, length=length, max_position=config.max_position
        )
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        self._sections = rope.sections
        self._axes: list[Tensor] = []
        if rope.interleaves_sections and rope.sections:
            # Rotation entries of the height axis and of the width axis, in both halves.
            for axis, size in enumerate(rope.sections[1:], 1):
                is_own = torch.zeros(len(frequencies), dtype=torch.bool)
                is_own[axis : 3 * size : 3] = True
                self._axes.append(is_own.repeat(2).to(device))
        self.register_buffer("table", table.to(device=device, dtype=dtype), persistent=False)

    def restore_sin_sign(self) -> None:
        """Undo the negation of the first half of sin, for fused kernels. Call once only."""
        size = self.table.shape[1] // 4
        signs = torch.ones(4 * size, dtype=self.table.dtype)
        signs[2 * size : 3 * size] = -1
        # Multiply the whole table: in lazy mode a write to a part would copy the whole table.
        self.table.mul_(signs.to(self.table.device))

    def forward(self, positions: Tensor) -> Rotation:
        """Rotations at `positions` (B, Q), or (3, B, Q) for M-RoPE, where each axis has a
        section of the frequencies."""
        if positions.dim() > 2:
            return Rotation(*map(self._joined, self._rotations(positions)))
        return self._rotations(positions)

    def _joined(self, axes: Tensor) -> Tensor:
        """Combine the rotations of three axes, (3, B, Q, 1, rotated size), into (B, Q, 1,
        rotated size)."""
        if self._axes:
            time, height, width = axes
            is_height, is_width = self._axes
            return torch.where(is_height, height, torch.where(is_width, width, time))
        sections = [*self._sections, *self._sections]
        assert sections, "positions with three axes, and a rope without sections"
        parts = torch.split(axes, sections, dim=-1)
        return torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)

    def _rotations(self, positions: Tensor) -> Rotation:
        *outer, query = positions.shape
        rows = self.table.index_select(0, positions.reshape(-1)).view(*outer, query, 1, -1)
        cos, sin = rows.chunk(2, dim=-1)
        return Rotation(cos, sin)


def rotate(heads: Tensor, rotation: Rotation, kernels: Kernels | None = None) -> Tensor:
    """Rotate `heads` (B, Q, heads, head_dim), queries and keys together, to their positions."""
    size = rotation.cos.shape[-1]
    if size < heads.shape[-1]:
        rotated = rotate(heads[..., :size], rotation, kernels)
        return torch.cat((rotated, heads[..., size:]), dim=-1)
    if kernels is not None:
        return kernels.rotate(heads, rotation.cos, rotation.sin)
    low, high = heads.chunk(2, dim=-1)
    # Not addcmul: the vendor's compile back end excludes it from compiled graphs.
    return heads * rotation.cos + torch.cat((high, low), dim=-1) * rotation.sin
