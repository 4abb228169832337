"""Adds LoRA adapters to the layers of a loaded model: wraps the methods and kernels of linear
layers, the token embedding and the output head.

The head is different: the results of its LoRA `a` matrices are appended to the hidden states as
extra columns, so that rows can be selected and sampled without knowing their adapters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpu.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hpu.layers.linear import Kernel, LinearBase
from hpu.lora.context import LoRAContext
from hpu.lora.slots import PaddedSlots, PerAdapterSlots, Slots
from hpu.quantization.base import LinearLayer, LinearMethod


class LoRALinearMethod:
    """LinearMethod that adds the adapters' LoRA delta to the output of another method."""

    def __init__(self, base: LinearMethod, slots: Slots) -> None:
        self._base = base
        self._slots = slots

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        self._base.create_weights(layer, in_features, out_features)

    def process_weights(self, layer: LinearLayer) -> None:
        self._base.process_weights(layer)

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._slots.add(x, self._base.apply(layer, x, bias))


class LoRAKernel:
    """Kernel that adds the adapters' LoRA delta to the output of another kernel."""

    def __init__(self, base: Kernel, slots: Slots) -> None:
        self.base = base
        self._slots = slots

    def __call__(self, x: Tensor) -> Tensor:
        return self._slots.add(x, self.base(x))


def wrap_linear(layer: LinearBase, slots: Slots) -> None:
    """Make `layer` add the LoRA delta of `slots` to its output."""
    layer.adds_adapters = True
    if layer.kernel is not None:
        layer.use_kernel(LoRAKernel(layer.kernel, slots))
    else:
        layer.method = LoRALinearMethod(layer.method, slots)


class HeadSlots:
    """Slots of the head. `extend` multiplies by the LoRA `a` matrices in the forward pass and
    appends the results to the hidden states; `apply` multiplies them by the `b` matrices."""

    def __init__(self, slots: PerAdapterSlots | PaddedSlots, context: LoRAContext) -> None:
        self._slots = slots
        self._context = context

    def extend(self, hidden: Tensor) -> Tensor:
        """(B, Q, hidden) to (B, Q, hidden + slots * rank)."""
        return torch.cat((hidden, self._slots.low_rank(hidden)), dim=-1)

    def apply(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Logits of extended hidden states (M, hidden + slots * rank), or of hidden states without
        adapters (M, hidden)."""
        size = self._slots.in_features
        if x.shape[-1] == size:
            return base(x)
        # Contiguous: kernels read rows by address.
        out = base(x[..., :size].contiguous())
        return self._slots.add_low_rank(x[..., size:], out)


class _HeadMethod:
    def __init__(self, base: LinearMethod, slots: HeadSlots) -> None:
        self._base = base
        self._slots = slots

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        self._base.create_weights(layer, in_features, out_features)

    def process_weights(self, layer: LinearLayer) -> None:
        self._base.process_weights(layer)

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._slots.apply(lambda own: self._base.apply(layer, own, bias), x)


def wrap_head(head: ParallelLMHead, slots: HeadSlots) -> None:
    """Make the head accept extended hidden states."""
    kernel = head.kernel
    if kernel is not None:
        head.use_kernel(lambda x: slots.apply(kernel, x))
    else:
        head.method = _HeadMethod(head.method, slots)


class EmbeddingSlots:
    """Low-rank embedding tables: the column of `a` for each token, times `b`."""

    def __init__(
        self, slots: PerAdapterSlots | PaddedSlots, context: LoRAContext, multiplier: float
    ) -> None:
        self._slots = slots
        self._context = context
        self._multiplier = multiplier

    def hook(self, module: nn.Module, args: tuple[Any, ...], hidden: Tensor) -> Tensor:
        """Forward hook of VocabParallelEmbedding: adds the adapters' vectors to the looked-up
        embeddings."""
        (ids,) = args
        slots = self._slots
        if self._context.slots is None:
            return hidden
        if self._multiplier != 1:
            delta = slots.add_looked_up(ids, torch.zeros_like(hidden))
            return hidden + delta * self._multiplier
        return slots.add_looked_up(ids, hidden)


def wrap_embedding(embedding: VocabParallelEmbedding, slots: EmbeddingSlots) -> None:
    embedding.register_forward_hook(slots.hook)
