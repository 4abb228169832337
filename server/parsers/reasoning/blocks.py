"""Thinking told apart from the answer: blocks between marks, or prose of a known form."""

from dataclasses import dataclass

from server.parsers.base import Event, Output
from server.parsers.text_stream import Reader, Sink, Source, Steps


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks of a family: any of `opens`, then any of `closes`. None begins another."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    always: bool = False
    """Whether an answer is thinking from its first character on, unless the prompt says that the
    thinking is over."""
    answer_open: str = ""
    """What may stand before the answer,"""
    answer_close: str = ""
    """and behind it."""

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to `prompt` goes on with thinking that the prompt began."""
        return self.is_opened_by(prompt) or (self.always and not self.is_closed_by(prompt))

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the end of `prompt` is an opening mark."""
        return prompt.rstrip().endswith(self.opens)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the end of `prompt` is a closing mark."""
        return prompt.rstrip().endswith(self.closes)

    @property
    def leads(self) -> tuple[str, ...]:
        """The marks behind which the answer stands."""
        return self.closes

    def parser(self, *, is_inside: bool, is_exact: bool = False) -> "ThinkParser":
        """What reads an answer; the arguments are those of ThinkParser."""
        return ThinkParser(self, is_inside=is_inside, is_exact=is_exact)

    def is_open(self, text: str) -> bool:
        """Whether `text`, the beginning of an answer, has thinking that it does not close."""
        opened = max(text.rfind(mark) for mark in self.opens)
        return opened > max(text.rfind(mark) for mark in self.closes)


class ThinkParser:
    """A Parser that tells thinking from text. Blanks around the marks are neither; a block that is
    never closed is thinking to its end."""

    def __init__(self, form: Thinking, *, is_inside: bool, is_exact: bool = False) -> None:
        """`is_exact`: all that follows the closing mark is text, blanks and further marks too."""
        self._form = form
        self._is_exact = is_exact
        self._source = Source()
        self._output = Output()
        self.is_thinking = is_inside
        """Whether what comes next is thinking, as far as is known."""
        self.is_over = False
        """Whether no thinking can follow: it was closed, or there was none."""
        self.has_thought = is_inside
        """Whether thinking was begun."""
        self._reader = Reader(self._source, self._run(is_inside))

    def feed(self, text: str) -> list[Event]:
        self._reader.push(text)
        return self._output.drain()

    def finish(self, *, is_cut: bool) -> list[Event]:
        self._reader.end()
        return self._output.drain()

    def _run(self, is_inside: bool) -> Steps[None]:
        form, source, output = self._form, self._source, self._output
        space = yield from source.blanks()
        opened = yield from source.accept(*form.opens)
        if opened or is_inside:
            self.is_thinking = self.has_thought = True
            yield from source.blanks()
            self.is_over = bool((yield from self._until(form.closes, output.thought)))
            self.is_thinking = not self.is_over
            if not self._is_exact:
                yield from source.blanks()
        else:
            self.is_over = True
            output.text(space)
        if form.answer_open and not self._is_exact and (yield from source.accept(form.answer_open)):
            yield from source.blanks()
            yield from self._until((form.answer_close,), output.text)
            yield from source.blanks()
        while not source.has_ended:
            source.run_all(output.text)
            yield
        source.run_all(output.text)

    def _until(self, words: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Up to one of `words`, which is given ("" at the end), without the blanks before it."""
        held = ""

        def take(piece: str) -> None:
            nonlocal held
            whole = held + piece
            ready = whole.rstrip()
            held = whole[len(ready) :]
            sink(ready)

        return (yield from self._source.upto(words, take))


THINK = Thinking()
DEEPSEEK_R1 = Thinking(always=True)
GRANITE = Thinking(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
MISTRAL = Thinking(("[THINK]",), ("[/THINK]",))
HUNYUAN = Thinking(answer_open="<answer>", answer_close="</answer>")
SEED = Thinking(("<seed:think>",), ("</seed:think>",))
GEMMA4 = Thinking(("<|channel>thought",), ("<channel|>",))
KIMI = Thinking(("\u25c1think\u25b7", "<think>"), ("\u25c1/think\u25b7", "</think>"))
