"""The OpenAI side of the load client: which model, how many tokens, one streamed request.

Knows bodies and chunks, nothing of concurrency or of statistics.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.cli.bench.target import EndedEarly, HttpFailure, Target
from server.cli.bench.workload import WORDS, Job

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Outcome:
    """One request, as the client saw it. Times are seconds on the client's monotonic clock."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text came."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_finished: bool = False
    """A finish_reason came."""
    failure: str | None = None


class OpenAIServer:
    """One model on a server, asked through one of its two endpoints."""

    def __init__(
        self,
        target: Target,
        endpoint: str,
        model: str,
        extra: Mapping[str, Any] | None = None,
        *,
        asks_usage: bool = True,
    ) -> None:
        self._target = target
        self._endpoint = endpoint
        self.model = model
        self._extra = dict(extra or {})
        self._asks_usage = asks_usage

    async def ask(self, job: Job, timeout_s: float) -> Outcome:
        """Send one request and read its stream to the end; a failure is part of the outcome."""
        outcome = Outcome(time.perf_counter())
        try:
            await asyncio.wait_for(self._read(job, outcome), timeout_s)
        except asyncio.TimeoutError:  # not the builtin before Python 3.11
            outcome.failure = f"no end after {timeout_s:g} s"
        except (OSError, EOFError, HttpFailure, msgspec.DecodeError) as error:
            outcome.failure = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()
        if outcome.failure is None and not outcome.arrivals:
            outcome.failure = "the stream held no text"
        return outcome

    async def _read(self, job: Job, outcome: Outcome) -> None:
        try:
            await self._read_events(job, outcome)
        except EndedEarly:
            # Some servers never say [DONE]: a choice that told how it finished is whole.
            if not outcome.is_finished:
                raise
        # A server that reports no usage: a piece is as good as a token.
        outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)

    async def _read_events(self, job: Job, outcome: Outcome) -> None:
        async for data in self._target.events(PATHS[self._endpoint], self._body(job)):
            now = time.perf_counter()
            chunk = _DECODER.decode(data)
            if chunk.error:
                raise HttpFailure(str(chunk.error)[:300])
            if any(_has_text(choice) for choice in chunk.choices):
                outcome.arrivals.append(now)
            if chunk.usage is not None:
                outcome.prompt_tokens = chunk.usage.prompt_tokens
                outcome.output_tokens = chunk.usage.completion_tokens
            if any(choice.finish_reason for choice in chunk.choices):
                outcome.is_finished = True

    def _body(self, job: Job) -> dict[str, Any]:
        body = {
            "model": self.model,
            "stream": True,
            "max_tokens": job.output_len,
            **self._extra,
        }
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        if self._endpoint == "chat":
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        return body

    async def count(self, text: str) -> int:
        """Tokens of a prompt of this text, template included. Raises HttpFailure."""
        return len(await self._tokens(text, is_chat=self._endpoint == "chat"))

    async def vocabulary(self) -> list[int]:
        """Ids of ordinary words. Raises HttpFailure if the server has no /tokenize like vLLM's."""
        return sorted(set(await self._tokens(" ".join(WORDS), is_chat=False)))

    async def _tokens(self, text: str, *, is_chat: bool) -> list[int]:
        asked: dict[str, Any] = {"model": self.model, "prompt": text, "add_special_tokens": False}
        if is_chat:
            asked = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        answer = await self._target.call("POST", "/tokenize", asked)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise HttpFailure("/tokenize gave no tokens")
        return tokens


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning)


async def first_model(target: Target) -> str:
    """The first entry of /v1/models. Raises HttpFailure."""
    answer = await target.call("GET", "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise HttpFailure("/v1/models lists no model; name one with --model") from None
