"""Adapter slots of layers on cards: rows with other adapters, and rows without an adapter, beside a
non-finite adapter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hpu.layers.moe import Experts, ExpertsSpec
from hpu.lora.adapter_weights import LowRank
from hpu.lora.context import LoRAContext
from hpu.lora.experts import ExpertSlots, LoRAMoEMethod
from hpu.lora.slots import LayerShape, PaddedSlots
from hpu.protocol import NO_SLOT

CPU = torch.device("cpu")
SIZE, RANK = 12, 4
ROWS = torch.tensor([0, 1, NO_SLOT, 2, 1])
"""Slot 1 holds the non-finite adapter."""
OTHERS = [0, 2, 3]

BAD = {
    "a": lambda a, b: a.fill_(torch.nan),
    "b": lambda a, b: b[3].fill_(torch.inf),
    "their product": lambda a, b: (a.fill_(3e38), b.fill_(3e38)),
}


def weights(seed: int, output: int = 0, expert: int = 0) -> LowRank:
    made = torch.Generator().manual_seed(100 * seed + 10 * output + expert)
    a, b = (torch.randn(shape, generator=made) for shape in ((RANK - 1, SIZE), (SIZE, RANK - 1)))
    return LowRank("layer", output, expert, a, b)


def make_context() -> LoRAContext:
    context = LoRAContext(3, RANK, torch.float32, CPU, groups_rows=False)
    context.begin(ROWS)
    return context


def copy(stack: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return stack.index_copy_(0, index, source)


def results(poison: Callable[[Tensor, Tensor], object] | None) -> dict[str, Tensor]:
    """Outputs that each kind of slots adds to the rows, after `poison` was applied to the adapter
    of slot 1."""
    context = make_context()
    x = torch.randn((len(ROWS), 2, SIZE), generator=torch.Generator().manual_seed(1))
    ids = torch.arange(2 * len(ROWS)).view(len(ROWS), 2)

    def make(sizes: tuple[int, ...]) -> PaddedSlots:
        shape = LayerShape(SIZE, sizes)
        slots = PaddedSlots(shape, context, copy, lambda size, dtype: torch.zeros(size))
        for slot in range(3):
            parts = [weights(slot, output) for output in range(len(sizes))]
            if slot == 1 and poison is not None:
                poison(parts[-1].a, parts[-1].b)
            slots.set(slot, slots.stage(parts))
        return slots

    linear, merged, head = make((SIZE,)), make((SIZE, SIZE)), make((SIZE,))
    experts = ExpertSlots(2, SIZE, [SIZE], context)
    for slot in range(3):
        parts = [weights(slot, expert=expert) for expert in range(2)]
        if slot == 1 and poison is not None:
            poison(parts[1].a, parts[1].b)
        experts.set(slot, experts.stage(parts))
    flat = x.flatten(0, 1)
    of_experts = experts.add_of(1, context.token_slots(len(flat)), flat, torch.zeros_like(flat))
    return {
        "linear": linear.add(x, torch.zeros_like(x)),
        "merged": merged.add(x, torch.zeros((len(ROWS), 2, 2 * SIZE))),
        "head": head.add_low_rank(head.low_rank(x), torch.zeros_like(x)),
        "embedding": linear.add_looked_up(ids, torch.zeros_like(x)),
        "experts": of_experts.view_as(x),
    }


@pytest.mark.parametrize("name", BAD)
def test_a_non_finite_adapter_affects_only_its_own_rows(name: str) -> None:
    expected = results(None)

    found = results(BAD[name])

    for kind, rows in found.items():
        assert torch.equal(rows[OTHERS], expected[kind][OTHERS]), kind
        assert not rows[[1, 4]].isfinite().all(-1).any(), kind


def test_an_expert_adapter_that_overflows_affects_only_tokens_that_chose_the_expert() -> None:
    context, found = make_context(), []
    base = Experts(ExpertsSpec(2, SIZE, SIZE, "silu"), dtype=torch.float32, device=CPU)
    hidden = torch.randn((len(ROWS), SIZE), generator=torch.Generator().manual_seed(1))
    for parameter in base.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator()))
    for size in (1.0, 1e38):
        w13 = ExpertSlots(2, SIZE, [SIZE, SIZE], context)
        w2 = ExpertSlots(2, SIZE, [SIZE], context)
        for slots, outputs in ((w13, 2), (w2, 1)):
            parts = [weights(1, output, expert) for output in range(outputs) for expert in range(2)]
            for part in parts:
                part.a.mul_(size if part.expert == 1 else 1.0)
            slots.set(1, slots.stage(parts))
        method = LoRAMoEMethod(base.method, context, w13, w2)
        # Row 4 uses the same adapter, but chose the other expert.
        ids, ones = torch.tensor([[1], [1], [1], [0], [0]]), torch.ones(len(ROWS), 1)
        found.append(method.apply(base, hidden, ids, ones))

    others = [0, 2, 3, 4]
    assert torch.equal(found[0][others], found[1][others])
    assert not found[1][1].isfinite().all()


def test_selecting_a_slot_equals_a_masked_product_over_all_slots() -> None:
    context = make_context()
    context.begin(torch.tensor([[0, 1, NO_SLOT], [2, 2, 1]]))
    shape = LayerShape(SIZE, (SIZE, SIZE))
    slots = PaddedSlots(shape, context, copy, lambda size, dtype: torch.zeros(size))
    for slot in range(3):
        slots.set(slot, slots.stage([weights(slot, 0), weights(slot, 1)]))
    x, out = torch.randn((2, 3, SIZE)), torch.randn((2, 3, 2 * SIZE))

    t = torch.nn.functional.linear(x, slots.a.flatten(0, 1)).view(2, 3, 3, 2 * RANK)
    t = t * context.mask.float()
    deltas = [
        torch.matmul(t[..., i * RANK : (i + 1) * RANK].flatten(-2), b.flatten(0, 1))
        for i, b in enumerate(slots.b)
    ]

    assert torch.equal(slots.add(x, out), out + torch.cat(deltas, -1))
