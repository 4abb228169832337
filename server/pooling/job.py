"""One request for vectors between its checks and its answer: what the routes of pooling models
share. Knows no body but what all of them have."""

import asyncio
import base64
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from server.generation.job import cache_salt_of, check_priority, finish
from server.generation.tracking import Serving
from server.http.access_log import record_of
from server.http.state import AppState
from server.pooling.pipeline import Pooling, PoolingInput, Vectors
from server.pooling.schema import PoolingBody

MANY_NUMBERS = 20_000
"""Of vectors that are written on the event loop: about a millisecond."""

Made = TypeVar("Made")


@dataclass(slots=True)
class PoolingJob:
    """A request that has passed every check and runs in the engine."""

    state: AppState
    id: str
    model: str
    pooling: Pooling
    serving: Serving
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of a list of results."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, int]:
        """The usage object: every token that was read, once."""
        count = self.pooling.num_prompt_tokens
        return {"prompt_tokens": count, "total_tokens": count}

    def end(self) -> None:
        """Safe twice."""
        self.state.servings.discard(self.serving)
        self.serving.end()


def start_pooling(
    state: AppState,
    request: Request,
    body: PoolingBody,
    inputs: list[PoolingInput],
    *,
    id_prefix: str,
    model: str,
) -> PoolingJob:
    """Send it to the engine. Raises whatever is wrong with it; then nothing is left behind."""
    check_priority(state, body.priority)
    record = record_of(request.scope)
    record.model = model
    record.num_prompt_tokens = sum(len(one.token_ids) for one in inputs)
    pooling = Pooling(
        state.client,
        inputs,
        priority=body.priority or 0,
        cache_salt=cache_salt_of(state, record, body.cache_salt),
        name=record.id,
    )
    serving = Serving(pooling, None, len(inputs), record, state.metrics)
    state.servings.add(serving)
    number = body.request_id or os.urandom(16).hex()
    return PoolingJob(state, f"{id_prefix}{number}", model, pooling, serving)


async def gather_vectors(job: PoolingJob, request: Request) -> list[Vectors]:
    """Of all inputs, in order. Raises ClientGone when nobody waits for them any more."""
    return await finish(job, request, _gather(job))


async def _gather(job: PoolingJob) -> list[Vectors]:
    async for _ in job.serving:
        pass
    return job.pooling.vectors


async def off_loop(vectors: list[Vectors], call: Callable[[], Made]) -> Made:
    """What `call` makes of `vectors`; on a thread when they are many."""
    if sum(one.size for one in vectors) <= MANY_NUMBERS:
        return call()
    return await asyncio.to_thread(call)


def written(numbers: Vectors, encoding_format: str | None) -> msgspec.Raw | str:
    """One vector as a JSON list, several as a list of lists; or the base64 of all their float32
    numbers, little-endian, as one string."""
    if encoding_format == "base64":
        return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
    # A piece at a time, so that other threads get their turn.
    return msgspec.Raw(msgspec.json.encode(numbers.tolist()))
