"""Memory of closed connections is freed without the garbage collector."""

import asyncio
import gc
import socket
import struct

import pytest
from http_rig import on_port
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.http.protocol import HttpProtocol

NUM_CONNECTIONS = 5
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
BODY = b'{"prompt":[65],"max_tokens":1}'
COMPLETION = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which a close resets the connection."""


def num_remaining() -> int:
    kinds = (HttpProtocol, RequestResponseCycle)
    return sum(isinstance(found, kinds) for found in gc.get_objects())


@pytest.mark.parametrize("sent", [b"", HEALTH, COMPLETION, UNFINISHED], ids=range(4))
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_a_closed_connection_is_freed_without_the_garbage_collector(
    sent: bytes, is_reset: bool
) -> None:
    async with on_port() as rig:
        gc.collect()
        before = num_remaining()
        gc.disable()
        try:
            for _ in range(NUM_CONNECTIONS):
                reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
                writer.write(sent)
                if sent in (HEALTH, COMPLETION):
                    await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(0.01)
                if is_reset:
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.close()
            for _ in range(1000):
                if num_remaining() <= before:
                    break
                await asyncio.sleep(0.02)
            remaining = num_remaining() - before
        finally:
            gc.enable()

    assert remaining <= 0
