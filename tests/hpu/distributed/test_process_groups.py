"""Collectives between processes over gloo, and groups of a single rank."""

from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from config.errors import ConfigError
from hpu.distributed.agreement import Agreement
from hpu.distributed.process_groups import (
    SINGLE,
    ExpertGroup,
    ProcessGroup,
    ProcessGroups,
    group_members,
    make_groups,
)

Collective = Callable[[ProcessGroup, int], Tensor]


def tensor_of(rank: int) -> Tensor:
    """(2, 3): 0 to 5, plus ten times the rank."""
    return torch.arange(6.0).view(2, 3) + 10 * rank


def pass_on(group: ProcessGroup, rank: int) -> Tensor:
    if rank == 0:
        group.send(tensor_of(0), 1)
        return tensor_of(0)
    return group.recv(torch.zeros(2, 3), 0)


FIRST, SECOND = tensor_of(0), tensor_of(1)
BOTH = FIRST + SECOND

COLLECTIVES: dict[str, tuple[Collective, tuple[Tensor, Tensor]]] = {
    "all_reduce": (lambda group, rank: group.all_reduce(tensor_of(rank)), (BOTH, BOTH)),
    "all_gather of rows": (
        lambda group, rank: group.all_gather(tensor_of(rank), dim=0),
        (torch.cat((FIRST, SECOND)),) * 2,
    ),
    "all_gather of columns": (
        lambda group, rank: group.all_gather(tensor_of(rank)),
        (torch.cat((FIRST, SECOND), dim=1),) * 2,
    ),
    "reduce_scatter": (
        lambda group, rank: group.reduce_scatter(tensor_of(rank)),
        (BOTH[:1], BOTH[1:]),
    ),
    "broadcast": (lambda group, rank: group.broadcast(tensor_of(rank), 1), (SECOND, SECOND)),
    "send and recv": (pass_on, (FIRST, FIRST)),
}


def run_all(group: ProcessGroup) -> dict[str, Tensor]:
    """The result of every collective of `group`."""
    return {name: run(group, group.rank) for name, (run, _) in COLLECTIVES.items()}


def run_all_of_made_groups(world: ProcessGroup) -> dict[str, Tensor]:
    """Results of all collectives in the tensor group of two ranks that `make_groups` makes."""
    groups = make_groups(tensor=2, data=2)
    sizes = groups.tensor.size, groups.data.size, groups.expert.size, groups.pipeline.size
    assert sizes == (2, 2, 4, 1)
    assert groups.tensor.rank == world.rank % 2
    return run_all(groups.tensor)


@pytest.fixture(scope="module")
def results(pool: RankPool) -> dict[str, list[dict[str, Tensor]]]:
    """Results of each rank, by the kind of the group."""
    made = pool.run(4, run_all_of_made_groups)
    return {"two": pool.run(2, run_all), "tensor": made[:2], "tensor of others": made[2:]}


@pytest.mark.parametrize("kind", ["two", "tensor", "tensor of others"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_two_ranks_agree_on_every_collective(
    name: str, kind: str, results: dict[str, list[dict[str, Tensor]]]
) -> None:
    _, expected = COLLECTIVES[name]

    found = [of_rank[name] for of_rank in results[kind]]

    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True, True]


def test_collectives_of_a_single_rank_return_the_tensor_itself() -> None:
    tensor = tensor_of(0)

    assert SINGLE.all_reduce(tensor) is tensor
    assert SINGLE.all_gather(tensor) is tensor
    assert SINGLE.reduce_scatter(tensor) is tensor
    assert SINGLE.broadcast(tensor) is tensor
    assert make_groups() == ProcessGroups(SINGLE, SINGLE, SINGLE, SINGLE)


def test_tensor_ranks_are_adjacent_then_stages_then_replicas() -> None:
    members = group_members(tensor=2, pipeline=2, data=2)

    assert members["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members["pipeline"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members["expert"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert members["data"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def check_versions(group: ProcessGroup) -> str:
    """Error of a rank whose version differs; empty if there is no error."""
    versions = {"torch": f"2.{7 + group.rank}", "python": "3.11"}
    try:
        Agreement(group).check_same(versions, f"rank {group.rank}")
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_with_another_version_is_refused_with_both_versions(pool: RankPool) -> None:
    same, different = pool.run(2, check_versions)

    assert same == ""
    assert different == (
        "all ranks must have the same versions, and torch is 2.8 on rank 1 and 2.7 on rank 0"
    )


def exchange_tokens(world: ProcessGroup) -> tuple[Tensor, Tensor]:
    """(gathered tokens, sums of experts) in one of two engines, each with two ranks and two
    tokens."""
    experts = make_groups(tensor=2, data=2).expert
    assert isinstance(experts, ExpertGroup) and experts.rank == world.rank
    gathered = experts.gather_tokens(tensor_of(world.rank // 2))
    return gathered, experts.reduce_tokens(gathered * (world.rank + 1))


def test_experts_get_the_tokens_of_all_engines_and_each_engine_gets_its_sums(
    pool: RankPool,
) -> None:
    found = pool.run(4, exchange_tokens)

    for rank, (gathered, sums) in enumerate(found):
        assert torch.equal(gathered, torch.cat((FIRST, SECOND)))
        assert torch.equal(sums, 10 * tensor_of(rank // 2))


def test_a_transfer_between_two_ranks_is_a_separate_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("send", "isend", "recv"):

        def record(tensor: Tensor, name: str = name, **options: object) -> None:
            calls.append(name)

        monkeypatch.setattr(torch.distributed, name, record)
    group = ProcessGroup(range(2), mark_step=lambda: calls.append("mark_step"))

    group.recv(FIRST, 1)
    group.isend(FIRST, 1)
    group.send(FIRST, 1)

    assert calls == [
        *("mark_step", "recv", "mark_step"),
        *("mark_step", "isend", "mark_step"),
        *("mark_step", "send", "mark_step"),
    ]
