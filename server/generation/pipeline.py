"""The generation pipeline: checks a request, sends its sequences to the engine, and returns text
deltas."""

import asyncio
import time
from typing import Any

import numpy as np

from config.errors import (
    DeadlineExceeded,
    EngineDied,
    Overloaded,
    RequestFailed,
    UserError,
    value_text,
)
from config.fair_threads import current_client
from config.params.lora import IMAGE
from config.params.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from config.server import ServerConfig
from engine.client.base import EngineClient
from engine.client.output_queue import RequestOutputQueue, Update
from engine.client.request_limits import DEFAULT_TERMS, RequestTerms
from engine.transport.messages import SLEEPING, UNSENT, AddRequest, Finish, Ready, engine_of
from server.generation.logprobs import ID_BYTES, PromptLogprobs
from server.generation.outputs import Delta, Output, Prompt, Timing
from server.generation.sequence import Sequence
from server.generation.validation import (
    UNLIMITED,
    OutputLimits,
    check_allowed_tokens,
    check_sizes,
    output_limit,
    with_checked_ids,
)
from server.http.pacing import LoopPacer
from server.text.tokenizer import INLINE_CHARACTERS, Tokenizer

MAX_BAD_WORDS_CHARACTERS = 5_000
"""Maximum total length of bad_words; less for a tokenizer that encodes fewer than INLINE_CHARACTERS
on the event loop. Each word is tokenized twice there, a few milliseconds in total."""
MAX_UPDATE_VALUES = 1_000
"""Tokens and log-probabilities to process before the event loop runs other requests: 5 ms,
including their JSON in a stream."""
MAX_ITERATION_VALUES = 1_000
"""Tokens and log-probabilities of all requests to process in an iteration of the event loop."""
VALUES_PER_INSTANT_CHOICE = 20
"""Time to process a choice without output, including its JSON in a stream, in values."""
MAX_INSTANT_CHOICES = MAX_UPDATE_VALUES // VALUES_PER_INSTANT_CHOICE
"""Choices without output to process before the event loop runs other requests."""
MAX_TOKENS_AT_ONCE = 65_536
"""Prompt tokens to check or send before the event loop runs other requests: about 5 ms."""
TOKENS_PER_SEQUENCE = 1_024
"""Fixed cost of sending a sequence, in prompt tokens."""
IMAGE_BYTES_PER_TOKEN = 256
"""Bytes of images and videos that take as long to send as a prompt token."""
ASLEEP_RETRY_S = 10


class Pipeline:
    """Checks requests against the limits of the model and the server, and starts generations."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        config: ServerConfig,
        output_limits: OutputLimits = UNLIMITED,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer if not config.skip_tokenizer_init else None
        self.pacer = LoopPacer(1)
        """Paces long work of requests, which takes milliseconds at a time."""
        self.output_pacer = LoopPacer(MAX_ITERATION_VALUES)
        """Paces the output of all requests, which may arrive in the same iteration."""
        self._max_stop_strings = config.max_stop_strings
        self._max_logprobs = config.max_logprobs
        self._output_limits = output_limits

    async def start(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        param: str = "messages",
        visible_special_ids: frozenset[int] = frozenset(),
    ) -> "Generation":
        """Check the request and send its `len(prompts) * params.n` sequences, except sequences
        without work for the engine. `param`: field of the prompt, for errors;
        `visible_special_ids`: special tokens that always appear in the text.

        Raises UserError, Overloaded, DeadlineExceeded or EngineDied; after an exception, nothing of
        the request is left in the engine.
        """
        params, limits = await self.check_request(prompts, params, param)
        generation = Generation(self.client, prompts, params.n, self.output_pacer)
        pauses = Pauses(self.pacer)
        try:
            if len(prompts) * params.n > 1:
                await pauses.pause()
            for prompt_index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                tokens = memoryview(np.asarray(prompt.token_ids, dtype="<u4").tobytes())
                images = self.image_fields(prompt, terms)
                num_image_bytes = prompt.images.num_bytes if prompt.images else 0
                num_image_tokens = num_image_bytes // IMAGE_BYTES_PER_TOKEN
                await pauses.after(len(prompt.token_ids))
                for choice in range(params.n):
                    await pauses.after(TOKENS_PER_SEQUENCE + num_image_tokens)
                    sampling = _choice_params(params, choice, limit)
                    queue = None
                    if sampling is not None:
                        request = AddRequest(
                            UNSENT,
                            tokens,
                            sampling,
                            priority=terms.priority,
                            cache_salt=terms.cache_salt,
                            name=terms.name,
                            **images,
                        )
                        queue = self.client.add(request, terms.limits)
                    index = prompt_index * params.n + choice
                    sequence = Sequence(index, prompt, params, self.tokenizer, visible_special_ids)
                    generation.open(sequence, queue)
        except BaseException:
            generation.abort()
            raise
        return generation

    def image_fields(self, prompt: Prompt, terms: RequestTerms) -> dict[str, Any]:
        """Fields of AddRequest for the prompt's images and LoRA adapter: the adapter of `terms`, or
        for a prompt with images and without an adapter, the adapter of --default-mm-loras."""
        if prompt.images is None:
            return {"adapter": terms.adapter}
        infos = self.client.adapters.values()
        default = next((info.content for info in infos if info.kind == IMAGE), "")
        images = prompt.images.salted(terms.cache_salt)
        return {
            "images": list(images.placements),
            "encoded_images": list(images.encoded),
            "adapter": terms.adapter or default,
        }

    @property
    def ready(self) -> Ready:
        """The engine's Ready message. Raises EngineDied or Overloaded if the engine is not
        ready."""
        ready = self.client.ready
        if ready is None:
            if self.client.has_failed:
                raise EngineDied(self.client.failure)
            raise Overloaded("the engine is still starting", type="server_error")
        return ready

    def check_generates(self) -> None:
        """Raise UserError for a pooling model."""
        ready = self.client.ready
        if ready is not None and ready.pooling is not None:
            raise UserError(
                "This model does not generate text, it returns vectors or scores "
                f"({', '.join(ready.pooling.tasks)}).",
                param="model",
            )

    async def check_request(
        self, prompts: list[Prompt], params: SamplingParams, param: str
    ) -> tuple[SamplingParams, list[int]]:
        """`params` with bad words as token ids and long lists of token ids packed, and the output
        limit of each prompt. Raises UserError, and EngineDied or Overloaded if the engine is not
        ready."""
        ready = self.ready
        self.check_generates()
        self._check_logprobs(params)
        self._check_stop_strings(params)
        params = self._with_bad_words(params)
        num_image_bytes = sum(prompt.images.num_bytes for prompt in prompts if prompt.images)
        check_sizes(params, len(prompts) * params.n, num_image_bytes)
        params = with_checked_ids(params, ready.vocab_size)
        check_allowed_tokens(params, ready.eos_token_ids, ready.vocab_size)
        num_ids = ready.prompt_vocab_size or ready.vocab_size
        limits = []
        pauses = Pauses(self.pacer)
        if len(prompts) > 1:
            await pauses.pause()
        for prompt in prompts:
            limit = output_limit(
                prompt, params, num_ids, ready.max_model_len, self._output_limits, param
            )
            limits.append(limit)
            await pauses.after(len(prompt.token_ids))
        return params, limits

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._max_logprobs:
                raise UserError(
                    f"{name} is {count}, it must be at most {self._max_logprobs} (--max-logprobs)",
                    param=name,
                )

    def _check_stop_strings(self, params: SamplingParams) -> None:
        count, max_count = len(params.stop), self._max_stop_strings
        if count > max_count:
            raise UserError(
                f"stop has {count} strings, at most {max_count} are allowed", param="stop"
            )
        if params.stop and (self.tokenizer is None or not params.detokenize):
            raise UserError(
                "stop strings need detokenized output; use stop_token_ids instead", param="stop"
            )

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words:
            return params
        if self.tokenizer is None:
            raise UserError("bad_words needs a tokenizer, this server has none", param="bad_words")
        length = sum(len(word) for word in params.bad_words)
        most = MAX_BAD_WORDS_CHARACTERS * self.tokenizer.inline_characters // INLINE_CHARACTERS
        if length > most:
            raise UserError(
                f"bad_words has {length} characters, at most {most} are allowed",
                param="bad_words",
            )
        if 2 * len(params.bad_words) > MAX_BAD_WORDS:
            raise UserError(
                f"bad_words has {len(params.bad_words)} words, at most {MAX_BAD_WORDS // 2} are "
                "allowed",
                param="bad_words",
            )
        banned = dict.fromkeys(params.bad_words_token_ids)
        for word in params.bad_words:
            bare = word.lstrip(" ")
            if not bare:
                raise UserError(
                    f"bad_words has {value_text(word)}, a word must have a visible character",
                    param="bad_words",
                )
            for variant in (bare, " " + bare):
                ids = tuple(self.tokenizer.encode_now(variant, False))
                if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                    raise UserError(
                        f"bad_words has {word[:40]!r} of {len(ids)} tokens, a word must have "
                        f"between 1 and {MAX_BAD_WORD_TOKENS}",
                        param="bad_words",
                    )
                banned[ids] = None
        return params.replace_unchecked(bad_words=(), bad_words_token_ids=tuple(banned))


class Pauses:
    """Yields to the event loop when the work for a request exceeds MAX_TOKENS_AT_ONCE tokens.
    `pacer` resumes waiting requests round-robin over clients."""

    def __init__(self, pacer: LoopPacer) -> None:
        self._pacer = pacer
        self._num_tokens = 0

    async def after(self, num_tokens: int) -> None:
        """Account for work of `num_tokens`, and yield to the event loop if the limit is
        exceeded."""
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_TOKENS_AT_ONCE:
            await self.pause()

    async def pause(self) -> None:
        """Yield to the event loop, and wait for the turn of this request. Call it before long work:
        many requests may become ready in the same iteration."""
        self._num_tokens = 0
        # `wait` alone does not yield if there are no other callers.
        await asyncio.sleep(0)
        await self._pacer.wait(current_client.get() or "")


class Generation:
    """Output of a request (see GenerationStream). Iterate it once, or `collect` it.

    Raises EngineDied if the engine dies, and the exceptions of `check_finish` if a choice fails in
    the engine; unfinished choices are then aborted.
    """

    def __init__(
        self, client: EngineClient, prompts: list[Prompt], num_choices: int, pacer: LoopPacer
    ) -> None:
        """`pacer` paces the output of all requests."""
        self.engine = 0
        """Engine of the first sequence."""
        self.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        """Prompt tokens; each prompt is counted once, independent of n."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache by the first choice of each prompt."""
        self.num_output_tokens = 0
        """Tokens of all choices so far, including end tokens and matched stop strings."""
        self._pacer = pacer
        self._client = client
        self._num_choices = num_choices
        self._sequences: list[Sequence] = []
        self._instant: list[Sequence] = []
        """Choices without work for the engine that have not been returned yet."""
        self._queues: dict[int, RequestOutputQueue] = {}
        """Choice index -> output queue, for unfinished choices."""
        self._gets: dict[int, asyncio.Task[Update]] = {}
        self._wakeup: asyncio.Future[None] | None = None
        self._aborted = False
        self._started_s = time.monotonic()

    def open(self, sequence: Sequence, queue: RequestOutputQueue | None) -> None:
        """Add the next choice. `queue`: output queue of the engine client; None: nothing was sent
        to the engine."""
        self._sequences.append(sequence)
        if sequence.is_instant:
            self._instant.append(sequence)
        if queue is not None:
            if not self._queues:
                self.engine = engine_of(queue.key)
            self._queues[sequence.index] = queue

    @property
    def num_sequences(self) -> int:
        """Number of choices, over all prompts."""
        return len(self._sequences)

    @property
    def num_unread_bytes(self) -> int:
        """Estimated memory of the output that has not been read yet."""
        read = [get.result() for get in self._gets.values() if _has_update(get)]
        waiting = [queue.num_unread_bytes for queue in self._queues.values()]
        return sum(waiting) + sum([update.num_bytes for update in read])

    @property
    def prompt_logprobs(self) -> list[PromptLogprobs | None]:
        """Log-probabilities of each prompt; None unless requested. They are complete once the
        prompt's first output token has arrived, or the request has ended."""
        return [sequence.prompt_logprobs for sequence in self._sequences[:: self._num_choices]]

    @property
    def timing(self) -> Timing:
        """Maximum of each value over all choices."""
        timings = [sequence.timing for sequence in self._sequences]
        return Timing(
            max(timing.queue_s for timing in timings),
            max(timing.prefill_s for timing in timings),
            max(timing.decode_s for timing in timings),
        )

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        try:
            if self._instant and not self._aborted:
                instant = self._instant[:MAX_INSTANT_CHOICES]
                weight = len(instant) * VALUES_PER_INSTANT_CHOICE
                await self._pacer.wait(current_client.get() or "", weight)
                if not self._aborted:
                    del self._instant[: len(instant)]
                    return [sequence.finish_without_output() for sequence in instant]
            while self._queues and not self._aborted:
                if len(self._sequences) == 1:
                    updates = [(0, await self._queues[0].get())]
                else:
                    updates = await self._next_updates()
                weight = sum([_num_values(update) for _, update in updates])
                await self._pacer.wait(current_client.get() or "", weight)
                if self._aborted:
                    break
                deltas = [delta for i, update in updates if (delta := self._apply(i, update))]
                if deltas:
                    return deltas
        except BaseException:
            # Abort on cancellation too, because nobody will read the rest of the output.
            self.abort()
            raise
        raise StopAsyncIteration

    async def collect(self) -> list[Output]:
        """Read to the end; one output per choice, in order."""
        outputs = [Output() for _ in self._sequences]
        async for deltas in self:
            for delta in deltas:
                outputs[delta.index].add(delta)
        return outputs

    def abort(self) -> None:
        """Abort the unfinished choices in the engine; if there are any, the iteration ends. May be
        called at any time and more than once."""
        self._aborted = self._aborted or bool(self._queues or self._instant)
        queues, self._queues = self._queues, {}
        if queues:
            self._client.abort([queue.key for queue in queues.values()])
        gets, self._gets = self._gets, {}
        for get in gets.values():
            get.cancel()
        self._wake()

    def _apply(self, index: int, update: Update) -> Delta | None:
        sequence = self._sequences[index]
        finish = update.finish
        if finish is not None:
            del self._queues[index]
            check_finish(finish)
        num_cached, num_output = sequence.num_cached_tokens, sequence.num_output_tokens
        delta = sequence.take(update, time.monotonic() - self._started_s)
        # Running totals: a stream may report them in every chunk of every choice.
        self.num_output_tokens += sequence.num_output_tokens - num_output
        if index % self._num_choices == 0:
            self.num_cached_tokens += sequence.num_cached_tokens - num_cached
        if sequence.is_finished and finish is None:
            # The choice ended at a stop string, which only the API server checks.
            self._client.abort([self._queues.pop(index).key])
        return delta

    async def _next_updates(self) -> list[tuple[int, Update]]:
        """Wait for updates. Returns the available updates, up to about MAX_UPDATE_VALUES tokens and
        log-probabilities; the next calls return the rest."""
        loop = asyncio.get_running_loop()
        for index, queue in self._queues.items():
            if index not in self._gets:
                get = self._gets[index] = loop.create_task(_get(queue))
                get.add_done_callback(self._wake)
        if any(get.done() for get in self._gets.values()):
            # Yield: if updates arrive faster than they are read, the request must not block the
            # loop.
            await asyncio.sleep(0)
        else:
            self._wakeup = loop.create_future()
            # All updates of an engine step arrive in a single iteration of the loop, before this
            # coroutine resumes.
            await self._wakeup
        updates, num_values = [], 0
        for index in [index for index, get in self._gets.items() if get.done()]:
            update = self._gets.pop(index).result()
            if index in self._queues:
                updates.append((index, update))
                num_values += _num_values(update)
            if num_values > MAX_UPDATE_VALUES:
                break
        return updates

    def _wake(self, done: asyncio.Task[Update] | None = None) -> None:
        if done is not None and not done.cancelled():
            done.exception()  # retrieve the exception: a failure of many choices is reported once
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def _num_values(update: Update) -> int:
    if not update.logprobs:
        return len(update.tokens)
    num_logprobs = sum([memoryview(part.ids).nbytes // ID_BYTES for part in update.logprobs])
    return len(update.tokens) + num_logprobs


def _has_update(get: asyncio.Task[Update]) -> bool:
    return get.done() and not (get.cancelled() or get.exception())


async def _get(queue: RequestOutputQueue) -> Update:
    return await queue.get()


def check_finish(finish: Finish) -> None:
    """Raise the exception for a failed sequence: UserError if the request caused the failure,
    Overloaded if the engine sleeps or has no capacity, DeadlineExceeded after a timeout, otherwise
    RequestFailed."""
    if finish.reason not in ("stop", "length"):
        reason = finish.error or f"the engine ended the request: {finish.reason}"
        if finish.is_retryable:
            raise asleep() if reason == SLEEPING else Overloaded(reason)
        if finish.is_timeout:
            raise DeadlineExceeded(reason, has_started=finish.prefill_s > 0)
        if finish.param is not None:
            raise UserError(reason, param=finish.param or None)
        raise RequestFailed(reason)


def asleep() -> Overloaded:
    """The error for requests while the engine sleeps."""
    return Overloaded(
        "The model is asleep: wake it with POST /wake_up.",
        retry_after_s=ASLEEP_RETRY_S,
        type="server_error",
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of choice `choice`; None without a `seed`. The first choice uses `seed` itself;
    further seeds are derived from it (splitmix64), so that a choice's random stream does not depend
    on n."""
    if seed is None or choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _choice_params(params: SamplingParams, choice: int, limit: int) -> SamplingParams | None:
    """Engine parameters of a choice; None if nothing has to be computed."""
    prompt_logprobs = params.prompt_logprobs if choice == 0 else None
    if limit == 0 and prompt_logprobs is None:
        return None
    values = {
        "n": 1,
        "seed": choice_seed(params.seed, choice),
        "max_tokens": limit,
        "prompt_logprobs": prompt_logprobs,
        "stop": (),
        "truncate_prompt_tokens": None,
    }
    # All choices share the validated lists.
    changes = {name: value for name, value in values.items() if getattr(params, name) != value}
    return params.replace_unchecked(**changes) if changes else params
