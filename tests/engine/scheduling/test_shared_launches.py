"""engine/scheduling/shared_launches.py: launches that several engines run together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.buckets import BucketConfig
from engine.scheduling.shared_launches import share_launches
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, PREFILL, Bucket, BucketLimits

BUDGET = 2048
LIMITS = BucketLimits(16, 2048, 64, BUDGET, 16, 1000, True)
TABLES = {
    strategy: BucketTable.make(BucketConfig(strategy=strategy), LIMITS)
    for strategy in ("exact", "exponential")
}
NONE: tuple[Bucket, ...] = ()


def find(table: BucketTable, phase: int, batch: int, query: int, blocks: int) -> Bucket:
    return (phase, *table.find(phase, batch, query, blocks).bucket)


def covers(bucket: Bucket, other: Bucket) -> bool:
    return bucket[0] == other[0] and all(a >= b for a, b in zip(bucket[1:], other[1:], strict=True))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_an_engine_without_work_takes_part_in_the_launches_of_the_other(table: BucketTable) -> None:
    decode, prefill = find(table, DECODE, 3, 1, 9), find(table, PREFILL, 2, 100, 0)

    assert share_launches([NONE, [decode, prefill]], table, BUDGET) == [
        (decode, (None, 0)),
        (prefill, (None, 1)),
    ]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_decodes_of_two_engines_share_a_launch_in_a_bucket_that_covers_both(
    table: BucketTable,
) -> None:
    wide, deep = find(table, DECODE, 32, 1, 40), find(table, DECODE, 4, 1, 120)

    (launch,) = share_launches([[wide], [deep]], table, BUDGET)

    assert launch.indices == (0, 0)
    assert covers(launch.bucket, wide) and covers(launch.bucket, deep)
    assert table.is_prepared(*launch.bucket)


def test_a_long_prompt_and_many_short_prompts_run_in_separate_launches() -> None:
    table = TABLES["exact"]
    long, short = (PREFILL, 1, 2048, 0), (PREFILL, 16, 128, 0)

    assert share_launches([[short], [long]], table, BUDGET) == [
        (long, (None, 0)),
        (short, (0, None)),
    ]


def test_an_unprepared_bucket_is_shared_only_with_launches_that_fit_it() -> None:
    table = TABLES["exponential"]
    huge = (DECODE, 64, 1, 100_000)
    fits, other = find(table, DECODE, 4, 1, 16), (PREFILL, 1, 3000, 0)

    assert share_launches([[huge], [fits], [other]], table, BUDGET) == [
        (huge, (0, 0, None)),
        (other, (None, None, 0)),
    ]


def planned(table: BucketTable) -> st.SearchStrategy[list[list[Bucket]]]:
    decode = st.builds(
        lambda batch, blocks: find(table, DECODE, batch, 1, max(batch, blocks)),
        st.integers(1, 64),
        st.integers(1, 600),
    )
    prefill = st.builds(
        lambda batch, query, context: find(table, PREFILL, batch, query // batch + 1, context),
        st.integers(1, 16),
        st.integers(1, BUDGET - 16),
        st.integers(0, 60),
    )
    own = st.builds(
        lambda decodes, prefills: [*decodes, *prefills],
        st.lists(decode, max_size=2),
        st.lists(prefill, max_size=4),
    )
    return st.lists(own, min_size=1, max_size=4)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_launch_runs_once_and_in_order_in_a_covering_bucket(
    table: BucketTable, data: st.DataObject
) -> None:
    engines = data.draw(planned(table))

    shared = share_launches(engines, table, BUDGET)

    for engine, own in enumerate(engines):
        taken = [launch for launch in shared if launch.indices[engine] is not None]
        assert [launch.indices[engine] for launch in taken] == list(range(len(own)))
        assert all(covers(item.bucket, bucket) for item, bucket in zip(taken, own, strict=True))
    phases = [launch.bucket[0] for launch in shared]
    assert phases == sorted(phases, reverse=True)
    assert all(set(launch.indices) != {None} for launch in shared)
    apart = sum(table.cost(b[0], b[1:]) + table.overhead for own in engines for b in own)
    together = sum(
        table.cost(launch.bucket[0], launch.bucket[1:]) + table.overhead for launch in shared
    )
    assert together <= apart
    assert not any(
        table.find(*launch.bucket).result == "fallback" for launch in shared if table.is_exact
    )
