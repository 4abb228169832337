"""Admission and submission of engine requests, and their streamed or complete responses."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from config.error_frames import release_frames
from config.errors import DeadlineExceeded, EngineDied, Overloaded, UserError
from config.json_text import Json
from config.native import panics_as_errors
from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.client.request_limits import RequestLimits, RequestTerms
from engine.transport.messages import COMPILE_GRAMMAR
from server.generation.answer_parser import ChoiceParsers
from server.generation.beam_search import BeamSearchGeneration
from server.generation.outputs import Delta, GenerationStream, Prompt, StreamT
from server.http.access_log import RequestRecord, record_of
from server.http.body import INLINE_VALUES
from server.http.disconnect import CancelOnDisconnect
from server.http.errors import EngineFailed, Fault, fault_of
from server.http.json_encoder import CHARACTERS_PER_WEIGHT
from server.http.sse import Envelope, EventStream
from server.openai.schema.generation import BIAS_BYTES, INLINE_IDS, GenerationBody
from server.parsers.stream.base import ParserEvent, TextDelta
from server.serving.choices import (
    ChoiceOutput,
    DeltaBatcher,
    TokenFormatter,
    consumed,
    encoded_chat_logprobs,
    prompt_logprobs_of,
    token_formatter,
)
from server.serving.state import AppState
from server.serving.timeouts import timeout_of
from server.serving.tracking import RequestTracker

T = TypeVar("T")

MAX_PROMPT_LOGPROBS = 2**19
"""Maximum number of prompt log-probabilities in a response: 35 MiB of JSON."""
MAX_KEPT_LOGPROBS = 2**21
"""Maximum number of log-probabilities of output tokens that are kept for a response: 300 MB."""
CHOICE_VALUES_PER_TOKEN = 0.25
"""Cost of a token's text, in JSON values."""

GRAMMAR_TIMEOUT_S = 10.0
"""Time limit for compiling a grammar. The engine limits the compilation itself to less than 2 s;
the rest is the wait for other grammars."""


class EngineOptions(Protocol):
    """Fields that the bodies of all engine requests have in common."""

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def request_id(self) -> str | None: ...

    @property
    def timeout(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked generation request that is ready for the engine."""

    model: str
    params: SamplingParams
    prompts: list[Prompt]
    prompt_field: str
    """Field of the body that holds the prompts, for errors."""
    parsers: ChoiceParsers | None = None
    """Output parsers; None: the output is plain text."""


@dataclass(slots=True, kw_only=True)
class RunningRequest(Generic[StreamT]):
    """A request that has passed all checks and was sent to the engine."""

    state: AppState
    id: str
    model: str
    tracker: RequestTracker[StreamT]
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        """Abort unfinished sequences and complete the access-log record. May be called more than
        once."""
        self.state.active_requests.discard(self.tracker)
        self.tracker.close()


@dataclass(slots=True, kw_only=True)
class ServingRequest(RunningRequest[GenerationStream]):
    """A generation request."""

    body: GenerationBody
    params: SamplingParams
    prompts: list[Prompt]
    parsers: ChoiceParsers | None = None
    """Output parsers; None: the output is plain text."""
    num_echo_characters: int = 0
    """Characters of the echoed text, over all choices."""

    @property
    def generation(self) -> GenerationStream:
        return self.tracker.stream

    @property
    def token_formatter(self) -> TokenFormatter:
        """Formatter for tokens in log-probabilities."""
        as_ids = self.body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self.state.config.return_tokens_as_token_ids
        return token_formatter(as_ids=as_ids or self.state.tokenizer is None)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.body.includes_usage or self.state.config.enable_force_include_usage

    @property
    def includes_usage_in_chunks(self) -> bool:
        """Whether every chunk of a stream includes the usage so far."""
        options = self.body.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    def events(self, delta: Delta) -> list[ParserEvent]:
        """Parser events for `delta`; without parsers, its text. Call it once per delta."""
        if self.parsers is None:
            return [TextDelta(delta.text)] if delta.text else []
        return self.parsers.parse(delta)

    def finish_reason(self, delta: Delta) -> str | None:
        """Finish reason of the choice of `delta`; None before its end. Call it after `events`."""
        if self.parsers is None:
            return delta.finish_reason
        return self.parsers.finish_reason(delta)

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices so far."""
        return 0 if self.parsers is None else self.parsers.num_reasoning_tokens

    def usage(self) -> Json:
        """Usage object for the tokens so far."""
        stream = self.generation
        return {
            "prompt_tokens": stream.num_prompt_tokens,
            "completion_tokens": stream.num_output_tokens,
            "total_tokens": stream.num_prompt_tokens + stream.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": stream.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    def usage_of_prompt(self) -> Json:
        """Usage object before the first token."""
        usage = self.usage()
        return {
            **usage,
            "completion_tokens": 0,
            "total_tokens": usage["prompt_tokens"],
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def num_unread_bytes(self) -> int:
        """Estimated memory of the output that has not been read yet."""
        return self.generation.num_unread_bytes

    @property
    def num_prompt_logprobs(self) -> int:
        """Maximum number of prompt log-probabilities in the response."""
        return num_prompt_logprobs(self.body, self.params, self.prompts)

    def check_kept_logprobs(self) -> None:
        """Raise UserError for more than MAX_KEPT_LOGPROBS log-probabilities of output tokens."""
        if self.params.logprobs is None:
            return
        width, num_tokens = 1 + self.params.logprobs, self.generation.num_output_tokens
        if width * num_tokens > MAX_KEPT_LOGPROBS:
            raise UserError(
                f"the response has {width} log-probabilities of each of {num_tokens} tokens, "
                f"{width * num_tokens} in total, at most {MAX_KEPT_LOGPROBS} are allowed; stream "
                "chat or text completions, or lower n, max_tokens or the number of "
                "log-probabilities",
                param="logprobs",
            )

    @property
    def num_echo_values(self) -> int:
        """Estimated number of JSON values in the echoed text and the prompt log-probabilities."""
        num_text_values = self.num_echo_characters // CHARACTERS_PER_WEIGHT
        return self.num_prompt_logprobs + num_text_values

    @property
    def num_returned_ids(self) -> int:
        """Maximum number of token ids of a prompt in the first chunk of a choice."""
        if not self.body.return_token_ids:
            return 0
        return max(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_answer_values(self) -> int:
        """Estimated number of JSON values in the response so far."""
        num_tokens = self.generation.num_output_tokens
        width = CHOICE_VALUES_PER_TOKEN
        if self.params.logprobs is not None:
            width += 1 + self.params.logprobs
        count = int(num_tokens * width) + self.num_echo_values
        if self.body.return_token_ids:
            count += num_tokens + self.generation.num_prompt_tokens
        return count

    def answer(self, kind: str, choices: Sequence[Json | msgspec.Raw]) -> Json:
        """Body of a complete response."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": self.usage(),
            "service_tier": None,
            "system_fingerprint": self.state.fingerprint,
            "kv_transfer_params": None,
        }

    def prompt_logprobs(self, prompt_index: int) -> list[msgspec.Raw | None] | None:
        """The `prompt_logprobs` of a prompt in a complete response; None: not requested."""
        width = self.body.prompt_logprobs
        if width is None:
            return None
        return prompt_logprobs_of(self.generation.prompt_logprobs[prompt_index], width)

    def chat_logprobs(self, choice: ChoiceOutput) -> Json | None:
        """The logprobs object of a complete choice; None if it is not requested. Frees the
        log-probabilities of the choice."""
        if self.params.logprobs is None:
            return None
        return encoded_chat_logprobs(consumed(choice.logprobs), self.token_formatter)

    def envelope(self, kind: str) -> Envelope:
        return Envelope(kind, self.id, self.created, self.model, self.state.fingerprint)


class ChunkWriter(Protocol):
    """Encodes deltas as SSE frames."""

    def feed(self, deltas: list[Delta]) -> bytes:
        """Frames for `deltas`; empty if nothing is visible yet."""
        ...

    async def ending(self) -> bytes:
        """Frames after the last delta, at the end of the stream."""
        ...

    async def failing(self, fault: Fault) -> bytes:
        """Frames for an error, at the end of the stream."""
        ...


# Submission


def num_prompt_logprobs(body: GenerationBody, params: SamplingParams, prompts: list[Prompt]) -> int:
    """Maximum number of prompt log-probabilities in the response. The first token of a prompt is
    counted, although it has no log-probabilities."""
    if params.prompt_logprobs is None:
        return 0
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return (1 + params.prompt_logprobs) * num_tokens * body.num_prompt_logprob_lists


def _check_prompt_logprobs(
    body: GenerationBody, params: SamplingParams, prompts: list[Prompt]
) -> None:
    count = num_prompt_logprobs(body, params, prompts)
    if count <= MAX_PROMPT_LOGPROBS:
        return
    width = 1 + (params.prompt_logprobs or 0)
    num_lists = body.num_prompt_logprob_lists
    num_tokens = count // width // num_lists
    # With echo, `logprobs` also sets the number for prompt tokens.
    name = "prompt_logprobs" if body.prompt_logprobs == params.prompt_logprobs else "logprobs"
    most = MAX_PROMPT_LOGPROBS // num_tokens // num_lists - 1
    advice = f"set {name} to {most}" if most >= 0 else "send fewer prompt tokens"
    if most < 0 and num_lists > 1:
        advice += " or a smaller n"
    times = f", in {num_lists} lists" if num_lists > 1 else ""
    raise UserError(
        f"the request asks for {width} log-probabilities of each of {num_tokens} prompt "
        f"tokens{times}, {count} in total, at most {MAX_PROMPT_LOGPROBS} are allowed; {advice}",
        param=name,
    )


def check_admission(state: AppState, body: GenerationBody, num_sequences: int, param: str) -> None:
    """Raise UserError for a priority without priority scheduling, and for more sequences than may
    wait."""
    _check_priority(state, body.priority)
    max_sequences = state.config.max_queued_requests
    if num_sequences > max_sequences:
        raise UserError(
            f"the request asks for {num_sequences} sequences, at most {max_sequences} may wait",
            param="n" if (body.n or 1) > 1 else param,
        )


def check_queued_tokens(state: AppState, num_tokens: int, param: str) -> None:
    """Raise UserError for more prompt tokens, over all sequences, than may wait."""
    max_tokens = state.config.max_queued_prompt_tokens
    if num_tokens > max_tokens:
        raise UserError(
            f"the request has {num_tokens} prompt tokens over all of its sequences, at most "
            f"{max_tokens} may wait",
            param=param,
        )


def _admit_beams(state: AppState, num_beams: int, param: str) -> None:
    """Raise UserError for a beam search with too many beams, and Overloaded for too many beams in
    total. Only the first step of a search is subject to the limits on waiting requests, so beam
    searches must leave half of the queue to other requests."""
    max_beams = max(1, state.config.max_queued_requests // 2)
    if num_beams > max_beams:
        raise UserError(
            f"the request asks for {num_beams} beams, at most {max_beams} are allowed",
            param=param,
        )
    num_running = sum(
        tracker.stream.num_sequences
        for tracker in state.active_requests
        if isinstance(tracker.stream, BeamSearchGeneration)
    )
    if num_running + num_beams > max_beams:
        raise Overloaded(
            f"{num_running} beams are running and this request has {num_beams}, at most "
            f"{max_beams} are allowed."
        )


def _check_priority(state: AppState, priority: int | None) -> None:
    if priority and not state.has_priorities:
        raise UserError(
            f"priority is {priority}, it must be 0 without --scheduling-policy priority",
            param="priority",
        )


def cache_salt_of(state: AppState, record: RequestRecord, salt: str | None) -> str:
    """Prefix-cache salt of a request with `salt` in its body. With --cache-salt-per-key it includes
    the digest of the API key."""
    salt = salt or ""
    if not state.config.cache_salt_per_key:
        return salt
    # check_salt rejects @ in a body's salt, so no client can use another client's salt.
    return f"{record.owner}@{salt}"


def tenant_of(state: AppState, record: RequestRecord) -> int:
    """Id of the request's API key for --fair-share: 60 bits of the key's digest; 0 without a key or
    without --fair-share."""
    if not state.has_fair_share or not record.owner:
        return 0
    return int(record.owner[:15], 16)


async def check_grammar(
    state: AppState, request: Request, field: str, spec: GrammarSpec, *, place: str
) -> None:
    """Compile the grammar of `field` in the engine, so that errors are reported before the response
    starts. `place`: path of the grammar in the body, for errors. Raises UserError, ClientGone,
    Overloaded (also after GRAMMAR_TIMEOUT_S), and the other errors of
    SingleEngineClient.control."""
    record = record_of(request.scope)
    call = state.client.control(
        COMPILE_GRAMMAR,
        spec=msgspec.to_builtins(spec),
        client=record.owner or record.client,
    )
    try:
        with CancelOnDisconnect(request.receive):
            await asyncio.wait_for(call, GRAMMAR_TIMEOUT_S)
    except UserError as error:
        raise UserError(f"{place}: {error.message}", param=field) from None
    except asyncio.TimeoutError:
        raise Overloaded(
            f"the {spec.noun} waited {GRAMMAR_TIMEOUT_S:g} s for other grammars to be compiled"
        ) from None


def request_id_of(options: EngineOptions, prefix: str) -> str:
    """Response id: `prefix`, and the client's request id or a random id."""
    return f"{prefix}{options.request_id or os.urandom(16).hex()}"


async def start_tracked(
    state: AppState,
    request: Request,
    options: EngineOptions,
    start: Callable[[RequestTerms], Awaitable[StreamT]],
    *,
    model: str,
    num_prompt_tokens: int,
    num_first_tokens: int,
    params: SamplingParams | None = None,
) -> RequestTracker[StreamT]:
    """Send a request to the engine with `start`, and track it.

    Raises UserError for an invalid priority or timeout, NotFound for an adapter that was unloaded,
    and the errors of `start`. Raises Overloaded if the expected time to first token of a prompt of
    `num_first_tokens` tokens exceeds --max-ttft.
    """
    _check_priority(state, options.priority)
    record = record_of(request.scope)
    timeout = timeout_of(request, record, options.timeout)
    record.model = model
    record.num_prompt_tokens = num_prompt_tokens
    deadline_s = None if timeout is None else timeout.deadline_s
    terms = RequestTerms(
        priority=options.priority or 0,
        cache_salt=cache_salt_of(state, record, options.cache_salt),
        name=record.id,
        adapter=state.adapter_of(model),
        limits=RequestLimits(deadline_s, tenant_of(state, record)),
    )
    if state.max_ttft_s:
        state.client.check_ttft(
            num_first_tokens, priority=terms.priority, request_limits=terms.limits
        )
    try:
        stream = await start(terms)
    except DeadlineExceeded as error:
        assert timeout is not None, "only a request with a timeout has a deadline"
        state.metrics.requests[0].timed_out(has_started=False)
        raise timeout.error(str(error), record.seconds) from None
    metrics = state.metrics.requests[stream.engine]
    trace = None
    if (tracer := state.tracer) is not None:

        def trace(ended: RequestTracker[StreamT]) -> None:
            tracer.request_ended(
                record,
                request.headers,
                params,
                ended.stream.timing,
                sent_s=ended.sent_s,
                num_sequences=ended.stream.num_sequences,
                num_cached_tokens=ended.stream.num_cached_tokens,
            )

    tracker = RequestTracker(stream, params, record, metrics, trace, timeout, terms.priority)
    state.active_requests.add(tracker)
    return tracker


async def start_job(
    state: AppState,
    request: Request,
    body: GenerationBody,
    prepared: PreparedRequest,
    *,
    id_prefix: str,
) -> ServingRequest:
    """Send the request to the engine, if it can be admitted. Raises UserError, Overloaded, and the
    other errors of `start_tracked`; after an exception, nothing of the request is left in the
    engine."""
    params, prompts, param = prepared.params, prepared.prompts, prepared.prompt_field
    num_sequences = len(prompts) * params.n
    check_admission(state, body, num_sequences, param)
    _check_prompt_logprobs(body, params, prompts)
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    check_queued_tokens(state, num_tokens * params.n, param)
    if (num_biases := len(params.logit_bias)) > INLINE_IDS:
        body.hold(await state.bodies.hold_more(body.held, BIAS_BYTES * num_biases))
    start: Callable[..., Awaitable[GenerationStream]] = state.generation_pipeline().start
    if body.use_beam_search:
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        start = partial(
            BeamSearchGeneration.start,
            state.generation_pipeline(),
            length_penalty=penalty,
            admit=partial(_admit_beams, state, num_sequences, param),
        )
    parsers = prepared.parsers
    visible_special_ids = frozenset() if parsers is None else parsers.marker_token_ids
    tracker = await start_tracked(
        state,
        request,
        body,
        partial(start, prompts, params, param=param, visible_special_ids=visible_special_ids),
        model=prepared.model,
        num_prompt_tokens=num_tokens,
        num_first_tokens=len(prompts[0].token_ids),
        params=params,
    )
    return ServingRequest(
        state=state,
        id=request_id_of(body, id_prefix),
        model=prepared.model,
        tracker=tracker,
        body=body,
        params=params,
        prompts=prompts,
        parsers=parsers,
    )


# Responses


def stream_response(job: ServingRequest, writer: ChunkWriter) -> Response:
    """A response that sends frames until the generation ends or the client disconnects."""
    return EventStream(
        sse_frames(job, writer),
        keep_alive_s=job.state.config.keep_alive_s,
        on_close=job.close,
        num_unread_bytes=job.num_unread_bytes,
    )


async def sse_frames(job: ServingRequest, writer: ChunkWriter) -> AsyncIterator[bytes]:
    """SSE frames for all of the job's deltas. An error becomes a frame."""
    batcher = DeltaBatcher(job.state.config.stream_interval)
    try:
        is_long, begun = job.num_echo_values > INLINE_VALUES, set[int]()
        with panics_as_errors():
            async for deltas in job.tracker:
                ready = batcher.add(deltas)
                # The first chunk of a choice has the ids of the prompt. A single chunk has the
                # whole echoed prompt and its log-probabilities.
                num_begun = len(begun)
                begun.update(delta.index for delta in ready)
                num_ids = (len(begun) - num_begun) * job.num_returned_ids
                data = (
                    await asyncio.to_thread(writer.feed, ready)
                    if is_long or num_ids > INLINE_IDS
                    else writer.feed(ready)
                )
                if data:
                    yield data
            yield await writer.ending()
    except (
        Exception
    ) as error:  # process boundary: after status 200, an error can only be sent as an event
        if isinstance(error, EngineDied):
            error = EngineFailed(str(error))
        fault = fault_of(error)
        job.tracker.set_error(fault)
        release_frames(error)
        yield await writer.failing(fault)


async def collect_choices(job: ServingRequest, request: Request) -> list[ChoiceOutput]:
    """All choices of the complete response. Raises the errors of `run_to_end`."""
    return await run_to_end(job, request, _collect_choices(job))


async def run_to_end(job: RunningRequest[Any], request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which reads all of the job's output. Closes the job. Raises ClientGone if
    the client disconnects, EngineFailed if the engine dies, and the other errors of `work`."""
    try:
        with CancelOnDisconnect(request.receive):
            return await work
    except EngineDied as error:
        raise EngineFailed(str(error)) from error
    finally:
        job.close()


async def _collect_choices(job: ServingRequest) -> list[ChoiceOutput]:
    choices = [ChoiceOutput() for _ in range(len(job.prompts) * job.params.n)]
    async for deltas in job.tracker:
        job.check_kept_logprobs()
        for delta in deltas:
            choice = choices[delta.index]
            choice.add(delta)
            choice.message.add(job.events(delta))
            choice.finish_reason = job.finish_reason(delta)
    return choices
