"""Request: one sequence to generate, and how far it has come. Knows no blocks pool and no queue."""

import sys
from array import array
from dataclasses import dataclass

from config.params.sampling import SamplingParams
from engine.kv_cache.prefix_hashes import TOKEN_BYTES
from engine.structured_output.grammar import Grammar, Guide
from engine.transport.messages import FRONT_END_SHIFT, AddRequest
from hpu.protocol import RequestSampling

WAITING, RUNNING, LEAVING, ENDED = range(4)
"""In line; in a row; preempted, with a plan still in flight; finished, aborted or failed."""

NEVER = sys.maxsize
LEAST_PENALTY = 1e-30
"""Of repetition; what is below it, or above its inverse, turns any logit into infinity or nothing
in 32 bits, and could only end the request."""

CORNERED = "the grammar leaves only tokens that allowed_token_ids or bad_words bar"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model fixes for every request."""

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]


class Request:
    """One open sequence. Plain numbers, since the loop over all rows reads and writes them.

    `known` counts its tokens (prompt, and output accepted so far). `computed` counts the tokens
    whose keys and values are written once every plan sent so far has run; with a step in flight a
    decoding row has computed more than its known tokens, because its next ones exist only on the
    device. `written` is `computed` as far as results were collected, while the row is in prefill.
    """

    __slots__ = (
        "adapter",
        "arrived_at",
        "blocks",
        "cache_salt",
        "computed",
        "decode_from",
        "end_ids",
        "file_at",
        "first_token_at",
        "front_end",
        "goes_on",
        "guide",
        "hashes",
        "key",
        "known",
        "last_step",
        "max_known",
        "min_known",
        "name",
        "num_preemptions",
        "num_prompt",
        "num_scored",
        "outputs",
        "pause_at",
        "pooling",
        "promised",
        "prompt",
        "rank",
        "reach",
        "row",
        "sampling",
        "started_at",
        "state",
        "stop_ids",
        "written",
    )

    def __init__(
        self,
        message: AddRequest,
        hashes: list[bytes],
        *,
        seed: int,
        rank: tuple[int, int],
        limits: ModelLimits,
        arrived_at: float,
        grammar: Grammar | None = None,
    ) -> None:
        params = message.sampling
        self.key = message.key
        self.front_end = message.key >> FRONT_END_SHIFT
        self.prompt = message.prompt.cast("B")
        self.num_prompt = len(self.prompt) // TOKEN_BYTES
        self.outputs = array("I")
        self.name = message.name or f"key {message.key}"
        self.pooling = message.pooling
        """What is wanted of it instead of tokens."""
        self.cache_salt = message.cache_salt
        self.adapter = message.adapter
        self.hashes = hashes
        self.goes_on = message.goes_on
        self.rank = rank
        """(priority, arrival): smaller runs first, greater gives way first."""
        self.state = WAITING

        room = limits.max_model_len - self.num_prompt
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self.known = self.num_prompt
        self.max_known = self.num_prompt + limit
        binds = grammar is not None and grammar.binds
        self.min_known = self.num_prompt + (0 if binds else params.min_tokens)
        """An end token counts only behind so many tokens; with a form always, since it comes early
        only where nothing else could."""
        ignores = params.ignore_eos and not binds
        self.stop_ids, self.end_ids = _end_tokens(params, limits, ignores_eos=ignores)
        """Tokens that end it and are named when they do, which an end token is not; all that end
        it."""
        self.guide: Guide | None = None
        """Says what may come next; None where anything may."""
        if grammar is not None:
            self.guide = Guide(
                grammar,
                min_tokens=params.min_tokens,
                end_ids=self.end_ids,
                ignore_eos=params.ignore_eos,
                thinking_budget=params.thinking_token_budget,
            )
        # The masks of a form see to min_tokens themselves.
        self.sampling = _row_sampling(
            params, seed, self.end_ids,
            min_tokens=0 if binds else params.min_tokens, masked=grammar is not None,
        )  # fmt: skip
        self.num_scored = NEVER if params.prompt_logprobs is None else 0
        """Prompt positions whose log-probabilities went up; NEVER when nobody asked."""

        self.num_preemptions = 0
        self.arrived_at = arrived_at
        self.started_at = -1.0
        self.first_token_at = -1.0
        self._begin_without_row()

    def _begin_without_row(self) -> None:
        self.row = -1
        self.blocks: list[int] = []
        self.reach = 0
        """One more than its highest block; kept only where decodes read a slice of the cache."""
        self.computed = 0
        self.written = 0
        self.decode_from = self.known
        """Tokens that were known when it got its row: it decodes once so many are computed."""
        self.pause_at = 0
        """Where `computed` stops a decoding row: its blocks are full, or its last token planned."""
        self.file_at = NEVER
        """Tokens written at which its next block is full and gets its hash."""
        self.promised: list[bytes] = []
        """Hashes of the blocks it is computing, for others to wait for."""
        self.last_step = -1
        """The last plan that names it."""

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of prompt tokens are still owed."""
        return self.num_scored < self.num_prompt - 1

    def follow(self, token: int) -> str | None:
        """Lead its grammar on behind `token`; why it cannot go on, if so."""
        assert self.guide is not None
        error = self.guide.advance(token)
        if error is not None:
            return f"the grammar cannot be followed: {error}"
        if self.is_cornered:
            return f"{CORNERED} as output token {len(self.outputs) + 1}"
        return None

    @property
    def is_cornered(self) -> bool:
        """Whether bad words, min_tokens and its grammar bar all tokens that are allowed next."""
        sampling, outputs = self.sampling, tuple(self.outputs)
        listed = sampling.allowed_token_ids
        if listed is None and not (sampling.bad_words and self.guide):
            return False
        allowed = set() if listed is None else set(listed)
        if self.guide is not None:
            guided = self.guide.allowed()
            allowed = guided if listed is None else guided & allowed
        barred = {
            word[-1]
            for word in sampling.bad_words
            if len(word) <= len(outputs) + 1
            and outputs[len(outputs) + 1 - len(word) :] == word[:-1]
        }
        if len(outputs) < sampling.min_tokens:
            barred.update(sampling.end_token_ids)
        return barred.issuperset(allowed)

    def request_sampling(self) -> RequestSampling:
        """What a new row is told; log-probabilities of the prompt go up only once."""
        sampling = self.sampling
        if sampling.num_prompt_logprobs >= 0 and not self.wants_scores:
            return _without_prompt_logprobs(sampling)
        return sampling

    def known_tokens(self) -> memoryview:
        """All known tokens, uint32 little-endian; a copy once there is output."""
        if not self.outputs:
            return self.prompt
        return memoryview(bytes(self.prompt) + self.outputs.tobytes())

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Known tokens `start` to `stop`, raw."""
        from_prompt = bytes(self.prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES])
        if stop <= self.num_prompt:
            return from_prompt
        first = max(start - self.num_prompt, 0)
        return from_prompt + self.outputs[first : stop - self.num_prompt].tobytes()


def _end_tokens(
    params: SamplingParams, limits: ModelLimits, *, ignores_eos: bool
) -> tuple[frozenset[int], frozenset[int]]:
    """(tokens asked to stop at that are no end tokens, all that end the request)."""
    eos_ids: frozenset[int] = frozenset() if ignores_eos else limits.eos_ids
    stop_ids = frozenset(t for t in params.stop_token_ids if 0 <= t < limits.vocab_size)
    return stop_ids - eos_ids, stop_ids | eos_ids


def _row_sampling(
    params: SamplingParams,
    seed: int,
    end_ids: frozenset[int],
    *,
    min_tokens: int,
    masked: bool,
) -> RequestSampling:
    return RequestSampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=min(max(params.repetition_penalty, LEAST_PENALTY), 1 / LEAST_PENALTY),
        min_tokens=min_tokens,
        end_token_ids=tuple(sorted(end_ids)) if min_tokens else (),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words_token_ids,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        masked=masked,
    )


def _without_prompt_logprobs(sampling: RequestSampling) -> RequestSampling:
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return RequestSampling(**{**fields, "num_prompt_logprobs": -1})
