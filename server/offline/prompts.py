"""What callers of LLM may write for prompts and conversations. Knows no engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from config.errors import UserError
from server.text.messages import Message

PromptInput = str | Mapping[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids}, or the ids alone."""


def listed(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt or several, as several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # type: ignore[list-item] # just seen to be ids
    return list(prompts)  # type: ignore[arg-type] # ids alone were told apart above


def prompt_of(prompt: PromptInput) -> tuple[str | None, list[int] | None, str]:
    """(text, ids, cache salt): at least one of text and ids. Raises UserError."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if not isinstance(prompt, Mapping):
        return None, list(prompt), ""
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if unknown or (text is None and ids is None):
        raise UserError(
            f"a prompt has the keys {sorted(prompt)}, it must have prompt or prompt_token_ids, "
            "and may have cache_salt",
            param="prompt",
        )
    return text, None if ids is None else list(ids), prompt.get("cache_salt") or ""


def conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several, as several."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item] # one conversation, seen by its first message
    return list(messages)  # type: ignore[arg-type] # several
