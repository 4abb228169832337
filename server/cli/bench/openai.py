"""OpenAI API calls of the load generator: streamed requests, models, token counts."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from config.json_text import Json
from server.cli.bench.workload import WORDS, BenchRequest
from server.cli.http_client import MODELS_PATH, HttpClient, HttpFailure, MissingDone, MissingModel

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
    """Outcome of a request. Times are seconds of the client's monotonic clock."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Time of each chunk with text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_finished: bool = False
    """A finish_reason was received."""
    failure: str | None = None


class OpenAIServer:
    """Client of a model on a server, for its completions or chat endpoint."""

    def __init__(
        self,
        client: HttpClient,
        endpoint: str,
        model: str,
        extra: Mapping[str, Any] | None = None,
        *,
        request_usage: bool = True,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self.model = model
        self._extra = dict(extra or {})
        self._request_usage = request_usage

    async def send(self, request: BenchRequest, timeout_s: float) -> Outcome:
        """Send a request and read its stream to the end; failures are recorded in the outcome.
        Raises MissingModel, which every request would get."""
        outcome = Outcome(time.perf_counter())
        try:
            await asyncio.wait_for(self._read(request, outcome), timeout_s)
        except asyncio.TimeoutError:  # not the built-in TimeoutError before Python 3.11
            outcome.failure = f"the response did not end within {timeout_s:g} s"
        except MissingModel:
            raise
        except (EOFError, HttpFailure, msgspec.DecodeError) as error:
            outcome.failure = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()
        if outcome.failure is None and not outcome.arrivals:
            outcome.failure = "the stream had no text"
        return outcome

    async def _read(self, request: BenchRequest, outcome: Outcome) -> None:
        try:
            await self._read_events(request, outcome)
        except MissingDone:
            # Some servers do not send [DONE]; a finish_reason also ends the stream.
            if not outcome.is_finished:
                raise
        # Without usage, each chunk with text counts as a token.
        outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)

    async def _read_events(self, request: BenchRequest, outcome: Outcome) -> None:
        async for data in self._client.events(PATHS[self._endpoint], self._body(request)):
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

    def _body(self, request: BenchRequest) -> Json:
        body = {
            "model": self.model,
            "stream": True,
            "max_tokens": request.output_len,
            **self._extra,
        }
        if self._request_usage:
            body["stream_options"] = {"include_usage": True}
        if self._endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return body

    async def count_prompt(self, text: str) -> int:
        """Number of tokens of a prompt with this text: with the chat template for the chat
        endpoint, otherwise without special tokens. Raises HttpFailure."""
        return len(await self._tokens(text, is_chat=self._endpoint == "chat"))

    async def count(self, text: str) -> int:
        """Number of tokens of a text without the chat template. Raises HttpFailure."""
        return len(await self._tokens(text, is_chat=False))

    async def vocabulary(self) -> list[int]:
        """Token ids of common words. Raises HttpFailure, for example if the server lacks
        vLLM's /tokenize."""
        return sorted(set(await self._tokens(" ".join(WORDS), is_chat=False)))

    async def _tokens(self, text: str, *, is_chat: bool) -> list[int]:
        body: Json = {"model": self.model, "prompt": text, "add_special_tokens": False}
        if is_chat:
            body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        response = await self._client.call("POST", "/tokenize", body)
        tokens = response.get("tokens") if isinstance(response, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise HttpFailure("/tokenize returned no tokens")
        return tokens


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning)


async def first_model(client: HttpClient) -> str:
    """Id of the first model of /v1/models. Raises HttpFailure."""
    response = await client.call("GET", MODELS_PATH)
    try:
        return str(response["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise HttpFailure("/v1/models lists no model") from None
