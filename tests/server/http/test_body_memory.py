"""Memory of requests with large bodies: it is freed when the request ends, without the garbage
collector, which would stop the event loop."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from http_rig import TalkingClient, on_port

from config.errors import UserError
from server.http import body
from server.http.errors import release_frames

TEXTS: list[weakref.ref[Any]] = []


LONG = "word " * 60_000


class Text(str):
    """A text that can be referred to weakly."""

    __slots__ = ("__weakref__",)


def as_texts(value: Any) -> Any:
    """`value` with its long texts as Text."""
    if isinstance(value, dict):
        return {key: as_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_texts(item) for item in value]
    if not isinstance(value, str) or len(value) < 1_000:
        return value
    text = Text(value)
    TEXTS.append(weakref.ref(text))
    return text


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "wrong type": ("/v1/completions", {"prompt": LONG, "n": "x"}),
    "too many tokens": ("/v1/completions", {"prompt": LONG}),
    "too many tokens in a list": ("/v1/completions", {"prompt": [LONG, "b"]}),
    "wrong message": (
        "/v1/chat/completions",
        {"messages": [{"role": "x", "content": LONG}]},
    ),
    "long chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}]},
    ),
    "wrong schema": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": LONG},
        },
    ),
    "long input": ("/v1/responses", {"input": LONG}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_the_body_of_a_refused_request_is_freed_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    path, fields = BODIES[name]
    decode = body._decode_chunks
    TEXTS.clear()

    def spied(chunks: list[bytes]) -> Any:
        return as_texts(decode(chunks))

    monkeypatch.setattr(body, "_decode_chunks", spied)
    async with on_port(TalkingClient(max_model_len=512)) as rig:
        answer = await rig.http.post(path, json=fields)

        assert answer.status_code == 400, answer.text
        assert len(TEXTS) > 0
        for _ in range(50):
            # A thread that worked on the text may not have dropped it yet.
            if not any(text() for text in TEXTS):
                break
            await asyncio.sleep(0.02)
        assert not any(text() for text in TEXTS)


def test_an_error_that_its_frame_refers_to_frees_the_variables_of_the_frame(
    without_collector: None,
) -> None:
    def refuse() -> None:
        text = as_texts(LONG)
        error = UserError(f"{len(text)} characters are too many")
        try:
            raise ValueError(text[:10])
        except ValueError:
            raise error  # noqa: B904  # the context refers to this frame too

    TEXTS.clear()
    try:
        refuse()
    except UserError as error:
        release_frames(error)

    assert TEXTS[0]() is None
