"""Items to the messages of a chat. Pure; knows no template and no store."""

from collections.abc import Sequence
from typing import Any

from server.openai.responses.items import Item

Message = dict[str, Any]

_LEADING = ("system", "developer")


def messages_of(items: Sequence[Item], instructions: str | None = None) -> list[Message]:
    """The messages that `items`, checked ones, are. What the model made in one turn (thinking,
    text, calls) is one message again; `instructions` and the system messages that follow on them
    are one too, since many templates take one alone."""
    made = _MessageBuilder()
    for item in items:
        made.take(item)
    messages = made.messages
    if instructions is None:
        return messages
    texts = [instructions]
    while messages and messages[0]["role"] in _LEADING:
        texts.append(_joined(messages.pop(0)["content"]))
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages]


class _MessageBuilder:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        """The model's latest turn, while it may go on."""
        self._names: dict[str, str] = {}
        """Of the functions, by the ids of their calls."""

    def take(self, item: Item) -> None:
        kind = item["type"]
        if kind == "reasoning":
            self._think(item)
        elif kind == "function_call":
            self._call(item)
        elif kind == "function_call_output":
            self._turn = None
            self._answer(item)
        elif item["role"] == "assistant":
            self._speak(item)
        else:
            self._turn = None
            self.messages.append({"role": item["role"], "content": _content(item["content"])})

    def _think(self, item: Item) -> None:
        text = _joined(item["content"] or item["summary"])
        if not text:
            return
        if self._turn is None or self._turn["content"] or "tool_calls" in self._turn:
            self._begin()
        assert self._turn is not None
        self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + text

    def _speak(self, item: Item) -> None:
        if self._turn is None:
            self._begin()
        assert self._turn is not None
        if self._turn.get("tool_calls"):
            # What it said behind a call belongs to the turn: the results must follow on the calls.
            self._turn["content"] = _joined(self._turn["content"]) + _joined(item["content"])
            return
        if self._turn["content"]:
            self._begin()
        self._turn["content"] = _content(item["content"])

    def _call(self, item: Item) -> None:
        if item["status"] == "incomplete":
            # Cut by its length: its arguments are no JSON, and it was never made.
            return
        if self._turn is None:
            self._begin()
        assert self._turn is not None
        self._names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._turn.setdefault("tool_calls", []).append(call)

    def _answer(self, item: Item) -> None:
        message = {
            "role": "tool",
            "tool_call_id": item["call_id"],
            "content": _joined(item["output"]),
        }
        if (name := self._names.get(item["call_id"])) is not None:
            message["name"] = name
        self.messages.append(message)

    def _begin(self) -> None:
        self._turn = {"role": "assistant", "content": ""}
        self.messages.append(self._turn)


def _content(parts: list[Item]) -> str | list[Item]:
    """One text as it is; several as parts, which some templates tell apart."""
    return parts if len(parts) > 1 else _joined(parts)


def _joined(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)
