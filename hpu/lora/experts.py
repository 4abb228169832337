"""Adapters of routed experts. An adapter changes the intermediate result of an expert, so a layer
with adapters runs its MoEMethod, not a fused operator of the device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from config.errors import ConfigError
from config.model.decoder_spec import ClampedSwiGLU
from hpu.layers.moe import Experts
from hpu.lora.adapter_weights import LowRank
from hpu.lora.context import LoRAContext
from hpu.protocol import NO_SLOT
from hpu.quantization.base import ExpertsLayer, MoEMethod
from hpu.quantization.unquantized import of_chosen, weights_of


class ExpertSlots:
    """Slots for w13 or w2 of the experts of a layer on this rank: `a` (slots, experts, outputs,
    rank, in) and `b` (slots, experts, outputs, rank, size), padded to the maximum rank."""

    def __init__(
        self, num_experts: int, in_features: int, output_sizes: Sequence[int], context: LoRAContext
    ) -> None:
        self._context = context
        slots, rank = context.max_loras, context.max_rank
        shape = (slots, num_experts, len(output_sizes), rank)
        assert len(set(output_sizes)) == 1, "gate and up are of one size"
        dtype, device = context.dtype, context.device
        self.a = torch.zeros((*shape, in_features), dtype=dtype, device=device)
        self.b = torch.zeros((*shape, output_sizes[0]), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return int(self.a.nbytes + self.b.nbytes)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        raise AssertionError("adapters of experts are applied by add_of")

    def add_of(self, expert: int, slots: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """Add the LoRA deltas of `x` (T, in) for an expert, with the adapter `slots` (T), to `out`
        (T, out)."""
        if self._context.groups_rows:
            for slot in set(slots.tolist()) - {NO_SLOT}:
                rows = (slots == slot).nonzero().view(-1)
                out.index_add_(0, rows, self._product(slot, expert, x[rows]))
            return out
        # All slots are computed, so that no shape depends on the rows.
        for slot in range(self._context.max_loras):
            # Selected, not multiplied by a mask: non-finite values of an adapter must not reach
            # other rows, and 0 * NaN is NaN.
            is_own = (slots == slot).unsqueeze(-1)
            out = out + torch.where(is_own, self._product(slot, expert, x), 0)
        return out

    def _product(self, slot: int, expert: int, x: Tensor) -> Tensor:
        a, b = self.a[slot, expert], self.b[slot, expert]
        deltas = [
            torch.matmul(functional.linear(x, left), two) for left, two in zip(a, b, strict=True)
        ]
        return torch.cat(deltas, dim=-1)

    def stage(self, weights: Sequence[LowRank]) -> list[Tensor]:
        """Tensors that `set` copies. A module without experts is stored as expert 0."""
        a = torch.zeros((1, *self.a.shape[1:]), dtype=self._context.dtype)
        b = torch.zeros((1, *self.b.shape[1:]), dtype=self._context.dtype)
        for weight in weights:
            rank, expert = weight.a.shape[0], weight.expert or 0
            a[0, expert, weight.output, :rank] = weight.a
            b[0, expert, weight.output, :rank] = weight.b.t()
        return [a, b]

    def set(self, slot: int, staged: list[Tensor]) -> None:
        index = torch.tensor([slot], dtype=self._context.index_dtype).to(self._context.device)
        for stack, source in zip((self.a, self.b), staged or (None, None), strict=True):
            if source is None:
                source = torch.zeros((1, *stack.shape[1:]), dtype=stack.dtype)
            stack.index_copy_(0, index, source.to(stack.device))


class RouterSlots(ExpertSlots):
    """Slots of a router or of a shared expert's gate, which may run in another dtype than the
    adapters."""

    def __init__(self, in_features: int, out_features: int, context: LoRAContext) -> None:
        super().__init__(1, in_features, [out_features], context)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(self.a.dtype)
        slots = self._context.token_slots(len(flat))
        delta = self.add_of(0, slots, flat, flat.new_zeros(len(flat), out.shape[-1]))
        return out + delta.view(out.shape).to(out.dtype)


class LoRAMoEMethod:
    """MoEMethod of plain torch operations that adds the adapters' LoRA deltas."""

    def __init__(
        self, base: MoEMethod, context: LoRAContext, w13: ExpertSlots, w2: ExpertSlots
    ) -> None:
        self._base = base
        self._context = context
        self._w13 = w13
        self._w2 = w2

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        self._base.create_weights(layer, num_experts, hidden_size, inner_size)

    def process_weights(self, layer: ExpertsLayer) -> None:
        self._base.process_weights(layer)

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        slots = self._context.token_slots(len(hidden))
        groups_rows = self._context.groups_rows
        if groups_rows and bool((slots == NO_SLOT).all()):
            return self._base.apply(layer, hidden, ids, weights)
        out = torch.zeros_like(hidden, dtype=torch.float32)
        weights = weights.float()
        for index in range(layer.num_experts):
            chosen = ids == index
            scale = (weights * chosen).sum(-1, keepdim=True)
            if not groups_rows:
                output = self._expert(layer, index, hidden, slots) * scale
                out = out + of_chosen(output, chosen)
                continue
            rows = chosen.any(-1).nonzero().view(-1)
            if len(rows):
                own = self._expert(layer, index, hidden[rows], slots[rows])
                out.index_add_(0, rows, own * scale[rows])
        return out.to(hidden.dtype)

    def _expert(self, layer: ExpertsLayer, index: int, x: Tensor, slots: Tensor) -> Tensor:
        """Output (T, hidden) float32 of an expert for `x` (T, hidden)."""
        w13, w2 = weights_of(layer, index, x.dtype)
        w13_bias, w2_bias = (
            None if bias is None else bias[index]
            for bias in (layer.w13_bias, layer.applied_w2_bias)
        )
        inner = self._w13.add_of(index, slots, x, functional.linear(x, w13, w13_bias))
        inner = layer.activation(inner)
        return self._w2.add_of(index, slots, inner, functional.linear(inner, w2, w2_bias)).float()


def wrap_experts(
    experts: Experts, context: LoRAContext, hidden_size: int
) -> dict[str, ExpertSlots]:
    """Add adapters to routed experts. Returns their slots by weight name (w13, w2). Raises
    ConfigError if only a fused operator can read the experts' weights."""
    if experts.w13_weight is None and experts.quantized_weights is None:
        raise ConfigError(
            "--lora-extra-targets has experts, whose weights only a fused operator can read here: "
            "leave them out"
        )
    inner = experts.expert_cost // (3 * hidden_size)
    form = experts.activation_form
    # Interleaved rows of gate and up form a single output.
    is_interleaved = isinstance(form, ClampedSwiGLU) and form.interleaved
    sizes = [2 * inner] if is_interleaved else [inner, inner]
    w13 = ExpertSlots(experts.num_experts, hidden_size, sizes, context)
    w2 = ExpertSlots(experts.num_experts, inner, [hidden_size], context)
    experts.method = LoRAMoEMethod(experts.method, context, w13, w2)
    return {"w13": w13, "w2": w2}
