"""Checks of collectives."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpu.selftest.base import Card, Check, Comparison, Fallback

if TYPE_CHECKING:
    from torch import Tensor

NUM_RANKS = 2


def collectives(card: Card) -> Iterator[Comparison]:
    """Collectives outside of a graph. The process group already exists: it is created before the
    first use of the card."""
    dist = card.torch.distributed
    torch, rank = card.torch, card.rank
    hosts = [card.values(64, seed=number) for number in range(NUM_RANKS)]
    own = card.put(hosts[rank])
    # Launch the operation that produces the input, since a lazy collective reads launched tensors.
    card.mark()
    dist.all_reduce(own)
    yield Comparison("sum over two cards", own, hosts[0] + hosts[1])
    gathered = [card.put(torch.zeros(64)) for _ in range(NUM_RANKS)]
    own = card.put(hosts[rank])
    card.mark()
    dist.all_gather(gathered, own)
    for number, host in enumerate(hosts):
        yield Comparison(f"gathered from rank {number}", gathered[number], host)
    shared = card.put(hosts[rank])
    card.mark()
    dist.broadcast(shared, 0)
    yield Comparison("broadcast of rank 0", shared, hosts[0])


def captured(card: Card) -> Iterator[Comparison]:
    """A collective inside a graph, after a mark_step."""
    dist, rank = card.torch.distributed, card.rank

    def function(x: "Tensor") -> "Tensor":
        doubled = x * 2
        card.mark()
        dist.all_reduce(doubled)
        return doubled + 1

    graph = card.graph(function)
    given = card.put(card.values(64))
    for number in range(3):
        hosts = [card.values(64, seed=2 * number + owner) for owner in range(NUM_RANKS)]
        given.copy_(hosts[rank])
        expected = (hosts[0] + hosts[1]) * 2 + 1
        yield Comparison(f"sum in a graph, call {number}", graph(given), expected)


CHECKS = (
    Check(
        name="collectives",
        assumption="two cards form an hccl group, and their sums are right",
        source="vendor's documentation of distributed inference",
        program=collectives,
        fallbacks=(),
        num_ranks=NUM_RANKS,
        limit_s=60.0,
    ),
    Check(
        name="captured-collectives",
        assumption="a graph may hold collectives (PT_HPU_ENABLE_LAZY_COLLECTIVES)",
        source="HabanaAI/gaudi-pytorch-bridge, its hccl module",
        program=captured,
        fallbacks=(Fallback("execution-mode", ("torch-compile", "lazy", "eager")),),
        needs=("graph-marks", "collectives"),
        num_ranks=NUM_RANKS,
        limit_s=60.0,
    ),
)
