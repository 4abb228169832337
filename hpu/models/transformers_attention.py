"""Paged attention behind transformers' attention interface, and the trial run that finds out what
each layer of a foreign model asks of it.

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
"""Name among transformers' attention functions. It is not among the mask functions, so the models
build no masks."""
MODULE = "paged_attention"
"""Attribute of transformers' attention modules that holds their LayerAttention."""


class Unsupported(Exception):
    """Says, as part of a sentence, what a model's code does that cannot be driven."""


class CurrentLaunch:
    """The metadata of the launch that runs. The attention of all layers reads it: most models do
    not pass foreign arguments down to their attention."""

    metadata: AttentionMetadata | None = None
    """None between launches."""


class AttentionCall(NamedTuple):
    """What one layer asks of attention."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    """Tokens that a query sees, its own included; None: all."""
    soft_cap: float | None
    has_sinks: bool
    shares_with: int | None = None
    """The call whose keys and values it has; None: they are its own."""


class LayerAttention(nn.Module):
    """The paged attention of one layer, without its projections."""

    def __init__(
        self,
        shape: HeadShape,
        dtype: torch.dtype,
        kind: AttentionKind,
        launch: CurrentLaunch,
        *,
        rank: int,
    ) -> None:
        """`rank`: of the tensor-parallel ranks, which divide the heads."""
        super().__init__()
        self.attn = PagedAttention(shape, dtype, kind)
        self._heads = slice(rank * shape.num_heads, (rank + 1) * shape.num_heads)
        self._launch = launch
        self._zeroes_non_finite = False

    def use_kernels(self, kernels: Kernels) -> None:
        """Run on fused kernels from now on."""
        self.attn.impl = kernels.make_attention()

    def zero_non_finite(self) -> None:
        """SelfAttention.zero_non_finite, for the attention of a foreign model."""
        self._zeroes_non_finite = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """`query` (B, heads, Q, D), `key` (B, kv_heads, Q, D) and `value` (B, kv_heads, Q, E), E at
        most D, to (B, Q, heads, E). `sinks`: of the heads of all ranks."""
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
        return out if is_bad is None else spoiled(out, is_bad.unsqueeze(-1))


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. What the arguments say beside the tensors was recorded
    by `record_calls` and does not change."""
    return getattr(module, MODULE)(query, key, value, kwargs.get("s_aux")), None


def record_calls(run: Callable[[], object]) -> list[AttentionCall]:
    """The calls of attention that `run`, a forward pass on the meta device, makes, in order.
    Raises Unsupported for one that paged attention cannot answer, and for code whose control flow
    depends on values."""
    calls: list[AttentionCall] = []
    # The tensors are kept, so that no other one gets their identity.
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
    except Unsupported:
        raise
    except Exception as error:
        # Foreign code: whatever it raises here, it would raise in every launch.
        text = str(error).strip().partition("\n")[0]
        raise Unsupported(
            f"does not run without the values of its tensors ({type(error).__name__}: {text:.160})"
        ) from error
    finally:
        register()
    return calls


def _shared_with(
    module: nn.Module, key: Tensor, value: Tensor, pairs: list[tuple[Tensor, Tensor]]
) -> int | None:
    """The first of the earlier calls, which had `pairs`, with the same keys and values."""
    for index, (other_key, other_value) in enumerate(pairs):
        if key is other_key and value is other_value:
            return index
        if key is other_key or value is other_value:
            raise Unsupported("has layers that share keys and not values, or values and not keys")
    if getattr(module, "is_kv_shared_layer", False):
        raise Unsupported("has layers that share keys which no earlier layer has")
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
        raise Unsupported("has a bias by position")
    if attention_mask is not None:
        raise Unsupported("builds its own attention mask")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise Unsupported("has attention that is not causal")
    if (
        key.shape[:-1] != value.shape[:-1]
        or query.shape[-1] != key.shape[-1]
        or value.shape[-1] > key.shape[-1]
    ):
        raise Unsupported(
            f"has heads of {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]} entries in "
            "queries, keys and values"
        )
    if query.shape[1] % key.shape[1]:
        raise Unsupported(f"has {query.shape[1]} query heads on {key.shape[1]} key heads")
    scale = arguments.get("scaling")
    if scale is not None and not isinstance(scale, int | float):
        raise Unsupported("computes the scale of its attention scores")
    soft_cap = arguments.get("softcap")
    if soft_cap is not None and not isinstance(soft_cap, int | float):
        raise Unsupported("computes the soft cap of its attention scores")
    sinks = arguments.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise Unsupported(
            f"has attention sinks of {tuple(sinks.shape)} for {query.shape[1]} query heads"
        )
    return AttentionCall(
        module,
        query.shape[1],
        key.shape[1],
        key.shape[-1],
        key.shape[-1] ** -0.5 if scale is None else float(scale),
        # Some have 0 for none.
        arguments.get("sliding_window") or None,
        # Likewise.
        float(soft_cap) if soft_cap else None,
        sinks is not None,
    )
