"""Paged attention behind transformers' attention interface, and the trial run that records the
attention calls of each layer.

Source of the interface: https://huggingface.co/docs/transformers/attention_interface
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from hpu.layers.attention import AttentionKind, HeadShape, PagedAttention
from hpu.layers.metadata import AttentionMetadata, DecodeMetadata
from hpu.layers.non_finite import spoiled, zeroed
from hpu.ops.kernels import Kernels

IMPLEMENTATION = "gaudiserve_paged"
"""Name of our attention function in transformers. It has no mask function, so transformers'
mask utilities build no masks."""
MODULE = "paged_attention"
"""Attribute of transformers' attention modules that holds the LayerAttention."""


class UnsupportedModelCode(Exception):
    """Unsupported model code. The message is a verb phrase that completes an error sentence."""


class CurrentLaunch:
    """Metadata of the running launch. The attention of all layers reads it from here: most
    models do not pass extra arguments down to their attention."""

    metadata: AttentionMetadata | None = None
    """None between launches."""


class AttentionCall(NamedTuple):
    """Attention call of a layer."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    """Maximum tokens that a query sees, including itself; None: all."""
    soft_cap: float | None
    has_sinks: bool
    shares_with: int | None = None
    """Index of the earlier call whose keys and values the layer shares; None: the layer computes
    its own keys and values."""


class LayerAttention(nn.Module):
    """Paged attention of a layer, without its projections."""

    def __init__(
        self,
        shape: HeadShape,
        dtype: torch.dtype,
        kind: AttentionKind,
        launch: CurrentLaunch,
        *,
        rank: int,
    ) -> None:
        """`rank`: tensor-parallel rank; the ranks shard the heads."""
        super().__init__()
        self.attn = PagedAttention(shape, dtype, kind)
        self._heads = slice(rank * shape.num_heads, (rank + 1) * shape.num_heads)
        self._launch = launch
        self._zeroes_non_finite = False

    def use_kernels(self, kernels: Kernels) -> None:
        self.attn.impl = kernels.make_attention()

    def zero_non_finite(self, nan: Tensor) -> None:
        """Enable zeroing of non-finite Q, K and V; see SelfAttention.zero_non_finite."""
        self._zeroes_non_finite = True
        self._nan = nan

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """`query` (B, heads, Q, D), `key` (B, kv_heads, Q, D) and `value` (B, kv_heads, Q, E)
        with E <= D to (B, Q, heads, E). `sinks`: sinks of the heads of all ranks."""
        if sinks is not None:
            sinks = sinks[self._heads]
        size, value_size = key.shape[-1], value.shape[-1]
        if value_size < size:
            value = functional.pad(value, (0, size - value_size))
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        is_bad = None
        if self._zeroes_non_finite:
            (query, key, value), tokens = zip(*map(zeroed, (query, key, value)), strict=True)
            is_bad = tokens[0] | tokens[1] | tokens[2]
        metadata = self._launch.metadata
        assert metadata is not None
        if isinstance(metadata, DecodeMetadata):
            out = self.attn(query.contiguous(), key, value, metadata, sinks).unsqueeze(1)
        else:
            out = self.attn(query, key, value, metadata, sinks)
        out = out[..., :value_size]
        return out if is_bad is None else spoiled(out, is_bad.unsqueeze(-1), self._nan)


def register() -> None:
    """Register `IMPLEMENTATION` in transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in each layer. `record_calls` has recorded the
    other arguments, which do not change."""
    return getattr(module, MODULE)(query, key, value, kwargs.get("s_aux")), None


def record_calls(run: Callable[[], object]) -> list[AttentionCall]:
    """Attention calls of `run`, a forward pass on the meta device, in order. Raises
    UnsupportedModelCode."""
    calls: list[AttentionCall] = []
    # Keep the tensors, so that no other tensor gets the same identity.
    pairs: list[tuple[Tensor, Tensor]] = []

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        call = _call(module, query, key, value, attention_mask, kwargs)
        calls.append(call._replace(shares_with=_shared_with(module, key, value, pairs)))
        pairs.append((key, value))
        batch, heads, length, _ = query.shape
        return query.new_empty(batch, length, heads, value.shape[-1]), None

    AttentionInterface.register(IMPLEMENTATION, record)
    try:
        run()
    except UnsupportedModelCode:
        raise
    except Exception as error:
        # Third-party code: an exception here would occur in every launch.
        text = str(error).strip().partition("\n")[0]
        raise UnsupportedModelCode(
            f"does not run without the values of its tensors ({type(error).__name__}: {text:.160})"
        ) from error
    finally:
        register()
    return calls


def _shared_with(
    module: nn.Module, key: Tensor, value: Tensor, pairs: list[tuple[Tensor, Tensor]]
) -> int | None:
    """Index of the first earlier call with the same keys and values; None: no such call. `pairs`:
    keys and values of the earlier calls. Raises UnsupportedModelCode for other forms of sharing."""
    for index, (other_key, other_value) in enumerate(pairs):
        if key is other_key and value is other_value:
            return index
        if key is other_key or value is other_value:
            raise UnsupportedModelCode(
                "has layers that share keys and not values, or values and not keys"
            )
    if getattr(module, "is_kv_shared_layer", False):
        raise UnsupportedModelCode("has layers that share keys which no earlier layer has")
    return None


def _call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    arguments: dict[str, Any],
) -> AttentionCall:
    if arguments.get("position_bias") is not None:
        raise UnsupportedModelCode("has a bias by position")
    if attention_mask is not None:
        raise UnsupportedModelCode("builds its own attention mask")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelCode("has attention that is not causal")
    if (
        key.shape[:-1] != value.shape[:-1]
        or query.shape[-1] != key.shape[-1]
        or value.shape[-1] > key.shape[-1]
    ):
        raise UnsupportedModelCode(
            f"has heads of {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]} entries in "
            "queries, keys and values"
        )
    if query.shape[1] % key.shape[1]:
        raise UnsupportedModelCode(f"has {query.shape[1]} query heads on {key.shape[1]} key heads")
    scale = arguments.get("scaling")
    if scale is not None and not isinstance(scale, int | float):
        raise UnsupportedModelCode("computes the scale of its attention scores")
    soft_cap = arguments.get("softcap")
    if soft_cap is not None and not isinstance(soft_cap, int | float):
        raise UnsupportedModelCode("computes the soft cap of its attention scores")
    sinks = arguments.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise UnsupportedModelCode(
            f"has attention sinks of {tuple(sinks.shape)} for {query.shape[1]} query heads"
        )
    return AttentionCall(
        module,
        query.shape[1],
        key.shape[1],
        key.shape[-1],
        key.shape[-1] ** -0.5 if scale is None else float(scale),
        # Some models pass 0 for no window.
        arguments.get("sliding_window") or None,
        # Some models pass 0 for no soft cap.
        float(soft_cap) if soft_cap else None,
        sinks is not None,
    )
