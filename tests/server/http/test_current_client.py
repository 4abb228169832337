"""The client whose turn on the worker threads a request uses."""

from typing import Any

import pytest
from http_rig import in_memory

from config.fair_threads import current_client
from server.http import body


async def test_the_client_of_a_request_is_its_key_or_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients: list[str | None] = []
    validate = body.validate_fields

    def noted(kind: Any, fields: dict[str, Any]) -> Any:
        clients.append(current_client.get())
        return validate(kind, fields)

    monkeypatch.setattr(body, "validate_fields", noted)
    # The body is validated on a thread.
    request = {"prompt": "x", "max_tokens": 1, "stop_token_ids": [3] * body.MANY_BYTES}
    async with in_memory(api_keys=("a", "b")) as rig:
        for key in "aba":
            headers = {"Authorization": f"Bearer {key}"}
            answer = await rig.http.post("/v1/completions", json=request, headers=headers)
            assert answer.status_code == 200, answer.text
    async with in_memory() as rig:
        await rig.http.post("/v1/completions", json=request)

    first, second, third, address = clients
    assert first == third != second
    assert address == "127.0.0.1"
    assert current_client.get() is None
