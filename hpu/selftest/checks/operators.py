"""Checks of torch's own operators in lazy recipes."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpu.selftest.base import BFLOAT16, Card, Check, Comparison, Fallback

if TYPE_CHECKING:
    from torch import Tensor

REGISTRY = "HabanaAI/gaudi-pytorch-bridge, the registered operators"
COMPILED = Fallback("execution-mode", ("torch-compile", "eager"))
"""Fallback: torch.compile lowers operators differently; eager mode launches each operator
separately."""
UNCAPTURED = Fallback("execution-mode", ("torch-compile", "lazy", "eager"))
"""Fallback for an operator that runs on the host and therefore cannot be captured."""


def _on_card(
    card: Card,
    what: str,
    function: "Callable[..., Tensor]",
    *given: "Tensor",
    tolerance: float = 1e-3,
) -> Comparison:
    """Compare `function` on the card and on the CPU, where int32 indices are converted to int64."""
    on_host = [host.long() if host.dtype == card.torch.int32 else host for host in given]
    return Comparison(what, function(*map(card.put, given)), function(*on_host), tolerance)


def _without_host(card: Card, comparisons: Iterator[Comparison]) -> Iterator[Comparison]:
    """`comparisons`, followed by a check that all operators ran on the card."""
    before = card.num_fallbacks()
    yield from comparisons
    yield Comparison("operators that ran on the host", card.num_fallbacks() - before, 0)


def cache_writes(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    slots = torch.tensor([5, 0, 9, 3]).int()

    def write(cache: "Tensor", slots: "Tensor", rows: "Tensor") -> "Tensor":
        # Write to a copy: on the CPU, the given tensor would be modified.
        cache = cache + 0
        cache.index_copy_(0, slots, rows)
        return cache

    def comparisons() -> Iterator[Comparison]:
        for dtype in (torch.bfloat16, torch.float32):
            cache = card.values(12, 2, 8).to(dtype)
            rows = card.values(4, 2, 8, seed=1).to(dtype)
            yield _on_card(card, f"index_copy_ of {dtype}", write, cache, slots, rows)
            yield _on_card(
                card,
                f"index_select of {dtype}",
                lambda cache, slots: cache.index_select(0, slots),
                cache,
                slots,
            )

    return _without_host(card, comparisons())


def index_reduce(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    rows = torch.tensor([0, 0, 1, 3, 1]).int()
    start = torch.full((4, 2), -1e30)

    def reduce(start: "Tensor", rows: "Tensor", values: "Tensor") -> "Tensor":
        return start.index_reduce(0, rows, values, "amax")

    def comparisons() -> Iterator[Comparison]:
        yield _on_card(card, "index_reduce amax", reduce, start, rows, card.values(5, 2))

    return _without_host(card, comparisons())


def sampling(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    scores = card.unequal(2, 128, seed=3)
    ids = torch.tensor([[3, 100, 7], [9, 1, 0]])

    def comparisons() -> Iterator[Comparison]:
        cases: dict[str, Callable[[Tensor], Tensor]] = {
            "values of topk": lambda x: x.topk(8, dim=-1).values,
            "indices of topk": lambda x: x.topk(8, dim=-1).indices,
            "sort": lambda x: x.sort(dim=-1, descending=True).values,
            "cumsum": lambda x: x.cumsum(-1),
            "where": lambda x: torch.where(x > 0, x, -x),
        }
        for what, function in cases.items():
            yield _on_card(card, what, function, scores)
        yield _on_card(card, "gather", lambda x, ids: x.gather(-1, ids), scores, ids)

    return _without_host(card, comparisons())


def routing(card: Card) -> Iterator[Comparison]:
    scores = card.unequal(6, 8, seed=4)

    def comparisons() -> Iterator[Comparison]:
        yield _on_card(card, "max of a row", lambda x: x.max(-1, keepdim=True).values, scores)
        yield _on_card(card, "its index", lambda x: x.max(-1, keepdim=True).indices, scores)
        yield _on_card(
            card,
            "scatter",
            lambda x: x.scatter(-1, x.max(-1, keepdim=True).indices, -1e30),
            scores,
        )

    return _without_host(card, comparisons())


def matmuls_of_views(card: Card) -> Iterator[Comparison]:
    """Matmuls of latent attention, whose operands are views."""
    # Some cards multiply no float32 matrices.
    heads, latents = (card.values(3, *shape, seed=1).bfloat16() for shape in ((4, 16), (8, 24)))
    weights = card.values(4, 16, 16, seed=3).bfloat16()

    def absorbed(heads: "Tensor", weights: "Tensor") -> "Tensor":
        found: Tensor = card.torch.bmm(heads.transpose(0, 1), weights)
        return found.transpose(0, 1)

    yield _on_card(card, "bmm of transposed heads", absorbed, heads, weights, tolerance=BFLOAT16)
    yield _on_card(
        card,
        "matmul of the first entries",
        lambda heads, latents: heads @ latents[..., :16].transpose(1, 2),
        heads,
        latents,
        tolerance=BFLOAT16,
    )


def wide_matmuls(card: Card) -> Iterator[Comparison]:
    card.need_kernel("matmul.float32_out")
    torch = card.torch
    # bfloat16 cannot represent the exact results.
    left, right = card.values(2, 4, 16, seed=1), card.values(2, 16, 8, seed=2)
    found = torch.empty(2, 4, 8, dtype=torch.float32, device="hpu")
    torch.matmul(card.put(left.bfloat16()), card.put(right.bfloat16()), out=found)
    yield Comparison("bfloat16 products in float32", found, left @ right, 1e-5)


def extremes(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    # Different float32 values that are equal in bfloat16.
    scores = 1 + torch.arange(64).view(2, 32) * 2.0**-20
    numbers = 2**24 + torch.arange(64).view(2, 32).int()
    yield Comparison("amax", card.put(scores).amax(-1), scores.amax(-1), 0.0)
    yield Comparison("amin of int32", card.put(numbers).amin(-1), numbers.amin(-1))
    equal = card.put(scores) == card.put(scores.amax(-1, keepdim=True))
    yield Comparison("equal to the maximum", equal, scores == scores.amax(-1, keepdim=True))


def non_finite(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    given = torch.tensor([[1.0, torch.nan, 2.0], [torch.inf, -3.0, -torch.inf], [1.0, 2.0, 3.0]])
    on_card = card.put(given)
    yield Comparison("isnan", on_card.isnan(), given.isnan())
    yield Comparison("a value unequal to itself", on_card != on_card, given.isnan())
    zeroed = torch.nan_to_num(on_card, nan=0.0, posinf=0.0, neginf=0.0)
    yield Comparison("nan_to_num", zeroed, torch.nan_to_num(given, 0.0, 0.0, 0.0))
    yield Comparison("any", on_card.isnan().any(dim=1), given.isnan().any(dim=1))


def int64(card: Card) -> Iterator[Comparison]:
    torch = card.torch
    ids = torch.tensor([0, 127_999, 2**24 + 1, 2**30 + 7, 2**31 - 1, -5])
    yield Comparison("int64 values of 32 bits", card.put(ids) + 0, ids)
    yield Comparison("int64 to int32", card.put(ids).int(), ids.int())
    yield Comparison("a difference of int64", card.put(ids) - 3, ids - 3)


CHECKS = (
    Check(
        name="cache-writes",
        assumption="index_copy_ and index_select run on the card, correctly",
        source=REGISTRY,
        program=cache_writes,
        fallbacks=(COMPILED,),
        is_quick=True,
    ),
    Check(
        name="index-reduce",
        assumption="index_reduce with amax runs on the card",
        source=f"{REGISTRY}; hpu_op.yaml",
        program=index_reduce,
        fallbacks=(UNCAPTURED,),
        is_quick=True,
    ),
    Check(
        name="sampler-operators",
        assumption="operators of the sampler run on the card",
        source=REGISTRY,
        program=sampling,
        fallbacks=(UNCAPTURED,),
        is_quick=True,
    ),
    Check(
        name="router-operators",
        assumption="operators of the router run on the card",
        source=REGISTRY,
        program=routing,
        fallbacks=(UNCAPTURED,),
    ),
    Check(
        name="products-of-views",
        assumption="products of transposed and sliced operands are right",
        source="vllm-project/vllm-gaudi, vllm_gaudi/attention/backends/hpu_attn.py",
        program=matmuls_of_views,
        fallbacks=(COMPILED,),
    ),
    Check(
        name="float32-products",
        assumption="matmul of bfloat16 into float32 does not round (Qwen2)",
        source="vllm-project/vllm-gaudi, vllm_gaudi/extension/utils.py (Matmul)",
        program=wide_matmuls,
        fallbacks=(),
    ),
    Check(
        name="exact-comparisons",
        assumption="amax, amin of int32 and comparisons are exact",
        source="HabanaAI/gaudi-pytorch-bridge, tests of min, max and comparisons",
        program=extremes,
        fallbacks=(COMPILED,),
        is_quick=True,
    ),
    Check(
        name="non-finite",
        assumption="NaN and infinities are found and replaced",
        source="HabanaAI/gaudi-pytorch-bridge, tests of isnan and nan_to_num",
        program=non_finite,
        fallbacks=(COMPILED,),
    ),
    Check(
        name="int64",
        assumption="int64 values that fit 32 bits are exact in lazy mode",
        source="HabanaAI/gaudi-pytorch-bridge, PT_ENABLE_INT64_SUPPORT",
        program=int64,
        fallbacks=(Fallback("PT_ENABLE_INT64_SUPPORT", ("1",)),),
        is_quick=True,
    ),
)
