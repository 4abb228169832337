"""Sizes of layers that keep a fixed-size state per request instead of keys and values: Mamba 2,
gated DeltaNet and gated short convolutions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

MAMBA2_CHUNK = 128
"""Chunk size in tokens for Mamba 2: larger chunks need larger matrices within a chunk and a smaller
matrix between chunks."""

GATED_DELTA_CHUNK = 64
"""Chunk size in tokens for gated DeltaNet, as in the reference kernels."""

StateKind = Literal["mamba2", "gated_delta", "short_conv"]
Divided = tuple[int, str, bool]
"""(count, name, may_repeat) of heads, groups or features that ranks divide. may_repeat: they are
replicated if there are fewer of them than ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A Mamba 2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups. The adjacent heads of a group share B and C."""
    state_size: int
    conv_kernel: int
    """Kernel size of the convolution, including the current token."""
    conv_bias: bool
    proj_bias: bool

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of B, and also of C."""
        return self.num_groups * self.state_size

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.group_size

    @property
    def conv_elements(self) -> int:
        """Elements of a request's convolution state."""
        return (self.conv_kernel - 1) * self.conv_size

    @property
    def state_elements(self) -> int:
        """Elements of a request's recurrent state, which is float32."""
        return self.num_heads * self.head_dim * self.state_size

    @property
    def scan_elements(self) -> int:
        """Estimated number of float32 elements per token during the scan of a prefill."""
        states = self.inner_size * self.state_size // MAMBA2_CHUNK
        return 3 * self.num_heads * MAMBA2_CHUNK + 6 * self.inner_size + 3 * states

    def divided(self) -> Iterator[Divided]:
        yield self.num_heads, "heads of its Mamba layers", False
        yield self.num_groups, "groups of its Mamba layers (mamba_n_groups)", True

    def on_rank(self, num_ranks: int) -> "Mamba2Spec":
        """The shard of the layer on each of `num_ranks` ranks: heads are divided; groups are
        replicated if there are fewer groups than ranks."""
        groups = max(1, self.num_groups // num_ranks)
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated DeltaNet layer."""

    num_key_heads: int
    """Number of query heads and of key heads."""
    num_value_heads: int
    """Number of value heads, a multiple of `num_key_heads`: adjacent value heads share a key
    head."""
    key_dim: int
    value_dim: int
    conv_kernel: int
    """Kernel size of the convolution."""
    fused_weights: bool
    """Whether the checkpoint has in_proj_qkvz and in_proj_ba, each grouped by key head, instead of
    in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def conv_elements(self) -> int:
        return (self.conv_kernel - 1) * self.conv_size

    @property
    def state_elements(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def scan_elements(self) -> int:
        states = self.state_elements // GATED_DELTA_CHUNK
        keys = self.num_value_heads * self.key_dim
        pairs = self.num_value_heads * GATED_DELTA_CHUNK
        return 6 * pairs + 6 * keys + 6 * self.value_size + states

    def divided(self) -> Iterator[Divided]:
        yield self.num_value_heads, "value heads of its linear attention", False
        yield self.num_key_heads, "key heads of its linear attention", True

    def on_rank(self, num_ranks: int) -> "GatedDeltaSpec":
        """The shard of the layer on each of `num_ranks` ranks: value heads and key heads are
        divided; key heads are replicated if there are fewer key heads than ranks."""
        key_heads = max(1, self.num_key_heads // num_ranks)
        value_heads = self.num_value_heads // num_ranks
        return replace(self, num_key_heads=key_heads, num_value_heads=value_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated short convolution (LFM2). Its state is only the last inputs of the convolution."""

    conv_size: int
    """Channels of the convolution."""
    conv_kernel: int
    """Kernel size of the convolution, including the current token."""
    bias: bool
    """Whether the convolution and both projections have biases."""

    @property
    def conv_elements(self) -> int:
        return (self.conv_kernel - 1) * self.conv_size

    @property
    def state_elements(self) -> int:
        return 0

    @property
    def scan_elements(self) -> int:
        """Estimated number of float32 elements per token: the inputs, two sums and the product."""
        return 4 * self.conv_size

    def divided(self) -> Iterator[Divided]:
        yield self.conv_size, "channels of its short convolutions", False

    def on_rank(self, num_ranks: int) -> "ShortConvSpec":
        """The shard of the layer on each of `num_ranks` ranks: channels are divided."""
        return replace(self, conv_size=self.conv_size // num_ranks)


StateSpec = Mamba2Spec | GatedDeltaSpec | ShortConvSpec
