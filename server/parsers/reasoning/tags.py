"""Reasoning between a start tag and an end tag, or between known phrases."""

from dataclasses import dataclass

from server.parsers.base import EventBuffer, ParserEvent
from server.parsers.text_stream import Sink, Source, Steps, StreamReader


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags of a model family; no tag is a prefix of another."""

    start_tags: tuple[str, ...] = ("<think>",)
    end_tags: tuple[str, ...] = ("</think>",)
    always: bool = False
    """Whether an answer starts in reasoning, unless the prompt ends with an end tag."""
    answer_open: str = ""
    """Optional tag before the answer."""
    answer_close: str = ""
    """Optional tag after the answer."""

    def starts_in_reasoning(self, prompt: str) -> bool:
        return self.ends_with_start_tag(prompt) or (
            self.always and not self.ends_with_end_tag(prompt)
        )

    def ends_with_start_tag(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.start_tags)

    def ends_with_end_tag(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.end_tags)

    @property
    def answer_start_tags(self) -> tuple[str, ...]:
        return self.end_tags

    def parser(self, *, is_inside: bool, keeps_whitespace: bool = False) -> "ReasoningTagParser":
        return ReasoningTagParser(self, is_inside=is_inside, keeps_whitespace=keeps_whitespace)

    def has_unclosed_reasoning(self, text: str) -> bool:
        opened = max(text.rfind(mark) for mark in self.start_tags)
        return opened > max(text.rfind(mark) for mark in self.end_tags)


class ReasoningTagParser:
    """Splits reasoning from text. Whitespace around the tags is dropped; a block without an end tag
    is reasoning to its end."""

    def __init__(
        self, tags: ReasoningTags, *, is_inside: bool, keeps_whitespace: bool = False
    ) -> None:
        """`keeps_whitespace`: all that follows the end tag is text, whitespace too."""
        self._tags = tags
        self._keeps_whitespace = keeps_whitespace
        self._source = Source()
        self._output = EventBuffer()
        self.is_reasoning = is_inside
        """Whether the next text is reasoning, as far as is known."""
        self.is_done = False
        self.has_reasoning = is_inside
        self._reader = StreamReader(self._source, self._run(is_inside))

    def feed(self, text: str) -> list[ParserEvent]:
        self._reader.push(text)
        return self._output.drain()

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        self._reader.end()
        return self._output.drain()

    def _run(self, is_inside: bool) -> Steps[None]:
        tags, source, output = self._tags, self._source, self._output
        space = yield from source.skip_whitespace()
        opened = yield from source.accept(*tags.start_tags)
        if opened or is_inside:
            self.is_reasoning = self.has_reasoning = True
            yield from source.skip_whitespace()
            self.is_done = bool((yield from self._until(tags.end_tags, output.add_reasoning)))
            self.is_reasoning = not self.is_done
            if not self._keeps_whitespace:
                yield from source.skip_whitespace()
        else:
            self.is_done = True
            output.add_text(space)
        if (
            tags.answer_open
            and not self._keeps_whitespace
            and (yield from source.accept(tags.answer_open))
        ):
            yield from source.skip_whitespace()
            yield from self._until((tags.answer_close,), output.add_text)
            yield from source.skip_whitespace()
        while not source.has_ended:
            source.take_all(output.add_text)
            yield
        source.take_all(output.add_text)

    def _until(self, words: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Take text up to one of `words`, without the whitespace before it; returns the word."""
        trailing = ""

        def take(piece: str) -> None:
            nonlocal trailing
            whole = trailing + piece
            ready = whole.rstrip()
            trailing = whole[len(ready) :]
            sink(ready)

        return (yield from self._source.read_until(words, take))


THINK = ReasoningTags()
DEEPSEEK_R1 = ReasoningTags(always=True)
GRANITE = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
MISTRAL = ReasoningTags(("[THINK]",), ("[/THINK]",))
HUNYUAN = ReasoningTags(answer_open="<answer>", answer_close="</answer>")
SEED = ReasoningTags(("<seed:think>",), ("</seed:think>",))
GEMMA4 = ReasoningTags(("<|channel>thought",), ("<channel|>",))
KIMI = ReasoningTags(("\u25c1think\u25b7", "<think>"), ("\u25c1/think\u25b7", "</think>"))
