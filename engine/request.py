"""Request: a sequence to generate or a text to pool, and its progress."""

import sys
from array import array
from copy import copy
from dataclasses import dataclass

import msgspec
import numpy as np

from config.params.sampling import SamplingParams
from config.params.token_ids import (
    MAX_UNPACKED,
    TokenIds,
    TokenSet,
    packed,
    token_array,
)
from engine.structured_output.grammar import Grammar, Guide
from engine.structured_output.token_bitmask import Bitmask, bitmask_of
from engine.transport.messages import FRONT_END_SHIFT, AddRequest, Resumption
from hpu.protocol import NO_SLOT, TOKEN_BYTES, TOKENS_PER_WORD, RequestSampling

WAITING, RUNNING, PREEMPTED, FINISHED, MATCHING = range(5)
"""PREEMPTED: a plan with the request is still in flight; WAITING afterwards. FINISHED: also
aborted or failed. MATCHING: not scheduled until its grammar has matched all its output; WAITING
afterwards."""

NEVER = sys.maxsize
MIN_PENALTY = 1e-30
"""Lower bound of the repetition penalty; its inverse is the upper bound. Beyond them a float32
logit becomes infinite or zero."""

EndTokens = frozenset[int] | TokenSet

NO_ALLOWED_TOKEN = (
    "the grammar allows only tokens that allowed_token_ids, bad_words or min_tokens exclude"
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model, which apply to every request."""

    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    prompt_vocab_size: int = 0
    """Number of token ids valid in a prompt; 0: `vocab_size`."""


class Request:
    """A sequence to generate, or a text to pool. The counters are plain attributes, because the
    hot loops over all requests read and write them.

    `num_tokens` counts the request's tokens (prompt and accepted output). `num_computed_tokens`
    counts the tokens whose KV is written once every submitted plan has run; with a step in flight
    it can exceed `num_tokens`, because the newest tokens exist only on the device.
    `num_cached_tokens`, during prefill, is the part of `num_computed_tokens` whose results were
    collected.
    """

    __slots__ = (
        "adapter",
        "allowed_bitmask",
        "arrived_at",
        "block_hashes",
        "blocks",
        "cache_salt",
        "charged_until",
        "decode_limit",
        "drafts",
        "encoded_images",
        "end_ids",
        "expected_output",
        "first_token_at",
        "front_end",
        "group",
        "guide",
        "images",
        "is_continuation",
        "is_suspect",
        "key",
        "last_step",
        "lora_slot",
        "max_block_end",
        "max_num_tokens",
        "min_num_tokens",
        "name",
        "next_cache_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prefix_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "pending_hashes",
        "pooling",
        "priority_key",
        "prompt",
        "req_index",
        "sampling",
        "started_at",
        "state",
        "stop_ids",
        "tenant",
    )

    def __init__(
        self,
        message: AddRequest,
        block_hashes: list[bytes],
        *,
        seed: int,
        priority_key: tuple[int, int],
        limits: ModelLimits,
        arrived_at: float,
        grammar: Grammar | None = None,
    ) -> None:
        params = message.sampling
        self.key = message.key
        self.front_end = message.key >> FRONT_END_SHIFT
        self.group = message.group or message.key
        """Group key that all texts of a pooling request share; the own key otherwise."""
        self.prompt = message.prompt.cast("B")
        self.num_prompt_tokens = len(self.prompt) // TOKEN_BYTES
        self.output_token_ids = array("I")
        self.name = message.name or f"key {message.key}"
        self.pooling = message.pooling
        """Set for a pooling request only."""
        self.images = message.images
        self.encoded_images = {image.content: image for image in message.encoded_images}
        """Images to encode, by content hash."""
        self.cache_salt = message.cache_salt
        self.adapter = message.adapter
        """Hash of the LoRA adapter's files; empty without an adapter."""
        self.lora_slot = NO_SLOT
        """Device slot of the adapter; set when the request starts."""
        self.block_hashes = block_hashes
        self.is_continuation = message.is_continuation
        self.priority_key = priority_key
        """(priority, arrival): the smallest key runs first, the largest is preempted first."""
        self.state = WAITING
        self.tenant = message.tenant
        self.charged_until = -1
        """Value of `num_tokens` up to which the tenant was charged when the request started; -1
        before the start. Like `expected_output`, used with fair shares only."""
        self.expected_output = 0

        room = limits.max_model_len - self.num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.num_tokens = self.num_prompt_tokens
        self.max_num_tokens = self.num_prompt_tokens + max_tokens
        is_constrained = grammar is not None and grammar.is_constrained
        self.min_num_tokens = self.num_prompt_tokens + (0 if is_constrained else params.min_tokens)
        """Total tokens below which end tokens are ignored. A constrained grammar adds no minimum:
        its masks enforce min_tokens where the grammar leaves a choice."""
        self.stop_ids, self.end_ids = _end_tokens(
            params, limits, ignores_eos=params.ignore_eos and not is_constrained
        )
        """Stop tokens that `Finish.stop_token` reports, and all end tokens."""
        self.guide: Guide | None = None
        """Position in the grammar; None without a grammar."""
        self.drafts: list[int] = []
        """Latest drafts that the worker reported, which the next decode may verify. The worker
        reports drafts only with a grammar or pipeline stages."""
        if grammar is not None:
            self.guide = Guide(
                grammar,
                min_tokens=params.min_tokens,
                end_ids=self.end_ids,
                ignore_eos=params.ignore_eos,
                thinking_budget=params.thinking_token_budget,
            )
        self.sampling = _request_sampling(
            params,
            seed,
            self.end_ids,
            min_tokens=0 if is_constrained else params.min_tokens,
            masked=grammar is not None,
        )
        self.allowed_bitmask: Bitmask | None = None
        """allowed_token_ids as a bitmask, intersected with the grammar's mask at each token. None
        without a grammar or without allowed_token_ids."""
        if grammar is not None and params.allowed_token_ids is not None:
            self.allowed_bitmask = bitmask_of(
                token_array(params.allowed_token_ids), limits.vocab_size
            )
        self.num_prompt_logprobs = NEVER if params.prompt_logprobs is None else 0
        """Prompt positions whose log-probabilities were sent; NEVER when none were requested."""
        self.is_suspect = False
        """See Resumption.is_suspect."""
        if message.resumption is not None:
            self._resume(message.resumption)

        self.num_preemptions = 0
        self.arrived_at = arrived_at
        self.started_at = -1.0
        self.first_token_at = -1.0
        self.req_index = -1
        self.blocks: list[int] = []
        self.max_block_end = 0
        """Highest block + 1; maintained only where decodes read a slice of the cache."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_prefill_tokens = self.num_tokens
        """Value of `num_tokens` when the request was last admitted: it decodes once all of these
        tokens are computed."""
        self.num_prefix_tokens = 0
        """Tokens found in the prefix cache when the request was last admitted."""
        self.decode_limit = 0
        """Value of `num_computed_tokens` at which a decode needs another block, or its last token
        is scheduled."""
        self.next_cache_at = NEVER
        """Number of tokens with collected KV at which the next block is full and gets its hash."""
        self.pending_hashes: list[bytes] = []
        """Hashes of the blocks that this request computes; other requests may wait for them."""
        self.last_step = -1
        """Step of the last plan that contains the request."""

    def _resume(self, resumption: Resumption) -> None:
        """Adopt the tokens that another engine generated; computation restarts as after a
        preemption."""
        self.is_suspect = resumption.is_suspect
        self.output_token_ids.frombytes(resumption.output)
        self.num_tokens += len(self.output_token_ids)
        if self.num_prompt_logprobs != NEVER:
            self.num_prompt_logprobs = resumption.num_prompt_logprobs
        if self.num_unmatched:
            self.state = MATCHING

    def restarted(self) -> "Request":
        """Waiting copy of this request with its tokens and without computed KV. The caller finishes
        the original."""
        other = copy(self)
        other.state = WAITING
        other.req_index = other.last_step = -1
        other.blocks, other.drafts, other.pending_hashes = [], [], []
        other.num_computed_tokens = other.num_cached_tokens = 0
        other.decode_limit = other.max_block_end = 0
        other.next_cache_at = NEVER
        other.num_preemptions += 1
        return other

    @property
    def has_no_output(self) -> bool:
        """Whether the request has produced no token since it was last admitted."""
        return self.num_tokens == self.num_prefill_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_guided(self) -> bool:
        """Whether the output is matched against a grammar."""
        return self.guide is not None

    @property
    def needs_no_step(self) -> bool:
        """Whether the request asks for neither tokens, vectors nor prompt log-probabilities."""
        has_no_tokens = self.max_num_tokens == self.num_prompt_tokens
        return has_no_tokens and self.pooling is None and self.sampling.num_prompt_logprobs < 0

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities remain to be sent."""
        return self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def num_unmatched(self) -> int:
        """Output tokens that the grammar has not matched yet; 0 without a grammar."""
        return len(self.output_token_ids) - self.guide.num_tokens if self.guide else 0

    def advance_grammar(self) -> str | None:
        """Advance the grammar by the first unmatched token. Returns an error message if the grammar
        cannot continue."""
        assert self.guide is not None
        error = self.guide.advance(self.output_token_ids[self.guide.num_tokens])
        if error is not None:
            return f"the grammar cannot be enforced: {error}"
        if not self.num_unmatched and self.has_no_allowed_token:
            return f"{NO_ALLOWED_TOKEN} as output token {len(self.output_token_ids) + 1}"
        return None

    def match_output(self) -> str | None:
        """Advance the grammar by all unmatched tokens; returns the error of `advance_grammar`."""
        error = None
        while self.num_unmatched and not error:
            error = self.advance_grammar()
        return error

    @property
    def has_no_allowed_token(self) -> bool:
        """Whether bad_words, min_tokens and the grammar together exclude every allowed token. False
        without allowed_token_ids, unless bad_words and a grammar are set."""
        sampling, outputs = self.sampling, self.output_token_ids
        listed = sampling.allowed_token_ids
        if listed is None and not (sampling.bad_words and self.guide):
            return False
        # Only the end: the output may have 100,000 tokens, and this runs for each token.
        longest = max((len(word) for word in sampling.bad_words), default=0)
        end = tuple(outputs[max(0, len(outputs) + 1 - longest) :])
        banned = {
            word[-1]
            for word in sampling.bad_words
            if len(word) <= len(end) + 1 and end[len(end) + 1 - len(word) :] == word[:-1]
        }
        if len(outputs) < sampling.min_tokens:
            banned.update(self.end_ids)
        if self.guide is None:
            return banned.issuperset(token_array(listed or ()).tolist())
        allowed = self.guide.bitmask
        if self.allowed_bitmask is not None:
            allowed = allowed & self.allowed_bitmask
        return not np.any(allowed & ~bitmask_of(banned, len(allowed) * TOKENS_PER_WORD))

    def request_sampling(self) -> RequestSampling:
        """Sampling parameters for a NewRequest. Prompt log-probabilities are requested only until
        they are sent."""
        if self.sampling.num_prompt_logprobs >= 0 and not self.needs_prompt_logprobs:
            return msgspec.structs.replace(self.sampling, num_prompt_logprobs=-1)
        return self.sampling

    def token_ids(self) -> memoryview:
        """All tokens, uint32 little-endian; a copy if the request has output."""
        if not self.output_token_ids:
            return self.prompt
        return memoryview(bytes(self.prompt) + self.output_token_ids.tobytes())

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop), uint32 little-endian."""
        from_prompt = bytes(self.prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES])
        if stop <= self.num_prompt_tokens:
            return from_prompt
        first = max(start - self.num_prompt_tokens, 0)
        outputs = self.output_token_ids[first : stop - self.num_prompt_tokens]
        return from_prompt + outputs.tobytes()


def _end_tokens(
    params: SamplingParams, limits: ModelLimits, *, ignores_eos: bool
) -> tuple[EndTokens, EndTokens]:
    """(stop tokens that are not EOS tokens, all tokens that end the request). `ignores_eos`: EOS
    tokens are treated like all other tokens."""
    eos_ids: frozenset[int] = frozenset() if ignores_eos else limits.eos_ids
    listed = token_array(params.stop_token_ids)
    listed = listed[(listed >= 0) & (listed < limits.vocab_size)]
    if len(listed) <= MAX_UNPACKED:
        stop_ids = frozenset(listed.tolist())
        return stop_ids - eos_ids, stop_ids | eos_ids
    eos = np.array(sorted(eos_ids), dtype=np.int64)
    others = listed[~np.isin(listed, eos)]
    return (
        TokenSet(others, limits.vocab_size),
        TokenSet(np.concatenate([others, eos]), limits.vocab_size),
    )


def _listed(tokens: EndTokens) -> TokenIds:
    if isinstance(tokens, TokenSet):
        return packed(tokens.array())
    return tuple(sorted(tokens))


def _request_sampling(
    params: SamplingParams,
    seed: int,
    end_ids: EndTokens,
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
        repetition_penalty=min(max(params.repetition_penalty, MIN_PENALTY), 1 / MIN_PENALTY),
        min_tokens=min_tokens,
        end_token_ids=_listed(end_ids) if min_tokens else (),
        logit_bias=tuple((token, params.logit_bias[token]) for token in sorted(params.logit_bias)),
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words_token_ids,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        masked=masked,
    )
