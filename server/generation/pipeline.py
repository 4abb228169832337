"""The text pipeline: a prompt goes in as token ids, text deltas come out. Knows no HTTP."""

import asyncio
import time

import numpy as np

from config.errors import EngineDied, Overloaded, RequestFailed, UserError
from config.params.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from config.server import ServerConfig
from engine.client.base import EngineClient
from engine.client.output_queue import RequestOutputQueue, Update
from engine.transport.messages import Finish, Ready
from server.generation.outputs import Delta, Output, PositionLogprobs, Prompt, TokenLogprob
from server.generation.sequence import Sequence
from server.generation.validation import check_ids, check_something_is_left, output_limit
from server.text.tokenizer import Tokenizer

__all__ = [
    "Delta",
    "Generation",
    "Output",
    "Pipeline",
    "PositionLogprobs",
    "Prompt",
    "TokenLogprob",
    "check_finish",
    "choice_seed",
]

MAX_BAD_WORDS_CHARACTERS = 5_000
ASLEEP_RETRY_S = 10
"""Tokenized on the event loop, twice: a few milliseconds."""


class Pipeline:
    """Starts generations. Everything a request can get wrong with its tokens is refused here."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, config: ServerConfig
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer if not config.skip_tokenizer_init else None
        self._max_stop_strings = config.max_stop_strings

    def start(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        param: str = "messages",
        name: str = "",
        shown: frozenset[int] = frozenset(),
    ) -> "Generation":
        """Check, then send `len(prompts) * params.n` sequences. Does not wait.

        `param` is the field named in errors about the prompt, `name` the request in logs; `shown`
        are special tokens that belong to the text. Raises UserError, Overloaded or
        EngineDied, and then leaves nothing behind.
        """
        params, limits = self.checked(prompts, params, param)
        generation = Generation(self.client, prompts, params.n)
        try:
            for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
                tokens = np.asarray(prompt.token_ids, dtype="<u4").tobytes()
                for choice in range(params.n):
                    sampling = _sampling_of(params, choice, limit)
                    mailbox = None
                    if sampling is not None:
                        mailbox = self.client.add(
                            tokens, sampling, priority=priority, cache_salt=cache_salt, name=name
                        )
                    index = place * params.n + choice
                    sequence = Sequence(index, prompt, params, self.tokenizer, shown)
                    generation.open(sequence, mailbox)
        except BaseException:
            generation.abort()
            raise
        return generation

    @property
    def ready(self) -> Ready:
        """What the engine says of itself. Raises EngineDied or Overloaded unless it is there."""
        ready = self.client.ready
        if ready is None:
            if self.client.failure is not None:
                raise EngineDied(self.client.failure)
            raise Overloaded("the engine is still starting", type="server_error")
        return ready

    def check_generates(self) -> None:
        """Raise UserError if the model gives vectors and no text."""
        ready = self.client.ready
        if ready is not None and ready.pooling is not None:
            raise UserError(
                "This model does not generate text, it gives vectors or scores "
                f"({', '.join(ready.pooling.tasks)}).",
                param="model",
            )

    def checked(
        self, prompts: list[Prompt], params: SamplingParams, param: str
    ) -> tuple[SamplingParams, list[int]]:
        """`params` as the engine knows them, and how many tokens may follow each prompt. Raises
        like `start`."""
        ready = self.ready
        self.check_generates()
        check_ids(params, ready.vocab_size)
        params = self._with_bad_words(self._with_checked_stops(params))
        check_something_is_left(params, ready.eos_token_ids)
        limits = [
            output_limit(prompt, params, ready.vocab_size, ready.max_model_len, param)
            for prompt in prompts
        ]
        return params, limits

    def _with_checked_stops(self, params: SamplingParams) -> SamplingParams:
        count, most = len(params.stop), self._max_stop_strings
        if count > most:
            raise UserError(f"stop has {count} strings, it may have {most} at most", param="stop")
        if params.stop and (self.tokenizer is None or not params.detokenize):
            raise UserError(
                "stop strings need detokenized output; use stop_token_ids instead", param="stop"
            )
        return params

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """`bad_words` as token ids, each as it is at the start of a text and after a space."""
        if not params.bad_words:
            return params
        if self.tokenizer is None:
            raise UserError("bad_words needs a tokenizer, this server has none", param="bad_words")
        length = sum(len(word) for word in params.bad_words)
        if length > MAX_BAD_WORDS_CHARACTERS:
            raise UserError(
                f"bad_words has {length} characters, at most {MAX_BAD_WORDS_CHARACTERS} are taken",
                param="bad_words",
            )
        if 2 * len(params.bad_words) > MAX_BAD_WORDS:
            raise UserError(
                f"bad_words has {len(params.bad_words)} words, at most {MAX_BAD_WORDS // 2} "
                "are taken",
                param="bad_words",
            )
        banned = dict.fromkeys(params.bad_words_token_ids)
        for word in params.bad_words:
            bare = word.lstrip(" ")
            if not bare:
                raise UserError(f"bad_words has {word!r}, it must not be blank", param="bad_words")
            for written in (bare, " " + bare):
                ids = tuple(self.tokenizer.encode_now(written, False))
                if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                    raise UserError(
                        f"bad_words has {word[:40]!r} of {len(ids)} tokens, a word must have "
                        f"between 1 and {MAX_BAD_WORD_TOKENS}",
                        param="bad_words",
                    )
                banned[ids] = None
        return params.replace(bad_words=(), bad_words_token_ids=tuple(banned))


class Generation:
    """The choices of one request as they grow. Iterate it once, or `collect` it.

    Each item is a list of deltas: all that is new over all choices, at most one a choice. Raises
    EngineDied when the engine goes, RequestFailed when the request broke in it, UserError when its
    own settings left it no token; the choices that were still open are aborted then.
    """

    def __init__(self, client: EngineClient, prompts: list[Prompt], choices: int) -> None:
        self._client = client
        self._prompts = prompts
        self._choices = choices
        self._sequences: list[Sequence] = []
        self._instant: list[Sequence] = []
        """Those that there is nothing to wait for, until they are told."""
        self._boxes: dict[int, RequestOutputQueue] = {}
        """By index: the sequences that may still give something."""
        self._gets: dict[int, asyncio.Task[Update]] = {}
        self._wake: asyncio.Future[None] | None = None
        self._aborted = False
        self._started_s = time.monotonic()

    def open(self, sequence: Sequence, mailbox: RequestOutputQueue | None) -> None:
        """Add the next choice; None when there is nothing for the engine to do."""
        self._sequences.append(sequence)
        if sequence.is_instant:
            self._instant.append(sequence)
        if mailbox is not None:
            self._boxes[sequence.index] = mailbox

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once, whatever n."""
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, of the first choice of each prompt."""
        return sum(sequence.num_cached_tokens for sequence in self._sequences[:: self._choices])

    @property
    def num_output_tokens(self) -> int:
        """All tokens sampled so far, end tokens and matched stops included."""
        if len(self._sequences) == 1:
            return self._sequences[0].num_output_tokens
        return sum([sequence.num_output_tokens for sequence in self._sequences])

    @property
    def prompt_logprobs(self) -> list[list[PositionLogprobs | None] | None]:
        """One entry a prompt, None when not asked for. Whole once its first token has come; the
        first position has none."""
        return [sequence.prompt_logprobs for sequence in self._sequences[:: self._choices]]

    @property
    def queue_s(self) -> float:
        """Seconds until the last choice left the waiting line."""
        return max(sequence.timing.queue_s for sequence in self._sequences)

    @property
    def prefill_s(self) -> float:
        """Seconds in prefill, of the slowest choice."""
        return max(sequence.timing.prefill_s for sequence in self._sequences)

    @property
    def decode_s(self) -> float:
        """Seconds in decode, of the slowest choice."""
        return max(sequence.timing.decode_s for sequence in self._sequences)

    @property
    def num_preemptions(self) -> int:
        """Over all choices that have finished."""
        return sum(sequence.num_preemptions for sequence in self._sequences)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        if self._instant and not self._aborted:
            unsent, self._instant = self._instant, []
            return [sequence.take_nothing() for sequence in unsent]
        try:
            while self._boxes and not self._aborted:
                if len(self._sequences) == 1:
                    updates = [(0, await self._boxes[0].get())]
                else:
                    updates = await self._next_updates()
                if self._aborted:
                    break
                deltas = [delta for i, update in updates if (delta := self._apply(i, update))]
                if deltas:
                    return deltas
        except BaseException:
            # A cancelled reader too: nobody is left to read what would come.
            self.abort()
            raise
        raise StopAsyncIteration

    async def collect(self) -> list[Output]:
        """All deltas joined, one output a choice, in order."""
        outputs = [
            Output(sequence.index, num_prompt_tokens=sequence.num_prompt_tokens)
            for sequence in self._sequences
        ]
        texts: list[list[str]] = [[] for _ in outputs]
        async for deltas in self:
            for delta in deltas:
                texts[delta.index].append(delta.text)
                _extend(outputs[delta.index], delta)
        for output, text, sequence in zip(outputs, texts, self._sequences, strict=True):
            output.text = "".join(text)
            output.num_cached_tokens = sequence.num_cached_tokens
            if output.logprobs is not None:
                output.cumulative_logprob = sum(entry.chosen.logprob for entry in output.logprobs)
        return outputs

    def abort(self) -> None:
        """Forget what is still open, now. Iteration ends; safe at any moment, and twice."""
        self._aborted = self._aborted or bool(self._boxes)
        boxes, self._boxes = self._boxes, {}
        if boxes:
            self._client.abort([box.key for box in boxes.values()])
        gets, self._gets = self._gets, {}
        for get in gets.values():
            get.cancel()
        self._rouse()

    def _apply(self, index: int, update: Update) -> Delta | None:
        """What an update means for its choice; closes the choice when it ends."""
        sequence = self._sequences[index]
        finish = update.finish
        if finish is not None:
            del self._boxes[index]
            check_finish(finish)
        delta = sequence.take(update, time.monotonic() - self._started_s)
        if sequence.is_finished and finish is None:
            # A stop string that only we can see: the engine would go on.
            self._client.abort([self._boxes.pop(index).key])
        return delta

    async def _next_updates(self) -> list[tuple[int, Update]]:
        """Wait until some choice has something new; everything that is there then."""
        loop = asyncio.get_running_loop()
        for index, box in self._boxes.items():
            if index not in self._gets:
                get = self._gets[index] = loop.create_task(_get(box))
                get.add_done_callback(self._rouse)
        if not any(get.done() for get in self._gets.values()):
            self._wake = loop.create_future()
            # The reads of one step end in one turn of the loop, before this one goes on.
            await self._wake
        done = [index for index, get in self._gets.items() if get.done()]
        return [(index, self._gets.pop(index).result()) for index in done if index in self._boxes]

    def _rouse(self, done: asyncio.Task[Update] | None = None) -> None:
        if done is not None and not done.cancelled():
            done.exception()  # looked at, so that a failure of many choices is reported once
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


async def _get(box: RequestOutputQueue) -> Update:
    return await box.get()


def check_finish(finish: Finish) -> None:
    """Raise RequestFailed, or UserError if a setting of the caller's is to blame, or Overloaded if
    the engine went to sleep, for a sequence that did not end well."""
    if finish.reason not in ("stop", "length"):
        why = finish.error or f"the engine ended the request: {finish.reason}"
        if finish.is_retryable:
            raise asleep()
        if finish.param is not None:
            raise UserError(why, param=finish.param or None)
        raise RequestFailed(why)


def asleep() -> Overloaded:
    """Why nothing is taken by an engine that sleeps."""
    return Overloaded(
        "The model sleeps: POST /wake_up ends that, and requests are taken again.",
        retry_after_s=ASLEEP_RETRY_S,
        type="server_error",
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of choice `choice`: the first has the caller's own, the others ones derived from it
    (splitmix64), so that a choice's stream does not depend on how many were asked for."""
    if seed is None or choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _sampling_of(params: SamplingParams, choice: int, limit: int) -> SamplingParams | None:
    """What the engine is told of one choice; None when there is nothing to compute."""
    prompt_logprobs = params.prompt_logprobs if choice == 0 else None
    if limit == 0 and prompt_logprobs is None:
        return None
    told = {
        "n": 1,
        "seed": choice_seed(params.seed, choice),
        "max_tokens": limit,
        "prompt_logprobs": prompt_logprobs,
        "stop": (),
        "truncate_prompt_tokens": None,
    }
    # Most requests are what the engine is told, and a copy is checked anew.
    changes = {name: value for name, value in told.items() if getattr(params, name) != value}
    return params.replace(**changes) if changes else params


def _extend(output: Output, delta: Delta) -> None:
    output.token_ids += delta.token_ids
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + delta.logprobs
    if delta.finish_reason is not None:
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
