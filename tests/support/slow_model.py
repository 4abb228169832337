"""A slow, simple reference: the expected output of each request, and a ledger of delivered
messages."""

from array import array
from dataclasses import dataclass, field

from fake_executor import NextToken, fingerprint
from schemas import next_tokens

from config.params.sampling import SamplingParams
from engine.structured_output.grammar import Grammar, Guide
from engine.transport.messages import Finish, StepOutput
from hpu.protocol import RequestSampling, WorkerReady


def raw(tokens: list[int]) -> memoryview:
    """A prompt in the form in which it is sent."""
    return memoryview(array("I", tokens).tobytes())


def hashed_token(vocab_size: int, *, bad_every: int = 0) -> NextToken:
    """Tokens that depend on the history and the seed; one of `bad_every` tokens is invalid."""

    def next_token(history: int, generated: int, sampling: RequestSampling) -> int:
        seed = 0 if sampling.temperature == 0 else sampling.seed
        value = fingerprint(history, seed % 1_000_003) >> 7
        if bad_every and value % bad_every == 0:
            return -1
        token = value % vocab_size
        while generated < sampling.min_tokens and token in sampling.end_token_ids:
            token = (token + 1) % vocab_size
        return token

    return next_token


def expected_output(
    prompt: list[int],
    params: SamplingParams,
    ready: WorkerReady,
    next_token: NextToken,
    grammar: Grammar | None = None,
) -> tuple[list[int], str, int | None]:
    """Tokens, finish reason and stop token of a request that runs alone, with one token per
    step."""
    if grammar is not None:
        return _guided_output(prompt, params, ready, next_token, grammar)
    history = 7
    for token in prompt:
        history = fingerprint(history, token)
    eos = () if params.ignore_eos else ready.eos_token_ids
    sampling = RequestSampling(
        temperature=params.temperature,
        seed=params.seed or 0,
        min_tokens=params.min_tokens,
        end_token_ids=(*eos, *params.stop_token_ids),
    )
    room = ready.max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    output: list[int] = []
    while len(output) < limit:
        token = next_token(history, len(output), sampling)
        if token < 0:
            return output, "error", None
        output.append(token)
        history = fingerprint(history, token)
        if len(output) > params.min_tokens:
            if token in eos:
                return output, "stop", None
            if token in params.stop_token_ids:
                return output, "stop", token
    return output, "length", None


def _guided_output(
    prompt: list[int],
    params: SamplingParams,
    ready: WorkerReady,
    next_token: NextToken,
    grammar: Grammar,
) -> tuple[list[int], str, int | None]:
    """The output of FakeExecutor with a grammar: each token is chosen among the allowed tokens by
    the number of the unrestricted token."""
    ends = frozenset((*ready.eos_token_ids, *params.stop_token_ids))
    guide = Guide(grammar, min_tokens=params.min_tokens, end_ids=ends, ignore_eos=params.ignore_eos)
    history = 7
    for token in prompt:
        history = fingerprint(history, token)
    sampling = RequestSampling(temperature=params.temperature, seed=params.seed or 0)
    room = ready.max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    output: list[int] = []
    while len(output) < limit:
        free = next_token(history, len(output), sampling)
        allowed = sorted(next_tokens(guide))
        output.append(allowed[free % len(allowed)])
        history = fingerprint(history, output[-1])
        if output[-1] in ends:
            return output, "stop", None if output[-1] in ready.eos_token_ids else output[-1]
        guide.advance(output[-1])
    return output, "length", None


@dataclass
class Delivered:
    """Everything that was delivered for a key."""

    tokens: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    """Prompt tokens whose log-probabilities were delivered."""
    logprob_ids: list[int] = field(default_factory=list)
    num_started: int = 0
    num_cached: int = 0
    is_aborted: bool = False
    finish: Finish | None = None


class Ledger:
    """Receives messages like a front end, and fails on late, duplicate or unknown messages."""

    def __init__(self) -> None:
        self.requests: dict[int, Delivered] = {}

    def open(self, key: int) -> None:
        assert key not in self.requests, f"key {key} is used twice"
        self.requests[key] = Delivered()

    def abort(self, key: int) -> None:
        self.requests[key].is_aborted = True

    def is_over(self, key: int) -> bool:
        request = self.requests[key]
        return request.is_aborted or request.finish is not None

    def _live(self, key: int) -> Delivered:
        request = self.requests[key]
        assert not request.is_aborted, f"key {key} was aborted, and something came"
        assert request.finish is None, f"key {key} was finished, and something came"
        return request

    def take(self, messages: list[tuple[int, StepOutput]]) -> None:
        front_ends = [front_end for front_end, _ in messages]
        assert len(set(front_ends)) == len(front_ends), f"two messages for one of {front_ends}"
        for front_end, message in messages:
            self._take_one(front_end, message)

    def _take_one(self, front_end: int, message: StepOutput) -> None:
        for key, cached in zip(message.started, message.started_cached, strict=True):
            request = self._live(key)
            request.num_started += 1
            request.num_cached = cached
            assert request.num_started == 1, f"key {key} started twice"
        for key, scores in message.prompt_logprobs:
            request = self._live(key)
            assert not request.tokens, f"scores of key {key}'s prompt behind its first token"
            request.scored.extend(memoryview(scores.ids).cast("i")[:: scores.k + 1])
        for key, scores in message.logprobs:
            ids = memoryview(scores.ids).cast("i")
            self._live(key).logprob_ids.append(ids[0])
        place = 0
        for key, count in zip(message.keys, message.counts or [1] * len(message.keys), strict=True):
            assert key >> 48 == front_end, f"key {key:#x} went to front end {front_end}"
            request = self._live(key)
            assert request.num_started == 1, f"key {key} has tokens before it started"
            request.tokens.extend(message.tokens[place : place + count])
            place += count
        assert place == len(message.tokens), f"{len(message.tokens)} tokens for {place} counted"
        for finish in message.finished:
            self._live(finish.key).finish = finish


class SlowPool:
    """A block pool with a list and without an index: the reference for BlockPool."""

    def __init__(self, size: int) -> None:
        self.ref_counts = [0] * size
        self.names: list[bytes | None] = [None] * size
        self._given_back = list(range(size))
        """Free blocks in order of release."""

    @property
    def free(self) -> int:
        return self.ref_counts.count(0)

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            plain = [block for block in self._given_back if self.names[block] is None]
            block = (plain or self._given_back)[0]
            self._given_back.remove(block)
            self.names[block] = None
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def hold(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            self._given_back.remove(block)
        self.ref_counts[block] += 1

    def give_back(self, table: list[int]) -> None:
        for block in table[::-1]:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._given_back.append(block)

    def file(self, block: int, name: bytes) -> bool:
        if name in self.names:
            return False
        self.names[block] = name
        return True

    def find(self, name: bytes) -> int | None:
        return self.names.index(name) if name in self.names else None

    def forget(self) -> None:
        """Drop all cached contents. Allocation order: blocks that had no contents first, each kind
        in order of release."""
        plain = [block for block in self._given_back if self.names[block] is None]
        filed = [block for block in self._given_back if self.names[block] is not None]
        self._given_back = plain + filed
        self.names = [None] * len(self.names)
