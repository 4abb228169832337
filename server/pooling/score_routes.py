"""POST /score and /rerank, on all of their paths: scores of pairs of texts."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.params.pooling import PoolingParams
from server.http.access_log import log_prompt, record_of
from server.http.body import json_response, parse
from server.http.disconnect import CancelOnDisconnect
from server.http.openapi import ANSWERS, takes
from server.http.state import AppState
from server.pooling.inputs import InputOptions
from server.pooling.job import PoolingJob, collect_vectors, run_off_loop, start_pooling
from server.pooling.schema import RerankBody, ScoreBody
from server.pooling.scores import TextPairs, pair_inputs, pair_scores

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def score_routes(state: AppState) -> APIRouter:
    """The routes, over `state`."""
    router = APIRouter(tags=["Pooling"])

    async def score(request: Request) -> Response:
        state.input_processor()
        body = await parse(ScoreBody, await state.bodies.read_object(request))
        job, scores = await _scores(state, request, body, body.names, id_prefix="score-")
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        return json_response(job.list_body(data))

    async def rerank(request: Request) -> Response:
        state.input_processor()
        body = await parse(RerankBody, await state.bodies.read_object(request))
        names = ("query", "documents")
        job, scores = await _scores(state, request, body, names, id_prefix="rerank-")
        return json_response(
            {
                "id": job.id,
                "model": job.model,
                "usage": job.usage(),
                "results": _ranked(body, scores),
            }
        )

    for paths, handler, summary, body_name in (
        (SCORE_PATHS, score, "Scores of pairs of texts", "ScoreBody"),
        (RERANK_PATHS, rerank, "Documents by how well they answer a query", "RerankBody"),
    ):
        for path in paths:
            router.add_api_route(
                path,
                handler,
                methods=["POST"],
                operation_id=path.strip("/").replace("/", "_"),
                summary=summary,
                openapi_extra=takes(body_name),
                responses=ANSWERS,
            )
    return router


async def _scores(
    state: AppState,
    request: Request,
    body: ScoreBody | RerankBody,
    names: tuple[str, str],
    *,
    id_prefix: str,
) -> tuple[PoolingJob, list[float]]:
    """The job, and one score per pair."""
    processor = state.input_processor()
    model = state.model(body.model)
    body.check()
    firsts, seconds = body.pairs()
    if state.config.enable_log_requests:
        for text in (*firsts, *seconds):
            log_prompt(record_of(request.scope), text)
    pairs = TextPairs(
        firsts,
        seconds,
        names,
        InputOptions(
            PoolingParams(normalize=body.normalizes),
            truncate=body.truncate_prompt_tokens,
            keep_end=body.truncation_side == "left",
            max_first_tokens=body.max_tokens_per_query or None,
            max_second_tokens=body.max_tokens_per_doc or None,
        ),
    )
    with CancelOnDisconnect(request.receive):
        inputs = await pair_inputs(processor, pairs)
    job = start_pooling(state, request, body, inputs, id_prefix=id_prefix, model=model)
    vectors = await collect_vectors(job, request)
    return job, await run_off_loop(
        vectors, lambda: pair_scores(processor.facts, vectors, len(firsts))
    )


def _ranked(body: RerankBody, scores: list[float]) -> list[dict[str, Any]]:
    _, documents = body.pairs()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        {"index": index, "relevance_score": scores[index]}
        if body.return_documents is False
        else {
            "index": index,
            "document": {"text": documents[index]},
            "relevance_score": scores[index],
        }
        for index in order[: body.top_n or len(order)]
    ]
