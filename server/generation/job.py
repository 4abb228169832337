"""One generating request between its checks and its answer: what chat and completions share.
Knows neither's body."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from config.errors import EngineDied, Overloaded, PromptTooLong, UserError
from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.transport.messages import COMPILE_GRAMMAR
from server.generation.answer_parser import Answers
from server.generation.beam_search import BeamSearchGeneration
from server.generation.outputs import Delta, Growing, Prompt
from server.generation.tracking import Serving
from server.http.access_log import Record, record_of
from server.http.disconnect import UntilGone
from server.http.errors import EngineFailed, Fault, fault_of
from server.http.sse import Envelope, EventStream
from server.http.state import AppState
from server.openai.choices import Gathered, Gatherer, Naming, usage_of
from server.openai.schema.generation import GenerationBody
from server.text.tokenizer import Tokenizer, TooManyCharacters, TooManyTokens

T = TypeVar("T")

COMPILE_S = 10.0
"""How long a grammar may wait until it is compiled. Compiling alone is bounded by the engine, to
less than 2 s: what takes longer waits for others."""
COUNTED_CONTEXTS = 4
MIN_COUNTED_TOKENS = 131_072
"""Tokens of a text are counted up to the larger of the two: so many contexts of the model, or so
many tokens. Those who cut documents for a small embedding model count the whole document first."""


@dataclass(slots=True)
class Job:
    """A request that has passed every check and runs in the engine."""

    state: AppState
    body: GenerationBody
    id: str
    model: str
    params: SamplingParams
    prompts: list[Prompt]
    serving: Serving
    answers: Answers | None = None
    """What reads the answers; None: they are text alone."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def generation(self) -> Growing:
        return self.serving.generation

    @property
    def name(self) -> Naming:
        """How tokens are written in log-probabilities."""
        as_ids = bool(self.body.return_tokens_as_token_ids) or self.state.tokenizer is None
        return Naming(as_ids=as_ids)

    def usage(self) -> dict[str, Any]:
        """The usage object, as far as the generation has come."""
        thinking = 0 if self.answers is None else self.answers.num_thinking_tokens
        return usage_of(self.generation, num_thinking_tokens=thinking)

    def envelope(self, kind: str) -> Envelope:
        return Envelope(kind, self.id, self.created, self.model, self.state.fingerprint)

    def end(self) -> None:
        """Safe twice."""
        self.state.servings.discard(self.serving)
        self.serving.end()


class ChunkWriter(Protocol):
    """Deltas to frames."""

    def feed(self, deltas: list[Delta]) -> bytes:
        """Frames for `deltas`; none if nothing of them is to be seen."""
        ...

    def ending(self) -> bytes:
        """Frames after the last delta; nothing follows."""
        ...

    def failing(self, fault: Fault) -> bytes:
        """Frames that say what broke; nothing follows."""
        ...


def check_priority(state: AppState, priority: int | None) -> None:
    """Raise UserError for a priority on a server that has none."""
    if priority and not state.has_priorities:
        raise UserError(
            f"priority is {priority}, it must be 0: this server runs first come, first served",
            param="priority",
        )


def check_admission(state: AppState, body: GenerationBody, num_sequences: int, param: str) -> None:
    """What no wait could make right. Raises UserError."""
    check_priority(state, body.priority)
    most = state.config.max_queued_requests
    if num_sequences > most:
        raise UserError(
            f"the request asks for {num_sequences} sequences, at most {most} may wait",
            param="n" if (body.n or 1) > 1 else param,
        )


def cache_salt_of(state: AppState, record: Record, asked: str | None) -> str:
    """The salt under which a request shares cached blocks: `asked` is the one in its body. With
    --cache-salt-per-key the owner is part of it."""
    salt = asked or ""
    if not state.config.cache_salt_per_key:
        return salt
    # A client's own salt cannot hold an @ (check_salt), so no client can write another one's salt.
    return f"{record.owner}@{salt}"


async def check_grammar(state: AppState, field: str, spec: GrammarSpec) -> None:
    """Have the engine compile the form that `field` asks for: what is wrong with it is said before
    an answer begins. Raises UserError and Overloaded."""
    call = state.client.control(COMPILE_GRAMMAR, spec=msgspec.to_builtins(spec))
    try:
        await asyncio.wait_for(call, COMPILE_S)
    except UserError as error:
        raise UserError(error.message, param=field) from None
    except asyncio.TimeoutError:
        raise Overloaded(
            f"the {spec.kind} waited {COMPILE_S:g} s for others to be compiled"
        ) from None


def start_job(
    state: AppState,
    request: Request,
    body: GenerationBody,
    *,
    id_prefix: str,
    model: str,
    params: SamplingParams,
    prompts: list[Prompt],
    param: str,
    answers: Answers | None = None,
) -> Job:
    """Send it to the engine. Raises whatever is wrong with it; then nothing is left behind."""
    num_sequences = len(prompts) * params.n
    check_admission(state, body, num_sequences, param)
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    most = state.config.max_queued_prompt_tokens
    if num_tokens * params.n > most:
        raise UserError(
            f"the request has {num_tokens * params.n} prompt tokens over all of its sequences, at "
            f"most {most} may wait",
            param=param,
        )
    record = record_of(request.scope)
    record.model = model
    record.num_prompt_tokens = num_tokens
    grow: Callable[..., Growing] = state.opened().start
    if body.use_beam_search:
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        grow = partial(BeamSearchGeneration, state.opened(), length_penalty=penalty)
    generation = grow(
        prompts,
        params,
        priority=body.priority or 0,
        cache_salt=cache_salt_of(state, record, body.cache_salt),
        param=param,
        name=record.id,
        shown=frozenset() if answers is None else answers.shown,
    )
    serving = Serving(generation, params, num_sequences, record, state.metrics)
    state.servings.add(serving)
    number = body.request_id or os.urandom(16).hex()
    return Job(state, body, f"{id_prefix}{number}", model, params, prompts, serving, answers)


async def encoded(
    state: AppState,
    text: str,
    *,
    special: bool,
    keep: int | None,
    limit: int | None,
    param: str,
) -> Prompt:
    """The prompt that `text` is, cut to its last `keep` tokens; -1 keeps what the context has room
    for beside `limit` tokens of output. Raises PromptTooLong if the prompt alone fills more than
    the context and is not to be cut, before it is tokenized where its length tells."""
    tokenizer = state.text_tokenizer(param)
    try:
        ids = await _read(tokenizer, text, special, keep, limit, state.max_model_len, None)
    except TooManyTokens as error:
        raise PromptTooLong(
            error.count, limit, state.max_model_len, param=param, at_least=error.at_least
        ) from None
    except TooManyCharacters as error:
        error.param = param
        raise
    kept = truncated(ids, keep, state.max_model_len, limit)
    return Prompt(kept, tokenizer.unmarked(text) if kept is ids else None)


def most_counted(state: AppState) -> int:
    """Tokens of a text that is not generated from."""
    return max(COUNTED_CONTEXTS * state.max_model_len, MIN_COUNTED_TOKENS)


async def counted(
    state: AppState,
    text: str,
    *,
    special: bool,
    keep: int | None = None,
    limit: int | None = None,
    param: str,
) -> list[int]:
    """The tokens of a text that is only to be counted: as in `encoded`, but there may be more than
    the model takes. Raises UserError."""
    max_model_len = state.max_model_len
    most = most_counted(state)
    try:
        ids = await _read(
            state.text_tokenizer(param), text, special, keep, limit, max_model_len, most
        )
    except TooManyTokens as error:
        more = "at least " if error.at_least else ""
        raise UserError(
            f"the text has {more}{error.count} tokens, at most {most} are counted; this model's "
            f"maximum context length is {max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        ) from None
    except TooManyCharacters as error:
        error.param = param
        raise
    return truncated(ids, keep, max_model_len, limit)


async def _read(
    tokenizer: Tokenizer,
    text: str,
    special: bool,
    keep: int | None,
    limit: int | None,
    max_model_len: int,
    most: int | None,
) -> list[int]:
    """The tokens of `text`, of which `most` (None: what the model takes) may be; where only its
    last ones are kept, at least those. Raises TooManyTokens and TooManyCharacters."""
    kept = num_kept(keep, max_model_len, limit)
    most = max_model_len if most is None else most
    if kept is None or kept > most:
        return await tokenizer.encode(text, special, most)
    return await tokenizer.encode_part(text, special, kept, from_end=True)


def truncated(ids: list[int], keep: int | None, max_model_len: int, limit: int | None) -> list[int]:
    """The last `keep` tokens; -1 keeps what the context has room for beside the output."""
    kept = num_kept(keep, max_model_len, limit)
    return ids if kept is None or len(ids) <= kept else ids[-kept:]


def num_kept(keep: int | None, max_model_len: int, limit: int | None) -> int | None:
    """How many tokens are kept of a prompt; None: all."""
    if keep == -1:
        return max(1, max_model_len - (1 if limit is None else limit))
    return keep


def answer_stream(job: Job, writer: ChunkWriter) -> Response:
    """The response that sends frames until the generation or the client ends."""
    return EventStream(
        frames(job, writer), keep_alive_s=job.state.config.keep_alive_s, on_close=job.end
    )


async def frames(job: Job, writer: ChunkWriter) -> AsyncIterator[bytes]:
    """What `writer` makes of the job's deltas, to the end; whatever breaks is told by it too."""
    gatherer = Gatherer(job.state.config.stream_interval)
    try:
        async for deltas in job.serving:
            if data := writer.feed(gatherer.take(deltas)):
                yield data
        yield writer.ending()
    except Exception as error:  # the border: after the 200 an error can only be an event
        if isinstance(error, EngineDied):
            error = EngineFailed(str(error))
        yield writer.failing(fault_of(error))


async def gather(job: Job, request: Request) -> list[Gathered]:
    """All choices, whole. Raises ClientGone when nobody waits for them any more."""
    return await finish(job, request, _gather(job))


class Endable(Protocol):
    """Something with books to close."""

    def end(self) -> None:
        """Safe twice."""
        ...


async def finish(job: Endable, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which reads the job to its end. Raises ClientGone when nobody waits for
    it any more."""
    try:
        with UntilGone(request.receive):
            return await work
    except EngineDied as error:
        raise EngineFailed(str(error)) from error
    finally:
        job.end()


async def _gather(job: Job) -> list[Gathered]:
    choices = [Gathered() for _ in range(len(job.prompts) * job.params.n)]
    async for deltas in job.serving:
        for delta in deltas:
            if job.answers is None:
                choices[delta.index].take(delta)
            else:
                choices[delta.index].read(delta, job.answers.reader(delta.index))
    return choices


def answer_whole(value: dict[str, Any]) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")
