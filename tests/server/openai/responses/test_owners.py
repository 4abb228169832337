"""A stored response is visible only to the API key that created it."""

import json
from typing import Any

import httpx
import pytest
from http_rig import Rig, TalkingClient, in_memory, on_port

ROUTE = "/v1/responses"
KEYS = ("alice-key", "bob-key")
ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS)
UNKNOWN = "0" * 34


async def made(rig: Rig, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    answer = await rig.post(ROUTE, {"input": "secret", **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


async def send(
    rig: Rig, headers: dict[str, str], number: str, method: str, path: str, body: Any
) -> httpx.Response:
    """The request about response `number`, named in the path or in the body."""
    written = None if body is None else json.dumps(body).replace("NUMBER", number)
    to = ROUTE + path.replace("NUMBER", number)
    return await rig.http.request(method, to, content=written, headers=headers)


REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/resp_NUMBER", None),
    ("GET", "/resp_NUMBER?stream=true", None),
    ("GET", "/resp_NUMBER?starting_after=3", None),
    ("GET", "/resp_NUMBER/input_items", None),
    ("GET", "/resp_NUMBER/input_items?limit=0", None),
    ("POST", "/resp_NUMBER/cancel", None),
    ("DELETE", "/resp_NUMBER", None),
    ("POST", "", {"input": "hi", "previous_response_id": "resp_NUMBER"}),
    ("POST", "", {"input": "hi", "previous_response_id": "resp_NUMBER", "stream": True}),
    ("POST", "", {"input": "hi", "previous_response_id": "resp_NUMBER", "background": True}),
    ("POST", "/input_tokens", {"input": "hi", "previous_response_id": "resp_NUMBER"}),
    ("POST", "", {"input": [{"type": "item_reference", "id": "msg_NUMBER_0"}]}),
    ("POST", "", {"input": [{"id": "msg_NUMBER_in0"}]}),
    ("POST", "/input_tokens", {"input": [{"id": "msg_NUMBER_in0"}]}),
)


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_another_key_gets_the_404_of_an_unknown_id(method: str, path: str, body: Any) -> None:
    async with in_memory(TalkingClient("the answer"), api_keys=KEYS) as rig:
        whole = await made(rig, ALICE)
        number = whole["id"].removeprefix("resp_")

        foreign = await send(rig, BOB, number, method, path, body)
        unknown = await send(rig, BOB, UNKNOWN, method, path, body)

        assert foreign.status_code == unknown.status_code == 404
        assert foreign.text.replace(number, UNKNOWN) == unknown.text
        assert "answer" not in foreign.text and "secret" not in foreign.text
        kept = await rig.http.get(f"{ROUTE}/{whole['id']}", headers=ALICE)
        assert kept.json() == whole
        assert len(rig.client.queues) == 1


async def test_the_owners_key_reads_continues_and_deletes_a_response_with_either_header() -> None:
    async with in_memory(TalkingClient("the answer"), api_keys=KEYS) as rig:
        first = await made(rig, ALICE)
        same = {"x-api-key": KEYS[0]}

        second = await made(rig, same, previous_response_id=first["id"])
        reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
        third = await made(rig, same, input=reference)
        items = await rig.http.get(f"{ROUTE}/{second['id']}/input_items", headers=same)
        deleted = await rig.http.delete(f"{ROUTE}/{first['id']}", headers=same)

        assert second["status"] == third["status"] == "completed"
        assert "the answer" in items.text
        assert deleted.status_code == 200
        gone = await rig.http.get(f"{ROUTE}/{first['id']}", headers=ALICE)
        assert gone.status_code == 404


async def test_another_key_cannot_follow_cancel_or_delete_a_background_response() -> None:
    client = TalkingClient("abc", pace_s=0.002)
    client.endless = True
    async with on_port(client, api_keys=KEYS) as rig:
        running = await made(rig, ALICE, background=True)
        path = f"{ROUTE}/{running['id']}"

        refused = [
            await rig.http.get(path, headers=BOB),
            await rig.http.get(f"{path}?stream=true", headers=BOB),
            await rig.http.get(f"{path}?stream=true&starting_after=1", headers=BOB),
            await rig.http.post(f"{path}/cancel", headers=BOB),
            await rig.http.delete(path, headers=BOB),
        ]
        mine = await rig.http.get(path, headers=ALICE)
        cancelled = await rig.http.post(f"{path}/cancel", headers=ALICE)

        assert [answer.status_code for answer in refused] == [404] * 5
        assert mine.json()["status"] in ("queued", "in_progress")
        assert cancelled.json()["status"] == "cancelled"


async def test_without_keys_all_clients_are_the_same_user() -> None:
    async with in_memory() as rig:
        whole = await made(rig, ALICE)

        got = await rig.http.get(f"{ROUTE}/{whole['id']}", headers=BOB)

        assert got.json() == whole
