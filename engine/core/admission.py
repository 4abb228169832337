"""Admission: checks whether a request can run, and builds its state."""

import random
from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from config.engine import EngineConfig
from config.errors import counted
from config.params.sampling import SamplingParams, invalid_token
from config.params.token_ids import TokenIds
from engine.request import NO_ALLOWED_TOKEN, ModelLimits, Request
from engine.scheduling.pooling_scheduler import PoolingScheduler
from engine.scheduling.resource import Refusal, RequestResource
from engine.scheduling.scheduler import Scheduler
from engine.structured_output.grammar import Grammar
from engine.transport.messages import AddRequest
from hpu.protocol import TOKEN_BYTES


def queue_is_full(num_waiting: int, max_waiting: int) -> str:
    """The error for a request that finds `num_waiting` waiting requests."""
    verb = "is" if num_waiting == 1 else "are"
    return f"{counted(num_waiting, 'request')} {verb} waiting, at most {max_waiting} may wait"


class Admission:
    """Decides which requests an engine accepts, and builds their state."""

    def __init__(
        self,
        config: EngineConfig,
        engine: int,
        limits: ModelLimits,
        scheduler: Scheduler | PoolingScheduler,
        resources: Sequence[RequestResource],
    ) -> None:
        """`engine`: rank of this engine among the data-parallel engines."""
        self._limits = limits
        self._max_queue_len = config.scheduler.max_queue_len
        self._by_priority = config.scheduler.policy == "priority"
        self._scheduler = scheduler
        self._resources = resources
        # Engines draw different seeds, since samples of the same prompt may run on several engines.
        self._seeds = random.Random(config.seed + (engine << 64))
        self._num_arrivals = 0

    def admit(
        self, message: AddRequest, hashes: list[bytes], grammar: Grammar | None, now: float
    ) -> Request | Refusal:
        """Request for a message that arrives at `now`, or why the engine rejects the message.
        `hashes`, `grammar`: see EngineCore.add_request."""
        assert (grammar is None) == (message.sampling.structured_outputs is None)
        refusal = self._refusal(message)
        if refusal is not None:
            return refusal
        seed = message.sampling.seed
        request = Request(
            message,
            hashes,
            seed=self._seeds.getrandbits(63) if seed is None else seed & (2**63 - 1),
            priority_key=(
                message.priority if self._by_priority else 0,
                -1 if message.is_continuation else self._num_arrivals,
            ),
            limits=self._limits,
            arrived_at=now,
            grammar=grammar,
        )
        self._num_arrivals += 1
        if request.is_guided and not request.num_unmatched and request.has_no_allowed_token:
            return Refusal(NO_ALLOWED_TOKEN, "structured_outputs")
        return request

    def _refusal(self, message: AddRequest) -> Refusal | None:
        error = _model_error(message, self._limits)
        if error is not None:
            return Refusal(error, "")
        num_waiting = len(self._scheduler.waiting)
        if message.resumption is None and num_waiting >= self._max_queue_len:
            error = queue_is_full(num_waiting, self._max_queue_len)
            return Refusal(error, is_retryable=True)
        for resource in self._resources:
            refusal = resource.refusal(message)
            if refusal is not None:
                return refusal
        return self._scheduler.refusal(message)


def _model_error(message: AddRequest, limits: ModelLimits) -> str | None:
    num_bytes = message.prompt.nbytes
    if num_bytes % TOKEN_BYTES:
        return f"the prompt has {num_bytes} bytes, which is not a multiple of {TOKEN_BYTES}"
    num_tokens = num_bytes // TOKEN_BYTES
    if num_tokens == 0:
        return "the prompt has 0 tokens, it must have at least 1"
    has_no_output = message.pooling is not None or message.sampling.max_tokens == 0
    max_tokens = limits.max_model_len - (0 if has_no_output else 1)
    if num_tokens > max_tokens:
        return (
            f"the prompt has {num_tokens} tokens, the model's context of "
            f"{limits.max_model_len} takes at most {max_tokens}"
        )
    max_token = int(np.frombuffer(message.prompt, dtype="<u4").max())
    num_ids = limits.prompt_vocab_size or limits.vocab_size
    if max_token >= num_ids:
        return f"the prompt has token {max_token}, it must be below {num_ids}, the vocabulary size"
    token = _invalid_token(message.sampling, limits.vocab_size)
    if token is not None:
        return (
            f"the sampling parameters have token {token}, it must be below {limits.vocab_size}, "
            "the vocabulary size"
        )
    return None


def _invalid_token(params: SamplingParams, vocab_size: int) -> int | None:
    lists: tuple[Collection[int] | TokenIds, ...] = (
        params.logit_bias,
        params.allowed_token_ids or (),
        tuple(chain.from_iterable(params.bad_words_token_ids)),
    )
    found = (invalid_token(token_ids, vocab_size) for token_ids in lists)
    return next((token for token in found if token is not None), None)
