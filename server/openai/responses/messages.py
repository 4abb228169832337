"""Converts response items to chat messages."""

from collections.abc import Collection, Sequence

from config.json_text import Json
from server.openai.responses.items import Item
from server.openai.responses.tools import flat_name

Message = Json

LEADING = ("system", "developer")
"""Roles of instruction messages at the start."""


def messages_of(items: Sequence[Item], instructions: str | None = None) -> list[Message]:
    """Convert validated `items` to chat messages. Consecutive reasoning, text and calls of the
    model, in this order, become a single message; text after a call is added to its message.
    `instructions` become a system message, merged with the leading system and developer messages up
    to a message with an image, because many templates accept only a single system message."""
    outputs = ("function_call_output", "custom_tool_call_output")
    builder = _MessageBuilder({item["call_id"] for item in items if item["type"] in outputs})
    for item in items:
        builder.add(item)
    messages = builder.finish()
    if instructions is None:
        return messages
    texts = [instructions]
    while messages and messages[0]["role"] in LEADING and not _has_image(messages[0]["content"]):
        texts.append(_joined(messages.pop(0)["content"]))
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages]


class _MessageBuilder:
    def __init__(self, answered: Collection[str]) -> None:
        """`answered`: ids of calls with a result."""
        self._answered = answered
        self.messages: list[Message] = []
        self._assistant: Message = {}
        """Assistant message that following items may extend; empty: none."""
        self._names: dict[str, str] = {}
        """Function names by call id."""
        self._texts: dict[str, list[str]] = {}
        """Text pieces that `_end_assistant` joins into fields of the assistant message: joining at
        each item would take quadratic time."""

    def add(self, item: Item) -> None:
        kind = item["type"]
        if kind == "reasoning":
            self._add_reasoning(item)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._end_assistant()
            self._add_result(item)
        elif item["role"] == "assistant":
            self._add_text(item)
        else:
            self._end_assistant()
            self.messages.append({"role": item["role"], "content": _content(item["content"])})

    def _add_reasoning(self, item: Item) -> None:
        text = _joined(item["content"] or item["summary"])
        if not text:
            return
        if not self._assistant or self._assistant["content"] or "tool_calls" in self._assistant:
            self._start_assistant()
        self._texts.setdefault("reasoning_content", []).append(text)

    def _add_text(self, item: Item) -> None:
        if not self._assistant:
            self._start_assistant()
        if self._assistant.get("tool_calls"):
            # Text after a call is merged into the same message, because the results must follow the
            # calls.
            self._texts.setdefault("content", []).append(_joined(item["content"]))
            return
        if self._assistant["content"]:
            self._start_assistant()
        self._assistant["content"] = _content(item["content"])

    def _add_call(self, item: Item) -> None:
        if item["status"] == "incomplete" and item["call_id"] not in self._answered:
            # The response was truncated: the arguments may not be JSON, and the call was never
            # executed.
            return
        if not self._assistant:
            self._start_assistant()
        name = flat_name(item["name"], item.get("namespace"))
        self._names[item["call_id"]] = name
        # The input of a custom call is not JSON, and templates accept only objects.
        is_custom = item["type"] == "custom_tool_call"
        arguments = {"input": item["input"]} if is_custom else item["arguments"]
        function = {"name": name, "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._assistant.setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Item) -> None:
        message = {
            "role": "tool",
            "tool_call_id": item["call_id"],
            "content": item["output"] if _has_image(item["output"]) else _joined(item["output"]),
        }
        if (name := self._names.get(item["call_id"])) is not None:
            message["name"] = name
        self.messages.append(message)

    def finish(self) -> list[Message]:
        self._end_assistant()
        return self.messages

    def _start_assistant(self) -> None:
        self._end_assistant()
        self._assistant = {"role": "assistant", "content": ""}
        self.messages.append(self._assistant)

    def _end_assistant(self) -> None:
        for name, texts in self._texts.items():
            self._assistant[name] = "".join([_joined(self._assistant.get(name, "")), *texts])
        self._texts.clear()
        self._assistant = {}


def _content(parts: list[Item]) -> str | list[Item]:
    """A single text part becomes a string. Several parts, and an image, stay a list, which some
    templates render differently."""
    return parts if len(parts) > 1 or _has_image(parts) else _joined(parts)


def _has_image(content: str | list[Item]) -> bool:
    return any(part["type"] == "input_image" for part in content if isinstance(part, dict))


def _joined(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)
