"""Routes of /v1/responses: create (complete, streamed or in the background), retrieve, cancel and
delete responses, list input items, and count input tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.error_frames import release_frames
from config.errors import UserError
from config.fair_threads import current_client
from config.json_text import Json
from server.http.access_log import attach_record, record_of
from server.http.body import (
    MANY_BYTES,
    Fields,
    ReceivedBody,
    built_response,
    encoded_response,
    json_response,
    long_json_response,
    parse,
)
from server.http.body_bounds import QueryInteger
from server.http.held_bodies import NOT_HELD
from server.http.openapi import ANSWERS, GENERATES, takes
from server.http.peer_proxy import ForwardedResponse
from server.http.sse import EventStream
from server.openai.chat_request import count_prompt_tokens, start_chat
from server.openai.responses.background import BackgroundResponse, follow_events
from server.openai.responses.chat_request import (
    ID_PREFIX,
    ResponseRequest,
    as_response_fields,
    previous_number,
    resolve_request,
)
from server.openai.responses.schema import ResponseBody
from server.openai.responses.store import (
    EndedResponse,
    ItemHistory,
    ResponseStore,
    StoredResponse,
)
from server.openai.responses.truncation import is_too_long, shortened
from server.openai.responses.writer import ResponseWriter, number_of
from server.serving.job import ServingRequest, run_to_end, sse_frames
from server.serving.state import AppState

ROUTE = "/v1/responses"
MAX_ITEMS = 100
"""Maximum number of input items per page."""
BYTES_PER_VALUE = 16
"""Assumed bytes per JSON value in stored responses, which are mostly text."""


def response_routes(state: AppState) -> APIRouter:
    """Routes of the Responses API."""
    config = state.config
    store = ResponseStore(
        config.responses_store_max_count,
        config.responses_store_max_bytes,
        config.responses_store_max_age_s,
    )
    router = APIRouter(tags=["Responses"], responses=ANSWERS)
    _add_create_routes(router, state, store)
    _add_stored_routes(router, state, store)
    return router


def _add_create_routes(router: APIRouter, state: AppState, store: ResponseStore) -> None:
    @router.post(
        ROUTE,
        summary="Respond to items, and store the response",
        openapi_extra=takes("ResponseBody"),
        responses=GENERATES,
    )
    async def create_response(request: Request) -> Response:
        read = await _read(state, request)
        if isinstance(read, Response):
            return read
        sent, body = read
        is_stored = _is_stored(store, body)
        owner = record_of(request.scope).owner
        resolved = await resolve_request(
            state.bodies, store, sent, body, state.peers.new_id(), owner, state.media_kinds
        )
        if body.background:
            # A separate record, because the job continues after this request has ended.
            attach_record(request.scope, replace(record_of(request.scope)))
        job = await _start(state, request, resolved, is_cut=body.truncation == "auto")
        history = resolved.history if is_stored else ItemHistory(b"[]", None)
        del resolved
        job.body.drop_prompt()
        body.drop_prompt(len(history.data))
        job.body.hold(sent.held)
        entry = StoredResponse(job.id, owner, history, is_background=bool(body.background))

        def on_end(response: EndedResponse) -> None:
            if is_stored:
                store.finish(entry, response)

        def make_writer() -> ResponseWriter:
            return ResponseWriter(job, body, is_stored=is_stored, on_end=on_end)

        is_long = sent.num_bytes > MANY_BYTES
        try:
            writer = await asyncio.to_thread(make_writer) if is_long else make_writer()
        except BaseException:
            # BaseException, to include a cancellation of this task.
            job.close()
            raise
        if body.background:
            if body.stream:
                entry.events = []
            first = writer.fields()
            BackgroundResponse(job, writer, entry, store, record_of(request.scope)).start()
            if not body.stream:
                return await long_json_response(first)
            # Not counted as a follower, because the number of running responses is limited.
            return _stream_stored(state, store, entry, -1, on_close=lambda: None)
        if body.stream:
            return EventStream(
                _streamed(job, writer),
                keep_alive_s=state.config.keep_alive_s,
                on_close=job.close,
                num_unread_bytes=job.num_unread_bytes,
            )
        response = await run_to_end(job, request, _whole(job, writer))
        return await built_response(lambda: response, job.num_answer_values)

    @router.post(
        f"{ROUTE}/input_tokens",
        summary="Count the tokens of the prompt of a response",
        openapi_extra=takes("ResponseBody"),
    )
    async def count_response_tokens(request: Request) -> Response:
        read = await _read(state, request)
        if isinstance(read, Response):
            return read
        sent, body = read
        owner = record_of(request.scope).owner
        resolved = await resolve_request(
            state.bodies, store, sent, body, state.peers.new_id(), owner, state.media_kinds
        )
        with as_response_fields():
            count = await count_prompt_tokens(state, request, resolved.chat)
        return json_response({"object": "response.input_tokens", "input_tokens": count})


def _add_stored_routes(router: APIRouter, state: AppState, store: ResponseStore) -> None:
    path = f"{ROUTE}/{{response_id}}"

    @router.get(
        path,
        summary="A stored response; with ?stream=true its events",
        responses=GENERATES,
    )
    async def get_response(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: QueryInteger | None = None,
    ) -> Response:
        if (peer := state.peers.peer_of(number_of(response_id))) is not None:
            return ForwardedResponse(peer, request)
        entry = _entry(store, request, response_id)
        if not stream:
            if starting_after is not None:
                raise UserError("starting_after needs stream to be true", param="starting_after")
            return await _stored_answer(entry)
        if entry.events is None:
            raise UserError(
                "the events of this response are not stored: it was not created with background "
                "and stream",
                param="stream",
            )
        after = -1 if starting_after is None else starting_after
        if after < -1:
            raise UserError(
                f"starting_after is {after}, it must be at least 0", param="starting_after"
            )
        client = current_client.get() or ""
        store.followers.add(entry.id, client)
        on_close = partial(store.followers.remove, entry.id, client)
        return _stream_stored(state, store, entry, after, on_close)

    @router.delete(path, summary="Delete a stored response")
    async def delete_response(request: Request, response_id: str) -> Response:
        if (peer := state.peers.peer_of(number_of(response_id))) is not None:
            return ForwardedResponse(peer, request)
        entry = _entry(store, request, response_id)
        store.remove(entry)
        await entry.cancel()
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{path}/cancel", summary="Cancel a background response")
    async def cancel_response(request: Request, response_id: str) -> Response:
        if (peer := state.peers.peer_of(number_of(response_id))) is not None:
            return ForwardedResponse(peer, request)
        entry = _entry(store, request, response_id)
        if not entry.is_background:
            raise UserError("only a response that was created with background can be cancelled")
        await entry.cancel()
        return await _stored_answer(entry)

    @router.get(f"{path}/input_items", summary="The input items of a response, in pages")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: QueryInteger = 20,
        order: str = "desc",
        after: str | None = None,
    ) -> Response:
        if (peer := state.peers.peer_of(number_of(response_id))) is not None:
            return ForwardedResponse(peer, request)
        entry = _entry(store, request, response_id)
        page = partial(_page, entry, limit, order, after)
        history = entry.input_history
        if (num_bytes := history.num_bytes) <= MANY_BYTES:
            return await built_response(page, num_bytes // BYTES_PER_VALUE)
        num_decoded = await state.bodies.on_thread(history.num_decoded_bytes)
        held = await state.bodies.hold_more(NOT_HELD, num_decoded)
        try:
            listed = await state.bodies.on_thread(page)
        finally:
            held.free()
        return await long_json_response(listed)


async def _read(
    state: AppState, request: Request
) -> tuple[ReceivedBody, ResponseBody] | ForwardedResponse:
    """The body, or the response of the API server that stores the conversation."""
    state.generation_pipeline()
    sent = await state.bodies.read_object(request)
    fields = sent.fields
    body = await parse(ResponseBody, sent)
    if (peer := state.peers.peer_of(previous_number(body))) is not None:
        return ForwardedResponse(peer, request, fields)
    return sent, body


def _entry(store: ResponseStore, request: Request, response_id: str) -> StoredResponse:
    return store.get(response_id, record_of(request.scope).owner)


def _is_stored(store: ResponseStore, body: ResponseBody) -> bool:
    if store.is_enabled:
        return body.store is not False
    if body.store or body.background:
        raise UserError(
            "this server stores no responses, since --responses-store-max-count is 0",
            param="store" if body.store else "background",
        )
    return False


async def _start(
    state: AppState, request: Request, resolved: ResponseRequest, *, is_cut: bool
) -> ServingRequest:
    with as_response_fields():
        try:
            return await start_chat(state, request, resolved.chat, id_prefix=ID_PREFIX)
        except UserError as error:
            if not is_cut or not is_too_long(error):
                raise
            release_frames(error)
        chat = await shortened(state, request, resolved.chat)
        return await start_chat(state, request, chat, id_prefix=ID_PREFIX)


async def _streamed(job: ServingRequest, writer: ResponseWriter) -> AsyncIterator[bytes]:
    for data in await writer.opening():
        yield data
    async for data in sse_frames(job, writer):
        yield data


async def _whole(job: ServingRequest, writer: ResponseWriter) -> Fields:
    async for deltas in job.tracker:
        writer.add(deltas)
    await writer.ending()
    return writer.fields()


async def _stored_answer(entry: StoredResponse) -> Response:
    if entry.running is not None:
        return await built_response(entry.running.fields, entry.running.num_values)
    return encoded_response(entry.data)


def _stream_stored(
    state: AppState,
    store: ResponseStore,
    entry: StoredResponse,
    after: int,
    on_close: Callable[[], None],
) -> Response:
    """Stream a background response, which continues when the client disconnects."""
    return EventStream(
        follow_events(entry, after, store.pacer),
        keep_alive_s=state.config.keep_alive_s,
        on_close=on_close,
    )


def _page(entry: StoredResponse, limit: int, order: str, after: str | None) -> Json:
    if not 1 <= limit <= MAX_ITEMS:
        raise UserError(f"limit is {limit}, it must be between 1 and {MAX_ITEMS}", param="limit")
    if order not in ("asc", "desc"):
        raise UserError(f"order is {order[:40]!r}, it must be asc or desc", param="order")
    items = entry.input_history.items()
    if order == "desc":
        items.reverse()
    if after is not None:
        positions = [i for i, item in enumerate(items) if item["id"] == after]
        if not positions:
            raise UserError(
                f"after is {after[:40]!r}, which is not one of the items", param="after"
            )
        items = items[positions[0] + 1 :]
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }
