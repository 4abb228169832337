"""An EngineClient whose replies a test scripts token by token, without an engine or a clock."""

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from config.errors import EngineDied, Overloaded
from config.lora.info import LoRAInfo
from config.params.pooling import PoolingFacts, PoolingParams
from config.params.sampling import SamplingParams
from engine.client.output_queue import Update
from engine.client.request_limits import NO_LIMITS, RequestLimits
from engine.client.state import Failure
from engine.transport.messages import AddRequest, EngineStats, Finish, Progress, Ready
from hpu.protocol import EncoderInput, ImagePlacement, Logprobs


def ready(
    vocab_size: int = 1000,
    max_model_len: int = 100,
    pooling: PoolingFacts | None = None,
    logprobs_mode: str = "raw_logprobs",
) -> Ready:
    """The Ready message of a fake engine."""
    return Ready(
        engine=0,
        num_blocks=64,
        block_size=16,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(0,),
        num_buckets=1,
        device="cpu",
        dtype="float32",
        weight_bytes=0,
        kv_bytes=0,
        total_bytes=0,
        load_s=0.0,
        warmup_s=0.0,
        pooling=pooling,
        logprobs_mode=logprobs_mode,
    )


def columns(rows: list[tuple[list[int], list[float], int]]) -> Logprobs:
    """Log-probabilities from (ids, values, rank of the sampled token) for each position."""
    width = len(rows[0][0])
    ids = np.array([row[0] for row in rows], dtype="<i4").reshape(-1, width)
    values = np.array([row[1] for row in rows], dtype="<f4").reshape(-1, width)
    ranks = np.array([row[2] for row in rows], dtype="<i4")
    return Logprobs(
        width - 1,
        memoryview(ids.tobytes()),
        memoryview(values.tobytes()),
        memoryview(ranks.tobytes()),
    )


@dataclass
class ScriptedQueue:
    """A sent request with its output queue."""

    key: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    pooling: PoolingParams | None = None
    is_continuation: bool = False
    adapter: str = ""
    updates: asyncio.Queue[Update | str] = field(default_factory=asyncio.Queue)
    images: list[ImagePlacement] = field(default_factory=list)
    encoded_images: list[EncoderInput] = field(default_factory=list)
    request_limits: RequestLimits = NO_LIMITS
    group: int = 0
    num_unread_bytes: int = 0

    async def get(self) -> Update:
        update = await self.updates.get()
        if isinstance(update, str):
            raise EngineDied(update)
        return update

    def say(
        self,
        *tokens: int,
        finish: str | None = None,
        stop_token: int | None = None,
        error: str | None = None,
        cached: int | None = None,
        logprobs: list[Logprobs] | None = None,
        prompt_logprobs: list[Logprobs] | None = None,
        vectors: npt.NDArray[np.float32] | None = None,
        num_merged: int = 0,
    ) -> None:
        """Send an update, with the end of the sequence if `finish` is given."""
        end = None
        if finish is not None:
            end = Finish(
                self.key,
                finish,
                stop_token=stop_token,
                error=error,
                queue_s=0.25,
                prefill_s=0.5,
                decode_s=1.0,
            )
        self.updates.put_nowait(
            Update(
                tokens=list(tokens),
                num_merged=num_merged,
                logprobs=logprobs or [],
                prompt_logprobs=prompt_logprobs or [],
                vectors=None if vectors is None else (len(vectors), memoryview(vectors.tobytes())),
                num_cached_tokens=cached,
                finish=end,
            )
        )

    def die(self, why: str = "killed") -> None:
        """Report that the engine is gone."""
        self.updates.put_nowait(why)


class ScriptedClient:
    """Records sent requests in `queues` and aborted keys in `aborted`; accepts `room` requests."""

    def __init__(self, ready: Ready | None, room: int = 1_000) -> None:
        self.ready = ready
        self.progress: Progress | None = None
        self.engine = 0
        self.engines = (self,)
        self.failure: str | None = None
        self.lost: Failure | None = None
        self.stats = EngineStats()
        self.adapters: dict[str, LoRAInfo] = {}
        self.queues: list[ScriptedQueue] = []
        self.aborted: list[int] = []
        self._room = room

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    @property
    def is_restarting(self) -> bool:
        return self.lost is not None

    @property
    def is_alive(self) -> bool:
        return not self.has_failed and not self.is_restarting

    def add(self, request: AddRequest, request_limits: RequestLimits = NO_LIMITS) -> ScriptedQueue:
        request_limits.timeout_s()
        if len(self.queues) >= self._room:
            raise Overloaded(f"{self._room} sequences are here")
        queue = ScriptedQueue(
            len(self.queues) + 7,
            list(array("I", bytes(request.prompt))),
            request.sampling,
            request.priority,
            request.cache_salt,
            request.pooling,
            request.is_continuation,
            request.adapter,
        )
        queue.request_limits = request_limits
        queue.group = request.group
        queue.images, queue.encoded_images = request.images, request.encoded_images
        self.queues.append(queue)
        return queue

    def abort(self, keys: list[int]) -> None:
        for queue in self.queues:
            if queue.key in keys and queue.key not in self.aborted:
                queue.say(finish="abort")
                self.aborted.append(queue.key)

    async def control(self, name: str, **arguments: Any) -> Any:
        return None

    async def wait_ready(self) -> Ready:
        if self.ready is None:
            raise EngineDied(self.failure or "never ready")
        return self.ready

    async def close(self) -> None:
        for queue in self.queues:
            queue.die("closed")
