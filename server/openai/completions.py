"""POST /v1/completions: completions of texts or token ids, whole or streamed."""

import asyncio
from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import PromptTooLong
from config.json_text import Json
from config.params.sampling import SamplingParams
from server.generation.outputs import Prompt
from server.generation.pipeline import Pauses
from server.generation.validation import check_comparable, truncate_prompt
from server.http.access_log import log_prompts, record_of
from server.http.body import built_response, parse
from server.http.json_encoder import encode_json
from server.http.openapi import ANSWERS, GENERATES, takes
from server.openai.chunks import CompletionChunks, echo_logprobs
from server.openai.schema.completions import CompletionBody, numbers_of_ids
from server.openai.schema.structured import place_of
from server.serving.choices import (
    ChoiceOutput,
    TextLogprobs,
    consumed,
    joined_logprobs,
    most_likely,
)
from server.serving.job import (
    PreparedRequest,
    ServingRequest,
    check_admission,
    check_grammar,
    collect_choices,
    start_job,
    stream_response,
)
from server.serving.prompts import encode_prompt
from server.serving.state import AppState

INLINE_IDS = 10_000
"""Maximum number of token ids that are validated or decoded on the event loop: about a
millisecond."""
PROMPTS_AT_ONCE = 16
"""Prompts to encode before the event loop runs other requests: a few milliseconds."""


def completion_routes(state: AppState) -> APIRouter:
    """Route of text completions."""
    router = APIRouter(tags=["OpenAI"], responses=ANSWERS)

    @router.post(
        "/v1/completions",
        summary="Continue texts or token ids",
        openapi_extra=takes("CompletionBody"),
        responses=GENERATES,
    )
    async def create_completion(request: Request) -> Response:
        job = await _start(state, request)
        job.body.drop_prompt()
        texts = await _echoed_texts(job) if job.body.echo else None
        job.num_echo_characters = sum(map(len, texts or ())) * job.params.n
        if job.body.stream:
            return stream_response(job, CompletionChunks(job, texts, _hidden(job)))
        choices = await collect_choices(job, request)
        return await built_response(partial(_whole, job, choices, texts), job.num_answer_values)

    return router


async def _start(state: AppState, request: Request) -> ServingRequest:
    state.generation_pipeline()
    body = await parse(CompletionBody, await state.bodies.read_object(request))
    prepared = await prepare_completion(state, request, body)
    return await start_job(state, request, body, prepared, id_prefix="cmpl-")


async def prepare_completion(
    state: AppState, request: Request, body: CompletionBody
) -> PreparedRequest:
    """Check and encode `body`. Raises UserError, Overloaded, and the other errors of
    `check_grammar`."""
    model = state.model(body.model)
    await body.on_thread_if_large(body.check)
    params = await _params(state, body)
    prompts = await _prompts(state, body, params)
    if state.config.enable_log_requests:
        shown = (prompt.text or prompt.token_ids for prompt in prompts)
        await log_prompts(record_of(request.scope), shown)
    constraint = await body.on_thread_if_large(lambda: body.constraint)
    if constraint is not None:
        place = place_of(constraint[0], body.response_format)
        await check_grammar(state, request, *constraint, place=place)
    return PreparedRequest(model=model, params=params, prompts=prompts, prompt_field="prompt")


async def _params(state: AppState, body: CompletionBody) -> SamplingParams:
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    logprobs, num_choices = body.logprobs, 1 if body.n is None else body.n
    if body.num_drawn > num_choices:
        check_comparable(state.generation_pipeline().ready.logprobs_mode, "best_of")
        if logprobs is None:
            # Selecting the most likely choices requires log-probabilities.
            logprobs = 0
    params = await body.sampling_params(
        state.sampling_defaults,
        max_tokens=body.limit,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return params.replace_unchecked(n=body.num_drawn)


async def _prompts(state: AppState, body: CompletionBody, params: SamplingParams) -> list[Prompt]:
    keep, numbers_of = body.truncate_prompt_tokens, numbers_of_ids(body.prompt)
    longest = max(numbers_of, default=0)
    if keep is None and longest > state.max_model_len:
        # Reject a long prompt before checking millions of ids.
        raise PromptTooLong(longest, body.limit, state.max_model_len, param="prompt")
    given = (
        await asyncio.to_thread(body.prompts) if sum(numbers_of) > INLINE_IDS else body.prompts()
    )
    # Check admission before tokenizing thousands of texts.
    check_admission(state, body, len(given) * params.n, "prompt")

    async def prompt(text_or_ids: str | list[int]) -> Prompt:
        if not isinstance(text_or_ids, str):
            limit, keep_end = body.limit, body.keeps_end
            return Prompt(
                truncate_prompt(text_or_ids, keep, state.max_model_len, limit, keep_end=keep_end)
            )
        special = body.add_special_tokens is not False
        return await encode_prompt(
            state,
            text_or_ids,
            special=special,
            keep=keep,
            keep_end=body.keeps_end,
            limit=body.limit,
            param="prompt",
        )

    if len(given) == 1:
        return [await prompt(given[0])]
    pauses = Pauses(state.generation_pipeline().pacer)
    prompts: list[Prompt] = []
    for start in range(0, len(given), PROMPTS_AT_ONCE):
        await pauses.pause()
        prompts += await asyncio.gather(*map(prompt, given[start : start + PROMPTS_AT_ONCE]))
    return prompts


async def _echoed_texts(job: ServingRequest) -> list[str]:
    if job.generation.num_prompt_tokens <= INLINE_IDS:
        return _prompt_texts(job)
    return await asyncio.to_thread(_prompt_texts, job)


def _prompt_texts(job: ServingRequest) -> list[str]:
    tokenizer = job.state.tokenizer
    return [
        prompt.text
        if prompt.text is not None
        else tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        if tokenizer
        else ""
        for prompt in job.prompts
    ]


def _hidden(job: ServingRequest) -> frozenset[int]:
    tokenizer = job.state.tokenizer
    if tokenizer is None or not job.params.skip_special_tokens:
        return frozenset()
    return tokenizer.special_ids


def _whole(job: ServingRequest, choices: list[ChoiceOutput], texts: list[str] | None) -> Json:
    body = job.body
    assert isinstance(body, CompletionBody)
    num_kept = body.n or 1
    if num_kept < body.num_drawn:
        choices = most_likely(choices, body.num_drawn, num_kept)
    # Encoded JSON of a choice takes a fifth of the memory of its objects.
    shown = [
        msgspec.Raw(encode_json(_choice(job, body, index, choice, texts)))
        for index, choice in enumerate(choices)
    ]
    return job.answer("text_completion", shown)


def _choice(
    job: ServingRequest,
    body: CompletionBody,
    index: int,
    choice: ChoiceOutput,
    texts: list[str] | None,
) -> Json:
    prompt_index = index // (body.n or 1)
    return {
        "index": index,
        "text": choice.text if texts is None else texts[prompt_index] + choice.text,
        "logprobs": None if body.logprobs is None else _logprobs(job, prompt_index, choice, texts),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prompt_logprobs": job.prompt_logprobs(prompt_index),
        "token_ids": choice.token_ids if body.return_token_ids else None,
        "prompt_token_ids": job.prompts[prompt_index].token_ids if body.return_token_ids else None,
    }


def _logprobs(
    job: ServingRequest, prompt_index: int, choice: ChoiceOutput, texts: list[str] | None
) -> Json:
    writer = TextLogprobs(job.token_formatter, _hidden(job))
    parts = [] if texts is None else [echo_logprobs(job, prompt_index, writer, texts[prompt_index])]
    return joined_logprobs([*parts, writer.write(consumed(choice.logprobs))])
