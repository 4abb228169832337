"""Thinking told apart from the answer: blocks between marks, or prose of a known form."""

from dataclasses import dataclass

from server.parsers.base import EventBuffer, ParserEvent
from server.parsers.text_stream import Sink, Source, Steps, StreamReader


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The marks of a family: any of `start_tags`, then any of `end_tags`. None begins another."""

    start_tags: tuple[str, ...] = ("<think>",)
    end_tags: tuple[str, ...] = ("</think>",)
    always: bool = False
    """Whether an answer is thinking from its first character on, unless the prompt says that the
    thinking is over."""
    answer_open: str = ""
    """What may stand before the answer,"""
    answer_close: str = ""
    """and behind it."""

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether an answer to `prompt` goes on with thinking that the prompt began."""
        return self.ends_with_start_tag(prompt) or (
            self.always and not self.ends_with_end_tag(prompt)
        )

    def ends_with_start_tag(self, prompt: str) -> bool:
        """Whether the end of `prompt` is an opening mark."""
        return prompt.rstrip().endswith(self.start_tags)

    def ends_with_end_tag(self, prompt: str) -> bool:
        """Whether the end of `prompt` is a closing mark."""
        return prompt.rstrip().endswith(self.end_tags)

    @property
    def answer_start_tags(self) -> tuple[str, ...]:
        """The marks behind which the answer stands."""
        return self.end_tags

    def parser(self, *, is_inside: bool, keeps_whitespace: bool = False) -> "ReasoningTagParser":
        """What reads an answer; the arguments are those of ReasoningTagParser."""
        return ReasoningTagParser(self, is_inside=is_inside, keeps_whitespace=keeps_whitespace)

    def has_unclosed_reasoning(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, has thinking that it does not close."""
        opened = max(text.rfind(mark) for mark in self.start_tags)
        return opened > max(text.rfind(mark) for mark in self.end_tags)


class ReasoningTagParser:
    """A Parser that tells thinking from text. Blanks around the marks are neither; a block that is
    never closed is thinking to its end."""

    def __init__(
        self, form: ReasoningTags, *, is_inside: bool, keeps_whitespace: bool = False
    ) -> None:
        """`keeps_whitespace`: all that follows the end tag is text, whitespace too."""
        self._form = form
        self._is_exact = keeps_whitespace
        self._source = Source()
        self._output = EventBuffer()
        self.is_reasoning = is_inside
        """Whether what comes next is thinking, as far as is known."""
        self.is_done = False
        """Whether no thinking can follow: it was closed, or there was none."""
        self.has_reasoning = is_inside
        """Whether thinking was begun."""
        self._reader = StreamReader(self._source, self._run(is_inside))

    def feed(self, text: str) -> list[ParserEvent]:
        self._reader.push(text)
        return self._output.drain()

    def finish(self, *, is_cut: bool) -> list[ParserEvent]:
        self._reader.end()
        return self._output.drain()

    def _run(self, is_inside: bool) -> Steps[None]:
        form, source, output = self._form, self._source, self._output
        space = yield from source.skip_blanks()
        opened = yield from source.accept(*form.start_tags)
        if opened or is_inside:
            self.is_reasoning = self.has_reasoning = True
            yield from source.skip_blanks()
            self.is_done = bool((yield from self._until(form.end_tags, output.add_reasoning)))
            self.is_reasoning = not self.is_done
            if not self._is_exact:
                yield from source.skip_blanks()
        else:
            self.is_done = True
            output.add_text(space)
        if form.answer_open and not self._is_exact and (yield from source.accept(form.answer_open)):
            yield from source.skip_blanks()
            yield from self._until((form.answer_close,), output.add_text)
            yield from source.skip_blanks()
        while not source.has_ended:
            source.take_all(output.add_text)
            yield
        source.take_all(output.add_text)

    def _until(self, words: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Up to one of `words`, which is given ("" at the end), without the blanks before it."""
        held = ""

        def take(piece: str) -> None:
            nonlocal held
            whole = held + piece
            ready = whole.rstrip()
            held = whole[len(ready) :]
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
