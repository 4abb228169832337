"""A small OpenAI-like event server on asyncio, to check a load client against known numbers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
NO_MODEL = "The model does not exist; this server has " + "double, " * 16 + "and no other"
"""Error of a server without the model, longer than an error that is cut at 120 characters."""


class EventServer:
    """Answers each completion with `max_tokens` events of text, the first after `first_s` and the
    others `gap_s` apart, and an event with the usage.

    Counts what it received; with `fail_every`, each n-th completion gets a 503.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.0,
        gap_s: float = 0.0,
        fail_every: int = 0,
        break_after: int | None = None,
        says_done: bool = True,
        has_tokenize: bool = True,
        tokens_a_word: int = 1,
        has_model: bool = True,
    ) -> None:
        self._first_s = first_s
        self._gap_s = gap_s
        self._fail_every = fail_every
        self._break_after = break_after
        self._says_done = says_done
        self._has_tokenize = has_tokenize
        self._tokens_a_word = tokens_a_word
        self._has_model = has_model
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.num_connections = 0
        self.running = 0
        self.most_running = 0
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["EventServer"]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        fields = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(fields.get("content-length", "0")))
        self.authorizations.append(fields.get("authorization", ""))
        path = first.split(" ")[1]
        if path == "/v1/models":
            _answer(writer, 200, {"data": [{"id": "double"}]})
        elif path in ("/tokenize", *COMPLETIONS)[not self._has_tokenize :] and not self._has_model:
            _answer(writer, 404, {"error": {"message": NO_MODEL, "param": "model"}})
        elif path == "/tokenize" and self._has_tokenize:
            asked = json.loads(raw)
            text = asked.get("prompt") or asked["messages"][0]["content"]
            template = 5 if "messages" in asked else 0
            count = len(text.split()) * self._tokens_a_word + template
            _answer(writer, 200, {"count": count, "tokens": list(range(count))})
        elif path in COMPLETIONS:
            return await self._generate(writer, json.loads(raw), is_chat="chat" in path)
        else:
            _answer(writer, 404, {"error": {"message": "no such route"}})
        return True

    async def _generate(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool
    ) -> bool:
        self.bodies.append(body)
        if self._fail_every and len(self.bodies) % self._fail_every == 0:
            _answer(writer, 503, {"error": {"message": "the line is full"}})
            return True
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(writer, body, is_chat=is_chat)
        finally:
            self.running -= 1

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool
    ) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        if is_chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(body["max_tokens"]):
            await asyncio.sleep(self._gap_s if place else self._first_s)
            if place == self._break_after:
                return False
            text = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            _event(writer, {"choices": [text]})
            await writer.drain()
        prompt = body.get("prompt") or body["messages"][0]["content"]
        num_prompt = len(prompt.split() if isinstance(prompt, str) else prompt)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        _event(writer, {"choices": [], "usage": usage})
        if self._says_done:
            _chunk(writer, b"data: [DONE]\n\n")
        else:
            _event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
    )


def _event(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(body).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    # Split in the middle, so that a reader must join events across chunks.
    for piece in (content[:7], content[7:]):
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
