"""The forms in which callers of LLM give prompts and conversations."""

from collections.abc import Mapping, Sequence
from typing import Any

from config.errors import UserError
from server.text.messages import Message

PromptInput = str | Mapping[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids}, or the ids alone."""


def as_prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # type: ignore[list-item] # a list of ids
    return list(prompts)  # type: ignore[arg-type] # not ids: handled above


def parse_prompt(prompt: PromptInput) -> tuple[str | None, list[int] | None, str]:
    """(text, ids, cache salt), with at least one of text and ids. Raises UserError."""
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


def as_conversation_list(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several, as a list."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item] # one conversation
    return list(messages)  # type: ignore[arg-type] # several
