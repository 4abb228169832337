"""The end of an LLM, whenever and wherever it comes. Knows nothing of what was asked."""

import asyncio
import contextlib
import threading

from engine.client.zmq import EngineClient
from server.offline.event_loop import STOP_TIMEOUT_S, Background
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

CLOSE_POLL_S = 0.02


def shut_down(
    background: Background,
    client: EngineClient,
    template: ChatTemplate,
    tokenizer: Tokenizer | None,
) -> None:
    """Everything that `LLM` started; holds no reference to it."""
    if background.is_mine:
        # The collector may run on any thread; this one cannot wait for itself.
        threading.Thread(target=shut_down, args=(background, client, template, tokenizer)).start()
        return
    try:
        background.run(_close(client))
    finally:
        background.close()
        template.close()
        if tokenizer is not None:
            tokenizer.close()


async def _close(client: EngineClient) -> None:
    """Close, also while the interpreter ends: then no executor takes work any more, and what waits
    for the engine's thread through one raises RuntimeError until that thread has gone."""
    for _ in range(int(STOP_TIMEOUT_S / CLOSE_POLL_S)):
        with contextlib.suppress(RuntimeError):
            return await client.close()
        await asyncio.sleep(CLOSE_POLL_S)
