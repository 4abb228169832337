"""Runs the inputs of a pooling request in the engine, with limited concurrency, and encodes their
vectors as JSON numbers, base64 or packed bits."""

import base64
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from config.errors import Overloaded, RequestFailed
from config.params.pooling import PoolingParams
from engine.client.base import EngineClient
from engine.client.output_queue import RequestOutputQueue, Update
from engine.client.request_limits import DEFAULT_TERMS, RequestTerms
from engine.transport.messages import NO_SAMPLING, UNSENT, AddRequest, engine_of
from server.generation.outputs import Delta, Timing
from server.generation.pipeline import (
    MAX_TOKENS_AT_ONCE,
    TOKENS_PER_SEQUENCE,
    Pauses,
    check_finish,
)
from server.http.json_encoder import PIECE_WEIGHT, LongJson
from server.http.pacing import LoopPacer

Vectors = npt.NDArray[np.float32]
"""float32 array. The result of an input is (rows, width): a single row, or a row per token."""
Encoded = msgspec.Raw | LongJson | str | list[int]
"""JSON numbers, base64 or packed bits."""
BINARY_TYPES = ("binary", "ubinary")
"""Embedding types that pack the signs of 8 values into a byte, the first value in the highest
bit."""

BASE64_NUMBERS = 12_288
"""Values per piece of base64. A multiple of 3, so that only the last piece is padded."""

MAX_CONCURRENT_INPUTS = 256
"""Maximum number of a request's inputs in the engine: enough to keep the engine busy without
delaying other requests behind thousands of inputs."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A tokenized text or pair of texts."""

    token_ids: list[int]
    params: PoolingParams


class PoolingStream:
    """Results of a request's inputs. Iterate it once: each item has a delta for the next finished
    input, in order; `vectors` has the results. The iteration sends the inputs that `__init__` has
    not sent.

    Raises the errors of the engine client and of `check_finish`, and RequestFailed for vectors with
    NaN or infinite values. An error aborts all unfinished inputs.
    """

    num_output_tokens = 0

    def __init__(
        self,
        client: EngineClient,
        inputs: list[PoolingInput],
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        pacer: LoopPacer | None = None,
        max_concurrent: int = MAX_CONCURRENT_INPUTS,
    ) -> None:
        """Send the first inputs. `pacer`: pacer that requests share; None: there is one request.
        Raises the errors of EngineClient.add after aborting all inputs."""
        self._client = client
        self._unsent = deque(enumerate(inputs))
        self._inputs = inputs
        self._terms = terms
        self._pauses = Pauses(pacer or LoopPacer(1))
        self._max_concurrent = max_concurrent
        self._group = 0
        """Key of the first input; 0: nothing was sent."""
        self._queues: deque[tuple[int, RequestOutputQueue]] = deque()
        """(index, output queue) of each input in the engine, oldest first."""
        self._vectors: dict[int, Vectors] = {}
        self._is_aborted = False
        self.cached_tokens = [0] * len(inputs)
        """Number of tokens of each input that were found in the prefix cache."""
        self.timing = Timing()
        """Maximum queue time and maximum compute time over the inputs."""
        try:
            self._send()
        except BaseException:
            self.abort()
            raise

    @property
    def engine(self) -> int:
        """Engine of the oldest input; 0 if no input is in an engine."""
        return engine_of(self._queues[0][1].key) if self._queues else 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all inputs; after an abort, only of the finished inputs."""
        if self._is_aborted:
            return sum(len(self._inputs[index].token_ids) for index in self._vectors)
        return sum(len(item.token_ids) for item in self._inputs)

    @property
    def num_sequences(self) -> int:
        """Number of texts or pairs of texts."""
        return len(self._inputs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all inputs that were found in the prefix cache."""
        return sum(self.cached_tokens)

    @property
    def vectors(self) -> list[Vectors]:
        """Results of all inputs in order, after the iteration has ended."""
        return [self._vectors[index] for index in range(len(self._inputs))]

    def __aiter__(self) -> "PoolingStream":
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._queues:
            raise StopAsyncIteration
        try:
            while self._send():
                await self._pauses.pause()
            # The request may have been aborted meanwhile.
            if not self._queues:
                raise StopAsyncIteration
            index, queue = self._queues[0]
            while (update := await queue.get()).finish is None:
                self._apply(index, update)
            # The request was aborted while it waited for output.
            if not self._queues:
                raise StopAsyncIteration
            self._queues.popleft()
            check_finish(update.finish)
            self._apply(index, update)
            if not self._queues:
                # The iteration continues while inputs are unsent.
                self._send()
        except BaseException:
            self.abort()
            raise
        return [Delta(index, finish_reason="stop")]

    def abort(self) -> None:
        """Abort all unfinished inputs and end the iteration. May be called at any time and more
        than once."""
        self._is_aborted = self._is_aborted or bool(self._queues or self._unsent)
        self._unsent.clear()
        queues, self._queues = self._queues, deque()
        if queues:
            self._client.abort([queue.key for _, queue in queues])

    def _send(self) -> bool:
        """Send inputs up to `max_concurrent` and MAX_TOKENS_AT_ONCE; returns whether the second
        limit was reached. If the engine's queue is full, the rest is sent after earlier inputs of
        this request finish; raises Overloaded only if no input of this request is in the engine."""
        terms, num_tokens = self._terms, 0
        while self._unsent and len(self._queues) < self._max_concurrent:
            index, item = self._unsent[0]
            if num_tokens > MAX_TOKENS_AT_ONCE:
                return True
            num_tokens += len(item.token_ids) + TOKENS_PER_SEQUENCE
            request = AddRequest(
                UNSENT,
                memoryview(np.asarray(item.token_ids, dtype="<u4").tobytes()),
                NO_SAMPLING,
                priority=terms.priority,
                cache_salt=terms.cache_salt,
                name=terms.name,
                pooling=item.params,
                adapter=terms.adapter,
                group=self._group,
            )
            try:
                queue = self._client.add(request, terms.limits)
            except Overloaded:
                if not self._queues:
                    raise
                return False
            self._group = self._group or queue.key
            self._queues.append((index, queue))
            self._unsent.popleft()
        return False

    def _apply(self, index: int, update: Update) -> None:
        if update.num_cached_tokens is not None:
            self.cached_tokens[index] = update.num_cached_tokens
        if update.vectors is not None:
            num_rows, data = update.vectors
            vectors = np.frombuffer(data, dtype="<f4").reshape(num_rows, -1)
            if not np.isfinite(vectors).all():
                raise RequestFailed(f"the vectors of input {index} have NaN or infinite values")
            self._vectors[index] = vectors
        finish = update.finish
        if finish is not None:
            self.timing.queue_s = max(self.timing.queue_s, finish.queue_s)
            self.timing.prefill_s = max(self.timing.prefill_s, finish.prefill_s)


def encode_vectors(vectors: Vectors, encoding_format: str | None) -> msgspec.Raw | LongJson:
    """Encode (width,) as a JSON list, (rows, width) as a list of lists; base64: all values as
    little-endian float32 in a single string. More than PIECE_WEIGHT values are encoded when they
    are sent."""
    encode = _base64_pieces if encoding_format == "base64" else _number_pieces
    if vectors.size > PIECE_WEIGHT:
        return LongJson(vectors.size, partial(encode, vectors))
    return msgspec.Raw(b"".join(encode(vectors)))


def _base64_pieces(vectors: Vectors) -> Iterator[bytes]:
    numbers = vectors.reshape(-1)
    yield b'"'
    for start in range(0, len(numbers), BASE64_NUMBERS):
        part = numbers[start : start + BASE64_NUMBERS].astype("<f4")
        yield base64.b64encode(part.tobytes())
    yield b'"'


def _number_pieces(vectors: Vectors) -> Iterator[bytes]:
    yield b"["
    if vectors.ndim == 2 and vectors.shape[1] > PIECE_WEIGHT:
        for index, row in enumerate(vectors):
            yield b"," if index else b""
            yield from _number_pieces(row)
    else:
        step = PIECE_WEIGHT // (vectors.shape[1] if vectors.ndim == 2 else 1)
        for start in range(0, len(vectors), step):
            yield b"," if start else b""
            yield msgspec.json.encode(vectors[start : start + step].tolist())[1:-1]
    yield b"]"


def typed_embeddings(types: Sequence[str], vectors: Sequence[Vectors]) -> dict[str, list[Encoded]]:
    """The first row of each entry of `vectors`, in each of the `types` of Cohere's API."""
    return {name: [_encoder(name)(rows[0]) for rows in vectors] for name in types}


def _encoder(name: str) -> Callable[[Vectors], Encoded]:
    if name == "ubinary":
        return _packed_signs
    if name == "binary":
        return lambda vector: [number - 128 for number in _packed_signs(vector)]
    return lambda vector: encode_vectors(vector, name)


def _packed_signs(vector: Vectors) -> list[int]:
    return [int(number) for number in np.packbits(vector >= 0)]
