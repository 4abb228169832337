"""POST /inference/v1/generate: takes and returns token ids. The caller, such as a router, renders
the prompts and detokenizes the output."""

import contextlib
from collections.abc import Iterator
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from config.params.sampling import SamplingParams, invalid_token
from config.params.token_ids import unknown_token
from server.generation.answer_parser import PROMPT_CHARACTERS
from server.generation.outputs import Delta, Prompt
from server.http.access_log import log_prompt, record_of
from server.http.body import Fields, built_response, parse
from server.http.errors import Fault
from server.http.openapi import ANSWERS, GENERATES, takes
from server.http.sse import DONE, frame, json_line
from server.openai.answer_format import grammar_after_prompt
from server.openai.schema.generate import SAMPLING_FIELDS, GenerateBody, TokenBody
from server.serving.choices import ChoiceOutput, chat_logprobs
from server.serving.job import (
    PreparedRequest,
    ServingRequest,
    check_grammar,
    collect_choices,
    start_job,
    stream_response,
)
from server.serving.state import AppState


def generate_routes(state: AppState) -> APIRouter:
    """Route that continues token ids."""
    router = APIRouter(tags=["Tokens"], responses=ANSWERS)

    @router.post(
        "/inference/v1/generate",
        summary="Continue token ids, with token ids",
        openapi_extra=takes("GenerateBody"),
        responses=GENERATES,
    )
    async def generate(request: Request) -> Response:
        state.generation_pipeline()
        sent = await parse(GenerateBody, await state.bodies.read_object(request))
        with _sampling_params_named():
            job = await _start(state, request, sent)
        sent.drop_prompt()
        if job.body.stream:
            return stream_response(job, TokenChunks(job))
        choices = await collect_choices(job, request)
        return await built_response(partial(_whole, job, choices), job.num_answer_values)

    return router


@contextlib.contextmanager
def _sampling_params_named() -> Iterator[None]:
    """Replace a sampling parameter as the `param` of errors by its path in the body."""
    try:
        yield
    except UserError as error:
        if error.param in (*SAMPLING_FIELDS, *TokenBody.unsupported):
            error.param = f"sampling_params.{error.param}"
        raise


async def _start(state: AppState, request: Request, sent: GenerateBody) -> ServingRequest:
    model = state.model(sent.model)
    body = sent.request()
    await body.on_thread_if_large(body.check)
    params = await _params(state, request, body, sent.token_ids)
    if state.config.enable_log_requests:
        log_prompt(record_of(request.scope), sent.token_ids)
    prepared = PreparedRequest(
        model=model,
        params=params,
        prompts=[Prompt(sent.token_ids)],
        prompt_field="token_ids",
    )
    return await start_job(state, request, body, prepared, id_prefix="generate-tokens-")


async def _params(
    state: AppState, request: Request, body: TokenBody, token_ids: list[int]
) -> SamplingParams:
    # No defaults of the model: `/render` has already written them into the request.
    params = await body.sampling_params(
        {},
        max_tokens=body.max_tokens,
        # vLLM returns at least 1 token per position.
        logprobs=None if body.logprobs is None else max(body.logprobs, 1),
        prompt_logprobs=body.prompt_logprobs,
    )
    # Only stop strings need the text.
    detokenizes = bool(params.stop) and body.detokenize is not False
    params = params.replace_unchecked(detokenize=detokenizes)
    grammar, tokenizer = params.structured_outputs, state.tokenizer
    if not grammar:
        return params
    await check_grammar(
        state, request, "structured_outputs", grammar, place="sampling_params.structured_outputs"
    )
    if tokenizer:
        # Enough tokens for PROMPT_CHARACTERS characters: a token usually has at least 1 character.
        last_ids, ready = token_ids[-PROMPT_CHARACTERS:], state.generation_pipeline().ready
        num_ids = ready.prompt_vocab_size or ready.vocab_size
        if unknown := invalid_token(last_ids, num_ids):
            raise unknown_token("the prompt", unknown, num_ids, "token_ids")
        end = tokenizer.decode(last_ids, skip_special_tokens=False)
        grammar = grammar_after_prompt(state.parser_config, end, grammar)
    return params.replace_unchecked(structured_outputs=grammar)


def _whole(job: ServingRequest, choices: list[ChoiceOutput]) -> Fields:
    return {
        "request_id": job.id,
        "model": job.model,
        "created": job.created,
        "choices": [_choice(job, index, choice) for index, choice in enumerate(choices)],
        "usage": job.usage(),
        "prompt_logprobs": job.prompt_logprobs(0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _choice(job: ServingRequest, index: int, choice: ChoiceOutput) -> Fields:
    return {
        "index": index,
        "logprobs": job.chat_logprobs(choice),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "routed_experts": None,
        "sampling_mask": None,
    }


class TokenChunks:
    """Chunks of /inference/v1/generate."""

    def __init__(self, job: ServingRequest) -> None:
        self._job = job

    def feed(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._chunk(d) for d in deltas if d.token_ids or d.finish_reason])

    async def ending(self) -> bytes:
        if not self._job.includes_usage:
            return DONE
        return self._frame([], self._job.usage()) + DONE

    async def failing(self, fault: Fault) -> bytes:
        return frame(fault.body()) + DONE

    def _chunk(self, delta: Delta) -> bytes:
        choice = {
            "index": delta.index,
            "logprobs": chat_logprobs(delta.logprobs, self._job.token_formatter)
            if delta.logprobs
            else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
        }
        has_usage = self._job.includes_usage_in_chunks
        return self._frame([choice], self._job.usage() if has_usage else None)

    def _frame(self, choices: list[Fields], usage: Fields | None) -> bytes:
        chunk = {"request_id": self._job.id, "choices": choices, "usage": usage}
        return frame(json_line(chunk))
