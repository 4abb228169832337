"""POST /v1/chat/completions: a conversation in, an answer out, whole or streamed."""

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import PromptTooLong
from server.body import parse, read_object
from server.choices import Gathered, chat_logprobs, prompt_logprobs_of
from server.chunks import ChatChunks
from server.job import Job, answer_stream, answer_whole, check_grammar, encoded, gather, start_job
from server.openapi import GENERATES, takes
from server.reading import forced_answers, schemas_of
from server.record import log_prompt, record_of
from server.schema.chat import ChatBody, ConversationBody
from server.state import AppState
from server.text.template import TextTooLong

MANY_PIECES = 2_000
"""Messages and parts that are checked on the event loop: a millisecond."""


def chat_routes(state: AppState) -> APIRouter:
    """The routes, over `state`."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        operation_id="create_chat_completion",
        summary="Answer a conversation",
        openapi_extra=takes("ChatBody"),
        responses=GENERATES,
    )
    async def create_chat_completion(request: Request) -> Response:
        job = await _start(state, request)
        body = job.body
        assert isinstance(body, ChatBody)
        echo = _last_text(body.messages) if body.echo else ""
        if body.stream:
            shows = body.include_reasoning is not False
            return answer_stream(job, ChatChunks(job, echo, shows_thinking=shows))
        return answer_whole(_whole(job, await gather(job, request), echo))

    return router


async def render(state: AppState, body: ConversationBody) -> str:
    """A conversation as the model's text. Raises UserError."""
    check = partial(
        body.check_conversation, trust_template=state.config.trust_request_chat_template
    )
    if body.has_more_than(MANY_PIECES):
        await asyncio.to_thread(check)
    else:
        check()
    template = state.chat_template()
    controls = state.text_tokenizer("messages").controls
    return await template.render(
        body.messages,
        tools=body.shown_tools,
        documents=body.documents,
        add_generation_prompt=body.opens_answer,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.template_variables,
        template=body.chat_template,
        mark=None if controls is None else controls.marked,
    )


async def _start(state: AppState, request: Request) -> Job:
    state.opened()
    body = await parse(ChatBody, await read_object(request, state.config.max_body_bytes))
    model = state.model(body.model)
    body.check()
    params = body.sampling(
        state.sampling_defaults,
        max_tokens=body.limit,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    if body.tools and body.tool_choice in (None, "auto"):
        state.forms.check_choosing()
    try:
        text = await render(state, body)
    except TextTooLong:
        # Clients shorten a conversation when they read of the context, not of characters.
        tokenizer, most = state.text_tokenizer("messages"), state.max_model_len
        if (least := tokenizer.least_tokens(body.text, most)) > most:
            raise PromptTooLong(least, body.limit, most, at_least=True) from None
        raise
    prompt = await encoded(
        state,
        text,
        special=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
        limit=body.limit,
        param="messages",
    )
    tokenizer = state.text_tokenizer("messages")
    text = tokenizer.unmarked(text)
    if state.config.enable_log_requests:
        log_prompt(record_of(request.scope), text)
    tools = None if body.shown_tools is None else schemas_of(body.shown_tools)
    most_calls = 1 if body.parallel_tool_calls is False else None
    await check_grammar(state, body)
    answers = None
    if params.structured_outputs is None:
        # An answer with a form has it from its first token on: there is nothing else to read.
        answers = state.forms.answers(tokenizer, text, tools, most_calls)
    elif tools is not None:
        answers = forced_answers(tokenizer, tools, body.forced_name)
    return start_job(
        state,
        request,
        body,
        id_prefix="chatcmpl",
        model=model,
        params=params,
        prompts=[prompt],
        param="messages",
        answers=answers,
    )


def _whole(job: Job, choices: list[Gathered], echo: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "choices": [_choice(job, index, choice, echo) for index, choice in enumerate(choices)],
        "usage": job.usage(),
        "system_fingerprint": job.state.fingerprint,
    }
    width = job.body.prompt_logprobs
    if width is not None:
        answer["prompt_logprobs"] = prompt_logprobs_of(job.generation.prompt_logprobs[0], width)
    if job.body.return_token_ids:
        answer["prompt_token_ids"] = job.prompts[0].token_ids
    return answer


def _choice(job: Job, index: int, choice: Gathered, echo: str) -> dict[str, Any]:
    has_logprobs = job.params.logprobs is not None
    message: dict[str, Any] = {
        "role": "assistant",
        "content": echo + choice.text,
        "refusal": None,
    }
    if job.answers is not None:
        assert isinstance(job.body, ChatBody)
        message = choice.message.fields(
            echo,
            thinks=job.answers.has_thinking,
            shows_thinking=job.body.include_reasoning is not False,
        )
    made: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs, job.name) if has_logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if job.body.return_token_ids:
        made["token_ids"] = choice.token_ids
    return made


def _last_text(messages: list[Any]) -> str:
    content = messages[-1].get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or part.get("refusal") or "" for part in content)
    return content or ""
