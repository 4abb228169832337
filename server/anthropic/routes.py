"""POST /v1/messages and /v1/messages/count_tokens, built on the chat pipeline."""

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.anthropic.chat_request import to_chat_body
from server.anthropic.errors import ROUTES
from server.anthropic.output import MessageEvents, full_message
from server.anthropic.schema import CountBody, MessagesBody
from server.http.body import MANY_BYTES, ReceivedBody, built_response, json_response, parse
from server.http.openapi import MESSAGES_ANSWERS, MESSAGES_GENERATES, takes
from server.openai.chat_request import count_prompt_tokens, start_chat
from server.openai.schema.chat import ChatBody
from server.serving.job import ServingRequest, collect_choices, stream_response
from server.serving.state import AppState


def messages_routes(state: AppState) -> APIRouter:
    """Routes of the Messages API: create a message, count tokens."""
    router = APIRouter(tags=["Anthropic"], responses=MESSAGES_ANSWERS)

    @router.post(
        ROUTES,
        summary="Answer a conversation, as Anthropic's API does",
        openapi_extra=takes("MessagesBody"),
        responses=MESSAGES_GENERATES,
    )
    async def create_message(request: Request) -> Response:
        job, shows = await _start(state, request)
        if job.body.stream:
            return stream_response(job, MessageEvents(job, shows_reasoning=shows))
        (choice,) = await collect_choices(job, request)
        build = partial(full_message, job, choice, shows_reasoning=shows)
        return await built_response(build, job.num_answer_values)

    @router.post(
        f"{ROUTES}/count_tokens",
        summary="Count the tokens of a conversation's prompt",
        openapi_extra=takes("CountBody"),
    )
    async def count_message_tokens(request: Request) -> Response:
        state.generation_pipeline()
        sent = await state.bodies.read_object(request)
        chat = await _chat(state, await parse(CountBody, sent), sent)
        count = await count_prompt_tokens(state, request, chat)
        return json_response({"input_tokens": count})

    return router


async def _start(state: AppState, request: Request) -> tuple[ServingRequest, bool]:
    """Start a request. Returns the request, and whether the response shows the reasoning. The
    request references only the converted chat body, so that the received body can be freed."""
    state.generation_pipeline()
    sent = await state.bodies.read_object(request)
    body = await parse(MessagesBody, sent)
    chat = await _chat(state, body, sent)
    chat.hold(sent.held)
    job = await start_chat(state, request, chat, id_prefix="msg_")
    chat.drop_prompt()
    return job, body.thinking is None or body.thinking.display != "omitted"


async def _chat(state: AppState, body: CountBody, sent: ReceivedBody) -> ChatBody:
    is_large = sent.num_bytes > MANY_BYTES

    def convert() -> ChatBody:
        chat = to_chat_body(
            body,
            has_reasoning=state.parser_config.reasoning_parser is not None,
            takes_images=state.images is not None,
        )
        if is_large:
            chat.measure()
        return chat

    return await asyncio.to_thread(convert) if is_large else convert()
