"""Truncation `auto`: drops the oldest messages so that the prompt fits the context."""

from starlette.requests import Request

from config.error_frames import release_frames
from config.errors import UserError
from server.openai.chat_request import count_prompt_tokens
from server.openai.responses.messages import LEADING
from server.openai.schema.chat import ChatBody
from server.serving.state import AppState
from server.text.template_renderer import TextTooLong


async def shortened(state: AppState, request: Request, chat: ChatBody) -> ChatBody:
    """`chat`, which exceeds the context, without its oldest messages up to a user message: as few
    as necessary are dropped. Leading system and developer messages are kept, and so is the last
    user message, even if the prompt is still too long. Renders the chat and counts its tokens about
    log2(user messages) times."""
    messages = chat.messages
    head = next((i for i, entry in enumerate(messages) if entry["role"] not in LEADING), 0)
    starts = [i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user"]

    def without(start: int) -> ChatBody:
        return chat.model_copy(update={"messages": [*messages[:head], *messages[start:]]})

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(state, request, without(starts[middle])):
            high = middle
        else:
            low = middle + 1
    return without(starts[low]) if starts else chat


def is_too_long(error: UserError) -> bool:
    """Whether a prompt was rejected because it has too many tokens or characters."""
    return error.code == "context_length_exceeded" or isinstance(error, TextTooLong)


async def _fits(state: AppState, request: Request, chat: ChatBody) -> bool:
    try:
        count = await count_prompt_tokens(state, request, chat)
    except UserError as error:
        if not is_too_long(error):
            raise
        # Traceback frames would keep all messages in memory.
        release_frames(error)
        return False
    return count + (chat.limit or 1) <= state.max_model_len
