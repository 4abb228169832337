"""The response store keeps its three limits, and never drops a response that is in use."""

import time
from typing import Any

import pytest
from delays import least, machine_s
from waits import until

from config.errors import NotFound, Overloaded
from server.http.json_encoder import encode_json
from server.openai.responses.store import (
    ItemHistory,
    ResponseStore,
    StoredResponse,
    ended_response,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """A response that runs until it is cancelled."""

    def fields(self) -> dict[str, Any]:
        return {}

    num_values = 0

    async def cancel(self) -> None:
        pass


def item(text: str) -> dict[str, Any]:
    return {"type": "message", "id": text, "text": text}


def keep(
    store: ResponseStore, name: str, before: ItemHistory | None = None, text: str = ""
) -> StoredResponse:
    entry = StoredResponse(name, "owner", ItemHistory(encode_json([item(f"ask {name}")]), before))
    response = {"status": "completed", "output": [item(f"say {name} {text}")]}
    store.finish(entry, ended_response(response))
    return entry


def running(name: str) -> StoredResponse:
    return StoredResponse(
        name, "owner", ItemHistory(b"[]", None), running=Work(), is_background=True
    )


async def test_the_oldest_response_is_evicted_when_there_are_too_many() -> None:
    store = ResponseStore(2, 10**6, 60)

    for name in "abc":
        keep(store, name)

    with pytest.raises(NotFound, match="'a'"):
        store.get("a", "owner")
    assert store.get("b", "owner").id == "b" and store.get("c", "owner").id == "c"


async def test_another_owner_gets_the_error_of_unknown_ids() -> None:
    store = ResponseStore(2, 10**6, 60)
    keep(store, "a")

    with pytest.raises(NotFound) as foreign:
        store.get("a", "other")
    with pytest.raises(NotFound) as unknown:
        store.get("b", "other")

    assert foreign.value.message.replace("'a'", "'b'") == unknown.value.message
    assert store.get("a", "owner").id == "a"


async def test_the_oldest_responses_are_evicted_above_the_byte_limit() -> None:
    store = ResponseStore(100, 2_000, 60)

    for number in range(20):
        keep(store, str(number), text="x" * 100)
        assert store.num_bytes <= 2_000

    assert 2 <= len(store) <= 10
    assert store.get("19", "owner").id == "19"


async def test_a_response_bigger_than_the_store_evicts_nothing() -> None:
    store = ResponseStore(100, 2_000, 60)
    keep(store, "small")

    keep(store, "big", text="x" * 3_000)

    assert len(store) == 1 and store.get("small", "owner")


async def test_an_expired_response_is_not_found() -> None:
    clock = Clock()
    store = ResponseStore(100, 10**6, 60, clock)
    keep(store, "old")
    clock.now_s = 30
    keep(store, "new")

    clock.now_s = 61

    with pytest.raises(NotFound):
        store.get("old", "owner")
    assert store.get("new", "owner").id == "new"


async def test_expired_responses_are_removed_without_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.openai.responses.store.MIN_EXPIRY_INTERVAL_S", 0.01)
    store = ResponseStore(100, 10**6, 0.02)
    keep(store, "old")

    await until(lambda: len(store) == 0)

    assert len(store) == 0 and store.num_bytes == 0


async def test_a_conversation_outlives_its_first_responses_and_frees_every_byte() -> None:
    store = ResponseStore(1, 10**6, 60)
    first = keep(store, "a")
    second = keep(store, "b", first.full_history)
    third = keep(store, "c", second.full_history)

    texts = [item["text"].strip() for item in (third.full_history or third.input_history).items()]

    assert len(store) == 1
    assert texts == ["ask a", "say a", "ask b", "say b", "ask c", "say c"]
    store.remove(third)
    store.remove(third)
    assert store.num_bytes == 0


async def test_shared_turns_are_counted_once() -> None:
    store = ResponseStore(100, 10**6, 60)
    first = keep(store, "a")
    alone = store.num_bytes

    for name in ("b", "c"):
        keep(store, name, first.full_history)
    for name in ("b", "c"):
        store.remove(store.get(name, "owner"))

    assert store.num_bytes == alone


async def test_running_responses_are_never_evicted_and_count() -> None:
    store = ResponseStore(2, 10**6, 60)
    works = [running("a"), running("b")]
    keep(store, "done")
    for work in works:
        store.add_running(work)

    with pytest.raises(Overloaded):
        store.add_running(running("c"))
    keep(store, "d")

    assert [store.get(work.id, "owner") for work in works] == works
    assert len(store) == 2


async def test_the_response_that_ended_first_is_evicted_first() -> None:
    store = ResponseStore(2, 10**6, 60)
    work = running("a")
    store.add_running(work)
    keep(store, "b")
    store.finish(work, ended_response({"status": "completed", "output": []}))

    keep(store, "c")

    assert store.find("abc", "owner") == [work, store.get("c", "owner")]


async def test_running_responses_do_not_slow_down_evictions() -> None:
    num_running, num_ended = 1_000, 9_000

    def evict_s() -> float:
        store = ResponseStore(10_000, 10**6, 60)
        for number in range(num_running):
            store.add_running(running(f"r{number}"))
        for number in range(num_ended):
            store.finish(
                StoredResponse(f"e{number}", "owner", ItemHistory(b"[]", None)),
                ended_response({"status": "completed", "output": []}),
            )
        start_s = time.thread_time()
        keep(store, "large", text="x" * 240_000)
        took_s = time.thread_time() - start_s
        assert len(store) <= num_running + 3_000
        return took_s

    # Skipping the running responses for each eviction took 0.3 s.
    limit_s = machine_s(0.1)
    assert least(evict_s, limit_s) < limit_s


async def test_running_responses_may_not_outgrow_the_store() -> None:
    store = ResponseStore(100, 1_000, 60)
    keep(store, "done")
    work = running("a")
    store.add_running(work)

    store.add_bytes(work, 900)
    with pytest.raises(Overloaded, match="1000 bytes"):
        store.add_bytes(work, 900)

    assert len(store) == 1


async def test_a_response_deleted_while_running_is_not_stored() -> None:
    store = ResponseStore(100, 10**6, 60)
    work = running("a")
    store.add_running(work)

    store.remove(store.get("a", "owner"))
    store.finish(work, ended_response({"status": "completed", "output": []}))

    assert work.running is None
    assert len(store) == 0 and store.num_bytes == 0


async def test_a_second_end_of_a_response_changes_nothing() -> None:
    store = ResponseStore(100, 10**6, 60)
    work = running("a")
    store.add_running(work)
    store.finish(work, ended_response({"status": "cancelled", "output": []}))
    before = store.num_bytes

    store.finish(work, ended_response({"status": "completed", "output": [item("late")]}))

    assert (work.status, work.full_history) == ("cancelled", None)
    assert store.num_bytes == before
    store.remove(work)
    assert store.num_bytes == 0
