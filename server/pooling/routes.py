"""Routes of pooling models: embeddings, pooling, classification, scores and reranking, for texts,
token ids, conversations and pairs of texts."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from config.json_text import Json
from config.params.pooling import CLASSIFY, EMBED, SCORE, TOKEN_EMBED, PoolingParams
from engine.client.request_limits import RequestTerms
from server.http.access_log import log_prompts, record_of
from server.http.body import built_response, json_response, parse
from server.http.disconnect import CancelOnDisconnect
from server.http.openapi import ANSWERS, takes
from server.openai.chat_request import render
from server.pooling.inputs import (
    InputOptions,
    InputProcessor,
    make_input_processor,
    not_a_pooling_model,
)
from server.pooling.pipeline import (
    BINARY_TYPES,
    PoolingInput,
    PoolingStream,
    Vectors,
    encode_vectors,
    typed_embeddings,
)
from server.pooling.schema import (
    ClassifyBody,
    ClassifyChatBody,
    CohereEmbedBody,
    EmbeddingBody,
    EmbeddingChatBody,
    EngineBody,
    PoolBody,
    PoolChatBody,
    RerankBody,
    ScoreBody,
)
from server.pooling.scores import TextPairs, pair_inputs, pair_scores
from server.serving.job import RunningRequest, request_id_of, run_to_end, start_tracked
from server.serving.state import AppState

TASK_PREFERENCE = (EMBED, CLASSIFY, SCORE, TOKEN_EMBED)
"""Task of /pooling if the request names no task: the first task here that the model supports."""
NUMBERS_PER_VALUE = 10
"""Number of vector values that take as long to encode as a JSON value of other responses."""

B = TypeVar("B", bound=EngineBody)
Chat = TypeVar("Chat", bound=EngineBody)
Entries = list[Json]


class PoolingJob(RunningRequest[PoolingStream]):
    """A pooling request that was sent to the engine."""

    def usage(self) -> dict[str, int]:
        """The usage object: tokens of all inputs."""
        count = self.tracker.stream.num_prompt_tokens
        return {"prompt_tokens": count, "total_tokens": count}

    async def response(self, build: Callable[[list[Vectors]], dict[str, object]]) -> Response:
        """The response with the result of `build`, which is called with the vectors."""
        vectors = self.tracker.stream.vectors
        num_numbers = sum(item.size for item in vectors)
        return await built_response(lambda: build(vectors), num_numbers // NUMBERS_PER_VALUE)

    async def list_response(self, entries: Callable[[list[Vectors]], Entries]) -> Response:
        """The response with the list of `entries`, which is called with the vectors."""
        fields = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        usage = self.usage()
        return await self.response(
            lambda vectors: {**fields, "data": entries(vectors), "usage": usage}
        )


def pooling_routes(state: AppState) -> APIRouter:
    """Routes of embeddings, scores, reranking, classification and pooling."""
    router = APIRouter(tags=["Pooling"])

    async def create_embedding(request: Request) -> Response:
        body = await _parse(state, request, EmbeddingBody, EmbeddingChatBody)
        params = PoolingParams(task=EMBED, dimensions=body.dimensions, normalize=body.normalizes)
        inputs = await _inputs(state, request, body, params)
        entries = partial(_vector_entries, "embedding", "embedding", body.encoding_format)
        job = await _run(state, request, body, "embd-", inputs)
        return await job.list_response(entries)

    async def create_cohere_embedding(request: Request) -> Response:
        body = await _parse(state, request, CohereEmbedBody)
        inputs = await _cohere_inputs(state, request, body)
        job = await _run(state, request, body, "embd-", inputs)
        tokens = job.usage()["prompt_tokens"]
        fields: dict[str, object] = {
            "id": job.id,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }
        if body.source == "texts":
            fields["texts"] = body.texts
        return await job.response(
            lambda vectors: {**fields, "embeddings": typed_embeddings(body.types, vectors)}
        )

    async def create_pooling(request: Request) -> Response:
        body = await _parse(state, request, PoolBody, PoolChatBody)
        tasks = _processor(state).facts.tasks
        params = PoolingParams(
            task=body.task or next(task for task in TASK_PREFERENCE if task in tasks),
            dimensions=body.dimensions,
            normalize=body.normalizes,
        )
        inputs = await _inputs(state, request, body, params, task_field="task")
        all_rows = params.task == TOKEN_EMBED
        entries = partial(
            _vector_entries, "pooling", "data", body.encoding_format, all_rows=all_rows
        )
        job = await _run(state, request, body, "pool-", inputs)
        return await job.list_response(entries)

    async def classify(request: Request) -> Response:
        body = await _parse(state, request, ClassifyBody, ClassifyChatBody)
        params = PoolingParams(task=CLASSIFY, normalize=body.normalizes)
        if isinstance(body, ClassifyBody) and body.input == []:
            # Clients send empty batches, which vLLM accepts.
            _processor(state).check(params, "model")
            return _empty_list(state, body)
        inputs = await _inputs(state, request, body, params)
        entries = partial(_class_entries, _processor(state).facts.labels)
        job = await _run(state, request, body, "classify-", inputs)
        return await job.list_response(entries)

    async def score(request: Request) -> Response:
        body = await _parse(state, request, ScoreBody)
        inputs, scores = await _pair_inputs(state, request, body)
        body.drop_prompt()
        job = await _run(state, request, body, "score-", inputs)
        return await job.list_response(lambda vectors: _score_entries(scores(vectors)))

    async def rerank(request: Request) -> Response:
        body = await _parse(state, request, RerankBody)
        inputs, scores = await _pair_inputs(state, request, body)
        documents = None if body.return_documents is False else body.pairs()[1]
        body.drop_prompt(sum(map(sys.getsizeof, documents or ())))
        job = await _run(state, request, body, "rerank-", inputs)
        fields = {"id": job.id, "model": job.model, "usage": job.usage()}
        return await job.response(
            lambda vectors: {
                **fields,
                "results": _ranked(scores(vectors), body.top_n, documents),
            }
        )

    for handler, paths, summary, bodies in (
        (
            create_embedding,
            ("/v1/embeddings",),
            "Vectors of texts",
            ("EmbeddingBody", "EmbeddingChatBody"),
        ),
        (
            create_cohere_embedding,
            ("/v2/embed",),
            "Vectors of texts, in the form of Cohere's API",
            ("CohereEmbedBody",),
        ),
        (
            create_pooling,
            ("/pooling",),
            "The output of a pooling model",
            ("PoolBody", "PoolChatBody"),
        ),
        (classify, ("/classify",), "Classes of texts", ("ClassifyBody", "ClassifyChatBody")),
        (score, ("/score", "/v1/score"), "Scores of pairs of texts", ("ScoreBody",)),
        (
            rerank,
            ("/rerank", "/v1/rerank", "/v2/rerank"),
            "Documents ranked by relevance to a query",
            ("RerankBody",),
        ),
    ):
        for path in paths:
            name = handler.__name__ if len(paths) == 1 else path.strip("/").replace("/", "_")
            router.add_api_route(
                path,
                handler,
                methods=["POST"],
                operation_id=name,
                summary=summary,
                openapi_extra=takes(*bodies),
                responses=ANSWERS,
            )
    return router


def _processor(state: AppState) -> InputProcessor:
    state.check_awake()
    processor = make_input_processor(state.client.ready, state.tokenizer)
    if processor is None:
        raise not_a_pooling_model()
    return processor


async def _parse(
    state: AppState, request: Request, kind: type[B], chat: type[Chat] | None = None
) -> B | Chat:
    _processor(state)
    received = await state.bodies.read_object(request)
    body: B | Chat
    if chat is None or received.fields.get("messages") is None:
        body = await parse(kind, received)
    elif received.fields.get("input") is not None:
        raise UserError("input and messages cannot both be given", param="input")
    else:
        body = await parse(chat, received)
    state.model(body.model)
    body.check()
    return body


async def _inputs(
    state: AppState,
    request: Request,
    body: EmbeddingBody | EmbeddingChatBody | ClassifyBody | ClassifyChatBody,
    params: PoolingParams,
    *,
    task_field: str = "model",
) -> list[PoolingInput]:
    processor = _processor(state)
    processor.check(params, task_field)
    options = InputOptions(
        params,
        truncate=body.truncate_prompt_tokens,
        keep_end=body.truncation_side == "left",
    )
    with CancelOnDisconnect(request.receive):
        if isinstance(body, (EmbeddingChatBody, ClassifyChatBody)):
            rendered = await render(state, request, body)
            if rendered.images:
                raise UserError(
                    f"the messages have {len(rendered.images)} images, only text can be embedded",
                    param="messages",
                )
            text = rendered.text
            await _log_prompts(state, request, [state.text_tokenizer("messages").unmarked(text)])
            special = bool(body.add_special_tokens)
            options = dataclasses.replace(options, param="messages", is_list=False, special=special)
            inputs = await processor.rendered(text, options)
        else:
            prompts = await asyncio.to_thread(body.inputs) if body.is_big else body.inputs()
            await _log_prompts(state, request, prompts)
            options = dataclasses.replace(
                options,
                is_list=body.is_listed,
                special=body.add_special_tokens is not False,
                prompt_name=body.prompt_name,
            )
            inputs = await processor.prompts(prompts, options)
    processor.check_size(inputs)
    body.drop_prompt()
    return inputs


async def _cohere_inputs(
    state: AppState, request: Request, body: CohereEmbedBody
) -> list[PoolingInput]:
    processor = _processor(state)
    facts = processor.facts
    params = PoolingParams(task=EMBED, dimensions=body.output_dimension)
    processor.check(params, "model", size_param="output_dimension")
    if body.input_type not in (None, *facts.prompts):
        raise UserError(
            f"Unsupported input_type {str(body.input_type)[:80]!r}, this model has "
            f"{processor.prompt_names()}",
            param="input_type",
        )
    width = body.output_dimension or facts.width
    if width % 8 and any(name in BINARY_TYPES for name in body.types):
        raise UserError(
            f"binary vectors need a multiple of 8 dimensions, there are {width}",
            param="embedding_types",
        )
    texts = body.embedded_texts()
    await _log_prompts(state, request, texts)
    cuts = body.truncate != "NONE"
    most = min(body.max_tokens or processor.max_tokens, processor.max_tokens)
    options = InputOptions(
        params,
        param=body.source,
        truncate=most if cuts else None,
        keep_end=body.truncate == "START",
        prompt_name=body.input_type,
    )
    with CancelOnDisconnect(request.receive):
        inputs = await processor.prompts(texts, options)
    for index, item in enumerate(inputs):
        if len(item.token_ids) > most:
            raise UserError(
                f"{options.item(index)} has {len(item.token_ids)} tokens, at most {most} are "
                'allowed; send "truncate": "END" to cut it',
                param=body.source,
            )
    processor.check_size(inputs, body.source)
    # Keep the texts if the response includes them.
    if body.source != "texts":
        body.drop_prompt()
    return inputs


async def _log_prompts(
    state: AppState, request: Request, prompts: Iterable[str | list[int]]
) -> None:
    if state.config.enable_log_requests:
        await log_prompts(record_of(request.scope), prompts)


async def _run(
    state: AppState,
    request: Request,
    body: EngineBody,
    id_prefix: str,
    inputs: list[PoolingInput],
) -> PoolingJob:
    """Run the inputs in the engine; returns the finished job. Raises the errors of `start_tracked`,
    PoolingStream and `run_to_end`."""
    model = state.model(body.model)

    async def start(terms: RequestTerms) -> PoolingStream:
        return PoolingStream(state.client, inputs, terms, pacer=state.pooling_pacer)

    tracker = await start_tracked(
        state,
        request,
        body,
        start,
        model=model,
        num_prompt_tokens=sum(len(item.token_ids) for item in inputs),
        num_first_tokens=len(inputs[0].token_ids),
    )
    job = PoolingJob(state=state, id=request_id_of(body, id_prefix), model=model, tracker=tracker)
    await run_to_end(job, request, _exhaust(job))
    return job


def _empty_list(state: AppState, body: EngineBody) -> Response:
    return json_response(
        {
            "id": request_id_of(body, "classify-"),
            "object": "list",
            "created": int(time.time()),
            "model": state.model(body.model),
            "data": [],
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
        }
    )


async def _exhaust(job: PoolingJob) -> None:
    async for _ in job.tracker:
        pass


async def _pair_inputs(
    state: AppState, request: Request, body: ScoreBody | RerankBody
) -> tuple[list[PoolingInput], Callable[[list[Vectors]], list[float]]]:
    """(inputs for the text pairs of `body`, function that computes scores from their results)."""
    processor = _processor(state)
    firsts, seconds = body.pairs()
    await _log_prompts(state, request, (*firsts, *seconds))
    options = InputOptions(
        PoolingParams(normalize=body.normalizes),
        truncate=body.truncate_prompt_tokens,
        keep_end=body.truncation_side == "left",
        max_first_tokens=body.max_tokens_per_query or None,
        max_second_tokens=body.max_tokens_per_doc or None,
    )
    pairs = TextPairs(firsts, seconds, body.names, options)
    with CancelOnDisconnect(request.receive):
        inputs = await pair_inputs(processor, pairs)
    return inputs, partial(pair_scores, processor.facts, num_firsts=len(firsts))


def _vector_entries(
    kind: str,
    field: str,
    encoding_format: str | None,
    vectors: list[Vectors],
    *,
    all_rows: bool = False,
) -> Entries:
    return [
        {
            "index": index,
            "object": kind,
            field: encode_vectors(rows if all_rows else rows[0], encoding_format),
        }
        for index, rows in enumerate(vectors)
    ]


def _class_entries(labels: tuple[str, ...], vectors: list[Vectors]) -> Entries:
    entries = []
    for index, (numbers, *_) in enumerate(vectors):
        best = int(numbers.argmax())
        entries.append(
            {
                "index": index,
                "label": labels[best] if best < len(labels) else None,
                "probs": numbers.tolist(),
                "num_classes": len(numbers),
            }
        )
    return entries


def _score_entries(scores: list[float]) -> Entries:
    return [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]


def _ranked(scores: list[float], top_n: int | None, documents: list[str] | None) -> Entries:
    """The `top_n` best documents (None or 0: all), with their texts unless `documents` is None."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        {
            "index": index,
            **({} if documents is None else {"document": {"text": documents[index]}}),
            "relevance_score": scores[index],
        }
        for index in order[: top_n or len(order)]
    ]
