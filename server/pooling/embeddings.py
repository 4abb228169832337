"""POST /v1/embeddings, /pooling and /classify: vectors or classes of texts, token ids or a
conversation."""

import asyncio
import dataclasses
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from config.params.pooling import CLASSIFY, EMBED, SCORE, TOKEN_EMBED, PoolingParams
from server.http.access_log import log_prompt, record_of
from server.http.body import json_response, parse
from server.http.disconnect import CancelOnDisconnect
from server.http.openapi import ANSWERS, takes
from server.http.state import AppState
from server.openai.chat_request import render
from server.openai.schema.chat import ChatPromptBody
from server.pooling.inputs import InputOptions
from server.pooling.job import (
    PoolingJob,
    collect_vectors,
    encode_vectors,
    run_off_loop,
    start_pooling,
)
from server.pooling.pipeline import PoolingInput, Vectors
from server.pooling.schema import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingBody,
    EmbeddingChatBody,
    PoolBody,
    PoolChatBody,
)
from server.text.tokenizer import TooManyCharacters, TooManyTokens

TASK_PREFERENCE = (EMBED, CLASSIFY, SCORE, TOKEN_EMBED)
"""/pooling without a task uses the first of these that the model supports."""

InputsBody = EmbeddingBody | EmbeddingChatBody | ClassifyBody | ClassifyChatBody
Plain = TypeVar("Plain", EmbeddingBody, PoolBody, ClassifyBody)
Chat = TypeVar("Chat", EmbeddingChatBody, PoolChatBody, ClassifyChatBody)


def embedding_routes(state: AppState) -> APIRouter:
    """The routes, over `state`."""
    router = APIRouter(tags=["Pooling"])

    @router.post(
        "/v1/embeddings",
        operation_id="create_embedding",
        summary="Vectors of texts",
        openapi_extra=takes("EmbeddingBody", "EmbeddingChatBody"),
        responses=ANSWERS,
    )
    async def create_embedding(request: Request) -> Response:
        body = await _parse(state, request, EmbeddingBody, EmbeddingChatBody)
        params = PoolingParams(task=EMBED, dimensions=body.dimensions, normalize=body.normalizes)
        job = await _start(state, request, body, params, id_prefix="embd-")
        return await _vectors(job, request, "embedding", "embedding", body.encoding_format)

    @router.post(
        "/pooling",
        operation_id="create_pooling",
        summary="What a pooling model makes of texts",
        openapi_extra=takes("PoolBody", "PoolChatBody"),
        responses=ANSWERS,
    )
    async def create_pooling(request: Request) -> Response:
        body = await _parse(state, request, PoolBody, PoolChatBody)
        tasks = state.input_processor().facts.tasks
        params = PoolingParams(
            task=body.task or next(task for task in TASK_PREFERENCE if task in tasks),
            dimensions=body.dimensions,
            normalize=body.normalizes,
        )
        job = await _start(state, request, body, params, id_prefix="pool-")
        return await _vectors(
            job,
            request,
            "pooling",
            "data",
            body.encoding_format,
            all_rows=params.task == TOKEN_EMBED,
        )

    @router.post(
        "/classify",
        operation_id="classify",
        summary="Classes of texts",
        openapi_extra=takes("ClassifyBody", "ClassifyChatBody"),
        responses=ANSWERS,
    )
    async def classify(request: Request) -> Response:
        body = await _parse(state, request, ClassifyBody, ClassifyChatBody)
        params = PoolingParams(task=CLASSIFY, normalize=body.normalizes)
        job = await _start(state, request, body, params, id_prefix="classify-")
        vectors = await collect_vectors(job, request)
        labels = state.input_processor().facts.labels
        data = [_class_entry(index, item, labels) for index, item in enumerate(vectors)]
        return json_response(job.list_body(data))

    return router


async def _parse(
    state: AppState, request: Request, kind: type[Plain], chat: type[Chat]
) -> Plain | Chat:
    state.input_processor()
    received = await state.bodies.read_object(request)
    if received.fields.get("messages") is None:
        return await parse(kind, received)
    if received.fields.get("input") is not None:
        raise UserError("input and messages cannot both be given", param="input")
    return await parse(chat, received)


async def _start(
    state: AppState,
    request: Request,
    body: InputsBody,
    params: PoolingParams,
    *,
    id_prefix: str,
) -> PoolingJob:
    processor = state.input_processor()
    model = state.model(body.model)
    body.check()
    processor.check(params, "task" if isinstance(body, (PoolBody, PoolChatBody)) else "model")
    options = InputOptions(
        params,
        truncate=body.truncate_prompt_tokens,
        keep_end=body.truncation_side == "left",
    )
    if isinstance(body, ChatPromptBody):
        processing = _process_conversation(state, request, body, options)
    else:
        processing = _process_inputs(state, request, body, options)
    with CancelOnDisconnect(request.receive):
        inputs = await processing
    processor.check_size(inputs)
    return start_pooling(state, request, body, inputs, id_prefix=id_prefix, model=model)


async def _process_conversation(
    state: AppState,
    request: Request,
    body: EmbeddingChatBody | ClassifyChatBody,
    options: InputOptions,
) -> list[PoolingInput]:
    text = await render(state, body)
    tokenizer = state.text_tokenizer("messages")
    if state.config.enable_log_requests:
        log_prompt(record_of(request.scope), tokenizer.unmarked(text))
    options = dataclasses.replace(options, param="messages", is_list=False)
    special, processor = bool(body.add_special_tokens), state.input_processor()
    max_tokens = processor.limit(options.truncate)
    try:
        if options.truncate is None:
            ids = await tokenizer.encode(text, special, max_tokens)
        else:
            ids = await tokenizer.encode_part(text, special, max_tokens, from_end=options.keep_end)
    except TooManyTokens as error:
        raise processor.too_long(error.count, options, at_least=error.at_least) from None
    except TooManyCharacters as error:
        error.param = options.param
        raise
    return await processor.token_lists([ids], options)


async def _process_inputs(
    state: AppState, request: Request, body: EmbeddingBody | ClassifyBody, options: InputOptions
) -> list[PoolingInput]:
    processor = state.input_processor()
    inputs = await asyncio.to_thread(body.inputs) if body.is_big else body.inputs()
    if state.config.enable_log_requests:
        for item in inputs:
            log_prompt(record_of(request.scope), item if isinstance(item, str) else repr(item))
    options = dataclasses.replace(
        options,
        is_list=body.is_listed,
        special=body.add_special_tokens is not False,
        prompt_name=body.prompt_name,
    )
    texts = [item for item in inputs if isinstance(item, str)]
    if texts:
        return await processor.texts(texts, options)
    return await processor.token_lists(
        [item for item in inputs if not isinstance(item, str)], options
    )


async def _vectors(
    job: PoolingJob,
    request: Request,
    kind: str,
    field: str,
    encoding_format: str | None,
    *,
    all_rows: bool = False,
) -> Response:
    """A list response whose entries have object `kind` and their numbers in `field`."""
    vectors = await collect_vectors(job, request)

    def encoded() -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "object": kind,
                field: encode_vectors(item if all_rows else item[0], encoding_format),
            }
            for index, item in enumerate(vectors)
        ]

    return json_response(job.list_body(await run_off_loop(vectors, encoded)))


def _class_entry(index: int, vectors: Vectors, labels: tuple[str, ...]) -> dict[str, Any]:
    numbers = vectors[0]
    best = int(numbers.argmax())
    return {
        "index": index,
        "label": labels[best] if best < len(labels) else None,
        "probs": numbers.tolist(),
        "num_classes": len(numbers),
    }
