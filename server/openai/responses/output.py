"""Output items of a response, and the stream events of their changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from config.json_text import Json
from server.generation.logprobs import PositionLogprobs
from server.generation.outputs import Delta
from server.openai.responses.items import Item, item_id
from server.parsers.stream.base import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from server.serving.choices import TokenFormatter, encoded_chat_logprobs
from server.text.hidden_reasoning import hide_reasoning

StreamEvent = Json
"""A stream event: its type and fields, without the sequence number."""


@dataclass(slots=True)
class OutputItem:
    """Item of the output. `fields`: the constant fields."""

    kind: str
    output_index: int
    fields: Item
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def part(self) -> Item:
        """Content part with the text so far."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    @property
    def item(self) -> Item:
        """The item so far."""
        item = {**self.fields, "status": self.status}
        if "encrypted_content" in item:
            item["encrypted_content"] = (
                hide_reasoning("".join(self.texts)) if self.is_done else None
            )
        if self.kind == "function_call":
            return {**item, "arguments": "".join(self.texts)}
        return {**item, "content": [self.part] if self.texts or self.is_done else []}

    @property
    def is_done(self) -> bool:
        return self.status != "in_progress"


class ResponseOutput:
    """Output of response `number`: call `add` for each delta, then `close`."""

    def __init__(
        self,
        number: str,
        parse: Callable[[Delta], list[ParserEvent]],
        token_formatter: TokenFormatter,
        *,
        namespaces: Mapping[str, tuple[str, str]],
        has_logprobs: bool,
        shows_reasoning: bool,
        hides_reasoning: bool,
    ) -> None:
        """`parse`: splits deltas into reasoning, text and calls. `namespaces`: name of a function
        as the model sees it -> (namespace, name). `hides_reasoning`: whether reasoning items also
        have `encrypted_content`."""
        self._number = number
        self._parse = parse
        self._token_formatter = token_formatter
        self._namespaces = namespaces
        self._has_logprobs = has_logprobs
        self._shows_reasoning = shows_reasoning
        self._hides_reasoning = hides_reasoning
        self._items: list[OutputItem] = []
        self._open_kind = ""
        """Kind of the last item while it is open; empty: no item is open."""
        self._pending: list[PositionLogprobs] = []
        """Log-probabilities of tokens whose text has not arrived yet."""
        self.finish_reason: str | None = None

    @property
    def output(self) -> list[Item]:
        """All items so far."""
        return [entry.item for entry in self._items]

    def add(self, delta: Delta) -> list[StreamEvent]:
        """Add `delta` to the output; returns its stream events."""
        self._pending += delta.logprobs or []
        emitted: list[StreamEvent] = []
        for event in self._parse(delta):
            emitted += self._handle(event)
        if delta.is_last:
            self.finish_reason = delta.finish_reason
            if not self._items:
                emitted += self._open_message()
            emitted += self.close("incomplete" if delta.finish_reason == "length" else "completed")
        return emitted

    def close(self, status: str) -> list[StreamEvent]:
        """Close the open item with `status`; returns its stream events."""
        if not self._open_kind:
            return []
        output_item, self._open_kind = self._items[-1], ""
        output_item.status = status
        item_ref = self._item_ref(output_item)
        emitted: list[StreamEvent] = []
        if output_item.kind == "function_call":
            done = {"arguments": "".join(output_item.texts), "name": output_item.fields["name"]}
            emitted.append({"type": "response.function_call_arguments.done", **item_ref, **done})
        else:
            part = output_item.part
            done = {"content_index": 0, "text": part["text"]}
            kind = "reasoning_text" if output_item.kind == "reasoning" else "output_text"
            if kind == "output_text":
                done["logprobs"] = output_item.logprobs
            emitted.append({"type": f"response.{kind}.done", **item_ref, **done})
            whole = {"content_index": 0, "part": part}
            emitted.append({"type": "response.content_part.done", **item_ref, **whole})
        last = {"output_index": output_item.output_index, "item": output_item.item}
        return [*emitted, {"type": "response.output_item.done", **last}]

    def _handle(self, event: ParserEvent) -> list[StreamEvent]:
        if isinstance(event, TextDelta):
            return [*self._open_message(), self._add_text(event.text)]
        # Log-probabilities are sent only for the tokens of message text.
        self._pending = []
        if isinstance(event, ReasoningDelta):
            return self._add_reasoning(event.text) if self._shows_reasoning else []
        if isinstance(event, ToolCallStart):
            return self._open_item("function_call", call_id=event.id, **self._names(event.name))
        return [self._add_delta("function_call_arguments", event.text)]

    def _names(self, given: str) -> Item:
        if (names := self._namespaces.get(given)) is None:
            return {"name": given}
        namespace, name = names
        return {"name": name, "namespace": namespace}

    def _add_reasoning(self, text: str) -> list[StreamEvent]:
        emitted = []
        if self._open_kind != "reasoning":
            hidden = {"encrypted_content": None} if self._hides_reasoning else {}
            emitted = self._open_item("reasoning", summary=[], **hidden)
        return [*emitted, self._add_delta("reasoning_text", text)]

    def _open_message(self) -> list[StreamEvent]:
        if self._open_kind == "message":
            return []
        return self._open_item("message", role="assistant")

    def _add_text(self, text: str) -> StreamEvent:
        entries: list[Any] = []
        if self._has_logprobs:
            tokens = self._tokens_of(text)
            # Encoded, because several events and the response contain them.
            entries = encoded_chat_logprobs(tokens, self._token_formatter)["content"]
            self._items[-1].logprobs += entries
        return {**self._add_delta("output_text", text), "logprobs": entries}

    def _tokens_of(self, text: str) -> list[PositionLogprobs]:
        """The tokens of `text`, found by their bytes. Earlier tokens (tags, whitespace) are
        dropped, later tokens wait for the next text. If `text` is not found, all pending tokens."""
        tokens, self._pending = self._pending, []
        data, encoded = b"".join(token.chosen.bytes for token in tokens), text.encode()
        start = data.find(encoded) if self._items[-1].texts else data.rfind(encoded)
        if start < 0:
            return tokens
        matched, end, position = [], start + len(encoded), 0
        for token in tokens:
            first, position = position, position + len(token.chosen.bytes)
            if first >= end:
                self._pending.append(token)
            elif position > start:
                matched.append(token)
        return matched

    def _add_delta(self, kind: str, text: str) -> StreamEvent:
        output_item = self._items[-1]
        output_item.texts.append(text)
        event = {"type": f"response.{kind}.delta", **self._item_ref(output_item)}
        if kind != "function_call_arguments":
            event["content_index"] = 0
        return {**event, "delta": text}

    def _open_item(self, kind: str, **fields: Any) -> list[StreamEvent]:
        emitted = self.close("completed")
        index = len(self._items)
        new_id = item_id(kind, self._number, str(index))
        output_item = OutputItem(kind, index, {"id": new_id, "type": kind, **fields})
        self._items.append(output_item)
        self._open_kind = kind
        emitted.append(
            {"type": "response.output_item.added", "output_index": index, "item": output_item.item}
        )
        if kind != "function_call":
            part = {"content_index": 0, "part": output_item.part}
            emitted.append(
                {"type": "response.content_part.added", **self._item_ref(output_item), **part}
            )
        return emitted

    @staticmethod
    def _item_ref(output_item: OutputItem) -> StreamEvent:
        return {"item_id": output_item.fields["id"], "output_index": output_item.output_index}
