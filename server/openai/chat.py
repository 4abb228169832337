"""POST /v1/chat/completions, and /v1/chat/completions/input_tokens, which counts the tokens of a
prompt."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.json_text import Json
from server.http.body import built_response, json_response, parse
from server.http.openapi import ANSWERS, GENERATES, takes
from server.openai.chat_request import count_prompt_tokens, start_chat
from server.openai.chunks import ChatChunks
from server.openai.schema.chat import ChatBody
from server.serving.choices import ChoiceOutput
from server.serving.job import ServingRequest, collect_choices, stream_response
from server.serving.state import AppState


def chat_routes(state: AppState) -> APIRouter:
    """Routes of chat completions, and of the token count of a chat prompt."""
    router = APIRouter(tags=["OpenAI"], responses=ANSWERS)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        openapi_extra=takes("ChatBody"),
        responses=GENERATES,
    )
    async def create_chat_completion(request: Request) -> Response:
        state.generation_pipeline()
        body = await parse(ChatBody, await state.bodies.read_object(request))
        job = await start_chat(state, request, body, id_prefix="chatcmpl-")
        echo = body.last_text if body.echo else ""
        job.num_echo_characters = len(echo) * job.params.n
        body.drop_prompt()
        if body.stream:
            shows = body.include_reasoning is not False
            return stream_response(job, ChatChunks(job, echo, shows_reasoning=shows))
        choices = await collect_choices(job, request)
        return await built_response(partial(_whole, job, choices, echo), job.num_answer_values)

    @router.post(
        "/v1/chat/completions/input_tokens",
        summary="Count the tokens of a conversation's prompt",
        openapi_extra=takes("ChatBody"),
    )
    async def count_chat_tokens(request: Request) -> Response:
        state.generation_pipeline()
        body = await parse(ChatBody, await state.bodies.read_object(request))
        count = await count_prompt_tokens(state, request, body)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    return router


def _whole(job: ServingRequest, choices: list[ChoiceOutput], echo: str) -> Json:
    shown = [_choice(job, index, choice, echo) for index, choice in enumerate(choices)]
    answer = job.answer("chat.completion", shown)
    answer["prompt_logprobs"] = job.prompt_logprobs(0)
    has_ids = job.body.return_token_ids
    answer["prompt_token_ids"] = job.prompts[0].token_ids if has_ids else None
    return answer


def _choice(job: ServingRequest, index: int, choice: ChoiceOutput, echo: str) -> Json:
    assert isinstance(job.body, ChatBody)
    has_reasoning = job.parsers is not None and job.parsers.has_reasoning
    shows_reasoning = has_reasoning and job.body.include_reasoning is not False
    return {
        "index": index,
        "message": choice.message.to_dict(echo, shows_reasoning=shows_reasoning),
        "logprobs": job.chat_logprobs(choice),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if job.body.return_token_ids else None,
    }
