"""Moves system messages for templates that accept a system message only at the start."""

from server.text.messages import Message, joined_contents

SEPARATOR = "\n\n"
_TAKERS = ("user", "tool")
"""Roles of messages that the text of a system message can be merged into."""


def has_late_system(messages: list[Message]) -> bool:
    """Whether a message after the first has the role system."""
    return any(message.get("role") == "system" for message in messages[1:])


def with_leading_system(messages: list[Message], *, merges_all: bool) -> list[Message]:
    """The normalized `messages` without system messages after the first message. With `merges_all`,
    all system messages become the first message. Otherwise only the system messages at the start
    do, and a later system text is merged into an adjacent user message or tool result, or becomes a
    user message, which keeps the order of the texts and the cached prefix."""
    leading: list[Message] = []
    rest: list[Message] = []
    for message in messages:
        is_leading = message.get("role") == "system" and (merges_all or not rest)
        (leading if is_leading else rest).append(message)
    folded = _folded(rest)
    if not leading:
        return folded
    return [{**leading[0], "content": _merged(leading)}, *folded]


def _folded(messages: list[Message]) -> list[Message]:
    folded: list[Message] = []
    waiting: list[Message] = []
    """System messages after an answer. They wait, because a tool result must directly follow its
    call."""
    for message in messages:
        role = message.get("role")
        if role == "system":
            if folded and not waiting and folded[-1].get("role") in _TAKERS:
                folded[-1] = {**folded[-1], "content": _merged([folded[-1], message])}
            else:
                waiting.append(message)
        elif role == "tool":
            folded.append(message)
        else:
            if waiting and role == "user":
                message = {**message, "content": _merged([*waiting, message])}
            elif waiting:
                _end(folded, waiting)
            waiting = []
            folded.append(message)
    if waiting:
        _end(folded, waiting)
    return folded


def _end(folded: list[Message], waiting: list[Message]) -> None:
    if folded and folded[-1].get("role") == "tool":
        folded[-1] = {**folded[-1], "content": _merged([folded[-1], *waiting])}
    else:
        folded.append({"role": "user", "content": _merged(waiting)})


def _merged(messages: list[Message]) -> str | list[dict[str, str]]:
    first, *others = [message["content"] for message in messages]
    return joined_contents(first, *(piece for text in others for piece in (SEPARATOR, text)))
