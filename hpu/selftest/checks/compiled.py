"""Checks of torch.compile with the vendor's back end."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hpu.selftest.base import BFLOAT16, COMPILE, Card, Check, Comparison, Fallback

if TYPE_CHECKING:
    from torch import Tensor

PLUGIN = "vllm-project/vllm-gaudi"
CAPTURED = Fallback("execution-mode", ("hpu-graphs", "lazy", "eager"))


class Operands(NamedTuple):
    """Named tuple like attention metadata; the compiled function replaces one of its fields."""

    rows: "Tensor"
    slots: "Tensor"


def _compiled(card: Card, function: "Callable[..., Tensor]") -> "Callable[..., Tensor]":
    found: Callable[..., Tensor] = card.torch.compile(
        function, backend="hpu_backend", dynamic=False
    )
    return found


def compiled(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    weight = card.values(16, 16, seed=1)
    # Some cards multiply no float32 matrices.
    on_card = card.put(weight.bfloat16())

    def function(operands: Operands) -> "Tensor":
        operands = operands._replace(rows=operands.rows * 2)
        found: Tensor = torch.relu(operands.rows @ on_card)
        return found.index_select(0, operands.slots)

    run = _compiled(card, function)
    slots = torch.tensor([2, 0, 3]).int()
    for number, size in enumerate((4, 4, 8)):
        rows = card.values(size, 16, seed=number)
        found = run(Operands(card.put(rows.bfloat16()), card.put(slots)))
        expected = torch.relu(rows * 2 @ weight)[slots.long()]
        yield Comparison(f"call {number}, of {size} rows", found, expected, BFLOAT16)


def writes(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    expected = torch.zeros(32, 8)
    cache = card.put(expected)

    def write(cache: "Tensor", rows: "Tensor", slots: "Tensor") -> "Tensor":
        cache.index_copy_(0, slots, rows)
        return cache.index_select(0, slots) * 2

    run = _compiled(card, write)
    for number in range(3):
        rows, slots = card.values(4, 8, seed=number), torch.arange(number, 32, 8).int()
        expected.index_copy_(0, slots.long(), rows)
        found = run(cache, card.put(rows), card.put(slots))
        yield Comparison(f"rows of call {number}", found, rows * 2)
    yield Comparison("the cache after all calls", cache, expected)


def norms(card: Card) -> Iterator[Comparison]:
    """L2 normalization of queries and keys."""

    def function(x: "Tensor") -> "Tensor":
        found: Tensor = x * card.torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
        return found

    run = _compiled(card, function)
    for number in range(2):
        x = card.values(2, 5, 4, 16, seed=number)
        yield Comparison(f"L2 norms, call {number}", run(card.put(x)), function(x))


def guards(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    rows = card.values(4, 8)
    run = _compiled(card, lambda x: x * 2 + 1)
    given = card.put(rows)
    run(given)
    torch.compiler.set_stance("fail_on_recompile", skip_guard_eval_unsafe=True)
    try:
        yield Comparison("a known shape without guards", run(given), rows * 2 + 1)
    finally:
        torch.compiler.set_stance("default")


CHECKS = (
    Check(
        name="torch-compile",
        assumption="compiled code computes what the function computes",
        source=f"{PLUGIN}, vllm_gaudi/utils.py",
        program=compiled,
        fallbacks=(CAPTURED,),
        mode=COMPILE,
        is_quick=True,
        limit_s=60.0,
    ),
    Check(
        name="compiled-cache-writes",
        assumption="compiled code writes a KV cache in place",
        source="HabanaAI/gaudi-pytorch-bridge, PT_HPU_USE_INPLACE_INDEX_COPY",
        program=writes,
        fallbacks=(CAPTURED,),
        mode=COMPILE,
        needs=("torch-compile",),
        is_quick=True,
        limit_s=60.0,
    ),
    Check(
        name="compiled-norms",
        assumption="compiled norms of gated DeltaNet are right",
        source=f"{PLUGIN}, vllm_gaudi/ops/hpu_gdn_pytorch.py",
        program=norms,
        fallbacks=(CAPTURED,),
        mode=COMPILE,
        needs=("torch-compile",),
        limit_s=60.0,
    ),
    Check(
        name="compiled-guards",
        assumption="compiled code runs without guards under set_stance",
        source="torch's documentation of set_stance",
        program=guards,
        fallbacks=(Fallback("full-warmup", ("off",)),),
        mode=COMPILE,
        needs=("torch-compile",),
        limit_s=60.0,
    ),
)
