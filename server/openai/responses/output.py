"""An answer as items of a response, and the events that tell of them as they grow. Knows no store,
and no sockets."""

from dataclasses import dataclass, field
from typing import Any

from server.generation.answer_parser import ChoiceParser
from server.generation.outputs import Delta, PositionLogprobs
from server.openai.choices import TokenFormatter, chat_logprobs
from server.openai.responses.items import Item, item_id
from server.parsers.base import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallRetracted,
    ToolCallStart,
)

StreamEvent = dict[str, Any]
"""An event: its type and its fields, without its sequence number."""


@dataclass(slots=True)
class OutputItem:
    """An item of the output. `fields` are what never changes of it."""

    kind: str
    output_index: int
    fields: Item
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    is_retracted: bool = False
    """Begun as a call that turned out to be none."""

    @property
    def part(self) -> Item:
        """The content part that holds its text."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    @property
    def item(self) -> Item:
        """As far as it has come."""
        made = {**self.fields, "status": self.status}
        if self.kind == "function_call":
            return {**made, "arguments": "".join(self.texts)}
        return {**made, "content": [self.part] if self.texts or self.is_done else []}

    @property
    def is_done(self) -> bool:
        return self.status != "in_progress"


class ResponseOutput:
    """The output of response `number`, of one choice. `take` its deltas, then `close` it."""

    def __init__(
        self,
        number: str,
        reader: ChoiceParser | None,
        name: TokenFormatter,
        *,
        has_logprobs: bool,
        shows_thinking: bool,
    ) -> None:
        """`reader` tells thinking and calls from text; None: all is text."""
        self._number = number
        self._reader = reader
        self._name = name
        self._has_logprobs = has_logprobs
        self._shows_thinking = shows_thinking
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._unsaid: list[PositionLogprobs] = []
        """Of tokens whose text has not come yet."""
        self.finish_reason: str | None = None

    @property
    def output(self) -> list[Item]:
        """All items, as far as they have come."""
        return [one.item for one in self._items if not one.is_retracted]

    def add(self, delta: Delta) -> list[StreamEvent]:
        """What `delta` adds."""
        self._unsaid += delta.logprobs or []
        if self._reader is None:
            events: list[ParserEvent] = [TextDelta(delta.text)] if delta.text else []
        else:
            events = self._reader.parse(delta)
        told: list[StreamEvent] = []
        for event in events:
            told += self._take(event)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if not self._items:
                told += self._begin_message()
            told += self.close("incomplete" if delta.finish_reason == "length" else "completed")
        return told

    def close(self, status: str) -> list[StreamEvent]:
        """Nothing more comes of the item that is open."""
        one, self._open = self._open, None
        if one is None:
            return []
        one.status = status
        where = self._where(one)
        told: list[StreamEvent] = []
        if one.kind == "function_call":
            done = {"arguments": "".join(one.texts), "name": one.fields["name"]}
            told.append({"type": "response.function_call_arguments.done", **where, **done})
        else:
            part = one.part
            done = {"content_index": 0, "text": part["text"]}
            kind = "reasoning_text" if one.kind == "reasoning" else "output_text"
            if kind == "output_text":
                done["logprobs"] = one.logprobs
            told.append({"type": f"response.{kind}.done", **where, **done})
            whole = {"content_index": 0, "part": part}
            told.append({"type": "response.content_part.done", **where, **whole})
        last = {"output_index": one.output_index, "item": one.item}
        return [*told, {"type": "response.output_item.done", **last}]

    def _take(self, event: ParserEvent) -> list[StreamEvent]:
        if isinstance(event, TextDelta):
            return [*self._begin_message(), self._text(event.text)]
        # These tokens are no part of any text.
        self._unsaid = []
        if isinstance(event, ReasoningDelta):
            return self._think(event.text) if self._shows_thinking else []
        if isinstance(event, ToolCallStart):
            return self._begin("function_call", call_id=event.id, name=event.name)
        assert self._open is not None
        if isinstance(event, ToolCallRetracted):
            self._open.is_retracted = True
            return self.close("incomplete")
        assert isinstance(event, ToolCallArguments)
        return [self._piece("function_call_arguments", event.text)]

    def _think(self, text: str) -> list[StreamEvent]:
        told = []
        if self._open is None or self._open.kind != "reasoning":
            told = self._begin("reasoning", summary=[])
        return [*told, self._piece("reasoning_text", text)]

    def _begin_message(self) -> list[StreamEvent]:
        if self._open is not None and self._open.kind == "message":
            return []
        return self._begin("message", role="assistant")

    def _text(self, text: str) -> StreamEvent:
        assert self._open is not None
        said: list[Any] = []
        if self._has_logprobs:
            said = chat_logprobs(self._said(text), self._name)["content"]
            self._open.logprobs += said
        return {**self._piece("output_text", text), "logprobs": said}

    def _said(self, text: str) -> list[PositionLogprobs]:
        """The tokens that `text` was made of, found by their bytes: marks and blanks before it are
        left out, and what comes behind it waits for the next text."""
        assert self._open is not None
        tokens, self._unsaid = self._unsaid, []
        data, wanted = b"".join(one.chosen.bytes for one in tokens), text.encode()
        start = data.find(wanted) if self._open.texts else data.rfind(wanted)
        if start < 0:
            return tokens
        said, end, place = [], start + len(wanted), 0
        for one in tokens:
            begun, place = place, place + len(one.chosen.bytes)
            if begun >= end:
                self._unsaid.append(one)
            elif place > start:
                said.append(one)
        return said

    def _piece(self, kind: str, text: str) -> StreamEvent:
        """A delta of the open item."""
        assert self._open is not None
        self._open.texts.append(text)
        told = {"type": f"response.{kind}.delta", **self._where(self._open)}
        if kind != "function_call_arguments":
            told["content_index"] = 0
        return {**told, "delta": text}

    def _begin(self, kind: str, **fields: Any) -> list[StreamEvent]:
        told = self.close("completed")
        place = len(self._items)
        made = item_id(kind, self._number, str(place))
        one = OutputItem(kind, place, {"id": made, "type": kind, **fields})
        self._items.append(one)
        self._open = one
        told.append({"type": "response.output_item.added", "output_index": place, "item": one.item})
        if kind != "function_call":
            part = {"content_index": 0, "part": one.part}
            told.append({"type": "response.content_part.added", **self._where(one), **part})
        return told

    @staticmethod
    def _where(one: OutputItem) -> StreamEvent:
        return {"item_id": one.fields["id"], "output_index": one.output_index}
