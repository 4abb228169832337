"""engine/client/ttft.py and a client's estimate: which requests are ahead of a new request."""

import asyncio

import pytest
from engine_rig import request_of
from waits import WAIT_S

from config.errors import Overloaded
from engine.client.base import SingleEngineClient
from engine.client.queue_limits import QueueLimits
from engine.client.request_limits import RequestLimits
from engine.client.router import RouterClient
from engine.client.ttft import merged, tokens_ahead
from engine.transport.messages import (
    FRONT_END_SHIFT,
    AddRequest,
    EngineStats,
    Ready,
    ToEngine,
    engine_of,
)

FLOOD, NEWCOMER = 7, 8


class QuietClient(SingleEngineClient):
    """Client that accepts requests and receives no reports of an engine."""

    def __init__(self, *, engine: int = 0, fair_share: bool = False) -> None:
        limits = QueueLimits(
            max_requests=10**6, max_prompt_tokens=10**9, fair_share=fair_share, max_ttft_s=2.0
        )
        super().__init__(0, limits, engine=engine)
        self.sent: list[ToEngine] = []
        self.is_full = False
        facts = dict.fromkeys(
            ("weight_bytes", "kv_bytes", "total_bytes", "num_buckets", "load_s", "warmup_s"), 0
        )
        self._receive(
            Ready(
                engine=engine,
                num_blocks=100,
                block_size=16,
                max_model_len=4096,
                vocab_size=100,
                eos_token_ids=(),
                device="cpu",
                dtype="float32",
                **facts,
            )
        )

    def _send(self, message: ToEngine) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full


def waits(*shares: tuple[int, int, int], rate: float = 1000.0, prefilling: int = 0) -> EngineStats:
    return EngineStats(
        waiting_shares=list(shares), prefill_tokens_per_s=rate, prefilling_tokens=prefilling
    )


def test_without_fair_share_all_tokens_of_equal_or_higher_priority_are_ahead() -> None:
    waiting = {(0, FLOOD): 500, (0, NEWCOMER): 50, (-1, FLOOD): 7, (1, FLOOD): 9000}

    assert tokens_ahead(waiting, (0, NEWCOMER), 10, fair_share=False) == 557


def test_with_fair_share_another_tenant_is_ahead_by_at_most_the_tokens_of_the_tenant() -> None:
    waiting = {(0, FLOOD): 100_000, (0, NEWCOMER): 50, (-1, FLOOD): 7}

    assert tokens_ahead(waiting, (0, NEWCOMER), 10, fair_share=True) == 60 + 50 + 7
    assert tokens_ahead(waiting, (0, FLOOD), 10, fair_share=True) == 100_000 + 50 + 7


def test_merged_counts_are_the_maximum_of_sent_and_reported_tokens() -> None:
    assert merged({(0, 1): 5, (0, 2): 9}, {(0, 1): 8, (0, 3): 1}) == {
        (0, 1): 8,
        (0, 2): 9,
        (0, 3): 1,
    }


def test_a_request_that_would_wait_too_long_gets_a_retry_time() -> None:
    client = QuietClient()
    client.stats = waits((0, 0, 3000), prefilling=200)
    client.check_ttft(100, priority=-1, request_limits=RequestLimits())

    with pytest.raises(Overloaded, match=r"3\.3 s, which is more than 2 s") as caught:
        client.check_ttft(100, priority=0, request_limits=RequestLimits())

    assert caught.value.retry_after_s == 4
    assert caught.value.is_slow


def test_a_request_is_admitted_to_an_empty_queue_at_a_low_rate() -> None:
    client = QuietClient()
    client.stats = waits(rate=1.0)

    client.check_ttft(100, priority=0, request_limits=RequestLimits())


def test_a_new_tenant_is_admitted_despite_the_queue_of_another_tenant() -> None:
    client = QuietClient(fair_share=True)
    client.stats = waits((0, FLOOD, 1_000_000))

    client.check_ttft(100, priority=0, request_limits=RequestLimits(tenant=NEWCOMER))
    with pytest.raises(Overloaded):
        client.check_ttft(100, priority=0, request_limits=RequestLimits(tenant=FLOOD))


def test_requests_sent_since_the_last_report_are_counted_as_waiting() -> None:
    client = QuietClient()
    client.stats = waits()
    for _ in range(30):
        client.add(request_of(bytes(4 * 100)))

    with pytest.raises(Overloaded):
        client.check_ttft(100, priority=0, request_limits=RequestLimits())

    client.abort([message.key for message in client.sent if isinstance(message, AddRequest)])
    client.check_ttft(100, priority=0, request_limits=RequestLimits())


def test_the_engine_with_the_shortest_wait_gets_the_request() -> None:
    engines = [QuietClient(engine=0), QuietClient(engine=1)]
    router = RouterClient(engines, prefix_caching=False, max_ttft_s=2.0)
    engines[0].stats = waits((0, 0, 3000))
    # With more queued tokens, so that its load alone would not choose it.
    engines[1].stats = waits((0, 0, 10), rate=10_000)
    engines[1].stats.waiting_prompt_tokens = 50_000

    router.check_ttft(100, priority=0, request_limits=RequestLimits())
    router.add(request_of(bytes(400)))
    assert len(engines[1].sent) == 1

    engines[1].stats = waits((0, 0, 5000), rate=1000)
    with pytest.raises(Overloaded, match=r"3\.1 s") as caught:
        router.check_ttft(100, priority=0, request_limits=RequestLimits())
    assert caught.value.retry_after_s == 4


def test_a_client_that_starts_after_an_engine_crash_uses_the_other_engines() -> None:
    engines = [QuietClient(engine=0), QuietClient(engine=1)]
    engines[1].fail("it died before this API server was started")

    router = RouterClient(engines, prefix_caching=False)

    assert router.failure is None
    assert router.ready is not None
    router.add(request_of(bytes(400)))
    assert len(engines[0].sent) == 1
    engines[0].fail("it died, too")
    assert router.failure == "it died, too"


def test_a_restarted_front_end_reuses_no_key() -> None:
    limits = QueueLimits(max_requests=10, max_prompt_tokens=1000)
    first, second = (SingleEngineClient(3, limits, engine=5, restart=n) for n in (0, 1))

    keys = [client._router.open(1).key for client in (first, second)]

    assert keys[0] != keys[1]
    assert {engine_of(key) for key in keys} == {5}
    assert {key >> FRONT_END_SHIFT for key in keys} == {3}


def test_a_queue_filled_by_a_key_still_admits_other_keys() -> None:
    limits = QueueLimits(max_requests=10, max_prompt_tokens=1000, fair_share=True)
    for _ in range(10):
        limits.enter(10, tenant=FLOOD)

    with pytest.raises(Overloaded, match="10 requests of this API key are waiting, at most 10"):
        limits.enter(10, tenant=FLOOD)
    for _ in range(5):
        limits.enter(10, tenant=NEWCOMER)
    with pytest.raises(Overloaded, match="5 requests of this API key are waiting, at most 5"):
        limits.enter(10, tenant=NEWCOMER)

    for _ in range(5):
        limits.leave(10, tenant=NEWCOMER)
    for _ in range(10):
        limits.leave(10, tenant=FLOOD)
    limits.enter(1000, tenant=FLOOD)
    limits.enter(500, tenant=NEWCOMER)
    with pytest.raises(Overloaded, match="500 prompt tokens of this API key"):
        limits.enter(1, tenant=NEWCOMER)


async def test_a_control_that_a_full_queue_does_not_take_is_refused_at_once() -> None:
    client = QuietClient()
    client.is_full = True

    with pytest.raises(Overloaded, match="has left 8192 messages unread"):
        await asyncio.wait_for(client.control("reset_prefix_cache"), WAIT_S)
