"""engine/client/ttft.py and the estimate of a client: who is ahead of a new request."""

import pytest
from engine_rig import request_of

from config.errors import Overloaded
from engine.client.base import SingleEngineClient
from engine.client.queue_limits import QueueLimits
from engine.client.router import RouterClient
from engine.client.terms import RequestTerms
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
    """Takes requests, and hears of no engine."""

    def __init__(self, *, engine: int = 0, fair_share: bool = False) -> None:
        limits = QueueLimits(max_requests=10**6, max_prompt_tokens=10**9)
        super().__init__(0, limits, engine=engine, max_ttft_s=2.0, fair_share=fair_share)
        self.sent: list[ToEngine] = []
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
        self.sent.append(message)
        return True


def waits(*shares: tuple[int, int, int], rate: float = 1000.0, prefilling: int = 0) -> EngineStats:
    return EngineStats(
        waiting_shares=list(shares), prefill_tokens_per_s=rate, prefilling_tokens=prefilling
    )


def test_first_come_first_served_puts_all_of_the_priority_ahead() -> None:
    waiting = {(0, FLOOD): 500, (0, NEWCOMER): 50, (-1, FLOOD): 7, (1, FLOOD): 9000}

    assert tokens_ahead(waiting, (0, NEWCOMER), 10, fair_share=False) == 557


def test_with_fair_shares_no_tenant_is_ahead_by_more_than_ones_own_part() -> None:
    waiting = {(0, FLOOD): 100_000, (0, NEWCOMER): 50, (-1, FLOOD): 7}

    assert tokens_ahead(waiting, (0, NEWCOMER), 10, fair_share=True) == 60 + 50 + 7
    assert tokens_ahead(waiting, (0, FLOOD), 10, fair_share=True) == 100_000 + 50 + 7


def test_what_was_sent_and_is_not_reported_counts() -> None:
    assert merged({(0, 1): 5, (0, 2): 9}, {(0, 1): 8, (0, 3): 1}) == {
        (0, 1): 8,
        (0, 2): 9,
        (0, 3): 1,
    }


def test_a_request_that_would_wait_too_long_is_told_when_to_come_back() -> None:
    client = QuietClient()
    client.stats = waits((0, 0, 3000), prefilling=200)
    client.check_ttft(100, priority=-1, terms=RequestTerms())

    with pytest.raises(Overloaded, match=r"3\.3 s, which is more than 2 s") as caught:
        client.check_ttft(100, priority=0, terms=RequestTerms())

    assert caught.value.retry_after_s == 4
    assert caught.value.is_slow


def test_nothing_ahead_is_never_too_slow() -> None:
    client = QuietClient()
    client.stats = waits(rate=1.0)

    client.check_ttft(100, priority=0, terms=RequestTerms())


def test_a_newcomer_does_not_wait_for_the_flood() -> None:
    client = QuietClient(fair_share=True)
    client.stats = waits((0, FLOOD, 1_000_000))

    client.check_ttft(100, priority=0, terms=RequestTerms(tenant=NEWCOMER))
    with pytest.raises(Overloaded):
        client.check_ttft(100, priority=0, terms=RequestTerms(tenant=FLOOD))


def test_what_this_front_end_sent_since_the_last_report_is_ahead() -> None:
    client = QuietClient()
    client.stats = waits()
    for _ in range(30):
        client.add(request_of(bytes(4 * 100)))

    with pytest.raises(Overloaded):
        client.check_ttft(100, priority=0, terms=RequestTerms())

    client.abort([message.key for message in client.sent if isinstance(message, AddRequest)])
    client.check_ttft(100, priority=0, terms=RequestTerms())


def test_of_several_engines_the_fastest_counts_and_gets_the_request() -> None:
    engines = [QuietClient(engine=0), QuietClient(engine=1)]
    router = RouterClient(engines, prefix_caching=False, max_ttft_s=2.0)
    engines[0].stats = waits((0, 0, 3000))
    # More tokens in hand, so that it would not be chosen for its load.
    engines[1].stats = waits((0, 0, 10), rate=10_000)
    engines[1].stats.waiting_prompt_tokens = 50_000

    router.check_ttft(100, priority=0, terms=RequestTerms())
    router.add(request_of(bytes(400)))
    assert len(engines[1].sent) == 1

    engines[1].stats = waits((0, 0, 5000), rate=1000)
    with pytest.raises(Overloaded, match=r"3\.1 s") as caught:
        router.check_ttft(100, priority=0, terms=RequestTerms())
    assert caught.value.retry_after_s == 4


def test_a_client_that_starts_without_an_engine_that_is_gone_uses_the_others() -> None:
    engines = [QuietClient(engine=0), QuietClient(engine=1)]
    engines[1].fail("it died before this API server was started")

    router = RouterClient(engines, prefix_caching=False)

    assert router.failure is None
    assert router.ready is not None
    router.add(request_of(bytes(400)))
    assert len(engines[0].sent) == 1
    engines[0].fail("it died, too")
    assert router.failure == "it died, too"


def test_a_front_end_that_was_started_again_gives_no_key_of_its_predecessor() -> None:
    limits = QueueLimits(max_requests=10, max_prompt_tokens=1000)
    first, second = (SingleEngineClient(3, limits, engine=5, restart=n) for n in (0, 1))

    keys = [client._router.open(1).key for client in (first, second)]

    assert keys[0] != keys[1]
    assert {engine_of(key) for key in keys} == {5}
    assert {key >> FRONT_END_SHIFT for key in keys} == {3}


def test_a_full_queue_keeps_no_other_key_out() -> None:
    limits = QueueLimits(max_requests=10, max_prompt_tokens=1000, fair_share=True)
    for _ in range(10):
        limits.enter(10, tenant=FLOOD)

    with pytest.raises(Overloaded, match="10 requests of this API key are waiting, and at most 10"):
        limits.enter(10, tenant=FLOOD)
    for _ in range(5):
        limits.enter(10, tenant=NEWCOMER)
    with pytest.raises(Overloaded, match="5 requests of this API key are waiting, and at most 5"):
        limits.enter(10, tenant=NEWCOMER)

    for _ in range(5):
        limits.leave(10, tenant=NEWCOMER)
    for _ in range(10):
        limits.leave(10, tenant=FLOOD)
    limits.enter(1000, tenant=FLOOD)
    limits.enter(500, tenant=NEWCOMER)
    with pytest.raises(Overloaded, match="500 prompt tokens of this API key"):
        limits.enter(1, tenant=NEWCOMER)
