"""A pooling request in the engine, and its response: shared by all pooling routes."""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from server.generation.job import RunningRequest, request_id_of, run_to_end, start_tracked
from server.http.state import AppState
from server.pooling.pipeline import PoolingInput, PoolingStream, Vectors
from server.pooling.schema import PoolingBody

MAX_INLINE_NUMBERS = 20_000
"""Numbers of vectors that are encoded on the event loop: about a millisecond."""

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class PoolingJob(RunningRequest[PoolingStream]):
    """A pooling request that has passed all checks and runs in the engine."""

    def list_body(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """The response body with a list of results."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, int]:
        """The usage object: all input tokens."""
        count = self.tracker.stream.num_prompt_tokens
        return {"prompt_tokens": count, "total_tokens": count}


def start_pooling(
    state: AppState,
    request: Request,
    body: PoolingBody,
    inputs: list[PoolingInput],
    *,
    id_prefix: str,
    model: str,
) -> PoolingJob:
    """Send the inputs to the engine. On an exception nothing of the request remains."""
    tracker = start_tracked(
        state,
        request,
        body,
        partial(PoolingStream, state.client, inputs),
        model=model,
        num_prompt_tokens=sum(len(item.token_ids) for item in inputs),
        num_sequences=len(inputs),
    )
    return PoolingJob(state=state, id=request_id_of(body, id_prefix), model=model, tracker=tracker)


async def collect_vectors(job: PoolingJob, request: Request) -> list[Vectors]:
    """Results of all inputs, in order. Raises ClientGone when the client disconnects."""
    return await run_to_end(job, request, _collect_vectors(job))


async def _collect_vectors(job: PoolingJob) -> list[Vectors]:
    async for _ in job.tracker:
        pass
    return job.tracker.stream.vectors


async def run_off_loop(vectors: list[Vectors], call: Callable[[], T]) -> T:
    """The result of `call`, which processes `vectors`; on a thread if they are large."""
    if sum(item.size for item in vectors) <= MAX_INLINE_NUMBERS:
        return call()
    return await asyncio.to_thread(call)


def encode_vectors(vectors: Vectors, encoding_format: str | None) -> msgspec.Raw | str:
    """(width,) as a JSON list, (rows, width) as a list of lists; base64: all numbers as
    little-endian float32 in one string."""
    if encoding_format == "base64":
        return base64.b64encode(vectors.astype("<f4").tobytes()).decode()
    # Encoded one result at a time, so that other threads can take the GIL in between.
    return msgspec.Raw(msgspec.json.encode(vectors.tolist()))
