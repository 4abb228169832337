"""Reasoning between a start tag and an end tag, or between known phrases."""

import re
from dataclasses import dataclass

from server.parsers.kinds import ParserKind, by_name
from server.parsers.stream.base import ReasoningParser
from server.parsers.stream.text_stream import Steps, Trimmed
from server.parsers.tool.base import NO_CALLS, CallFinder

MAX_HEADER_CHARACTERS = 128
_TEXT_TAGS = ("<think>", "</think>")
"""Tags that are not special tokens, so text may quote them; for formats with `is_anywhere`."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning tags of a model family; no tag is a prefix of another tag."""

    start_tags: tuple[str, ...] = ("<think>",)
    end_tags: tuple[str, ...] = ("</think>",)
    always: bool = False
    """Whether an answer starts with reasoning unless the prompt ends with an end tag."""
    answer_open: str = ""
    """Optional tag before the answer."""
    answer_close: str = ""
    """Optional tag after the answer."""
    label: str = ""
    """Optional word in the first line of reasoning, after the start tag."""
    is_anywhere: bool = False
    """Whether reasoning may start anywhere in an answer. Its tags, except _TEXT_TAGS, then contain
    special tokens, and stray tags outside the reasoning are dropped."""
    dropped: tuple[str, ...] = ()
    """Other tags that are dropped and that end the reasoning, with `is_anywhere`."""
    has_messages: bool = False
    """Whether calls are separate messages, so that call markup inside reasoning is only a
    quotation."""
    header: re.Pattern[str] | None = None
    """Pattern of the header at the start of an answer and after `header_tag`. The header is
    dropped. The pattern is matched against the text up to the next `<|`."""
    header_tag: str = ""

    @property
    def answer_start_tags(self) -> tuple[str, ...]:
        """Tags that end the reasoning and start the answer. A grammar applies after them."""
        return self.end_tags

    @property
    def stray_end_tags(self) -> tuple[str, ...]:
        """End tags that are dropped at the start of the answer and after the reasoning. Phrases are
        not dropped."""
        return tuple(tag for tag in self.end_tags if not tag[0].isalpha())

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether an answer to `prompt` starts inside reasoning."""
        return self.ends_with_start_tag(prompt) or (
            self.always and not self.ends_with_end_tag(prompt)
        )

    def ends_with_start_tag(self, prompt: str) -> bool:
        """Whether `prompt` ends with a start tag."""
        return prompt.rstrip().removesuffix(self.label).endswith(self.start_tags)

    def ends_with_end_tag(self, prompt: str) -> bool:
        """Whether `prompt` ends with a tag after which the answer starts."""
        return prompt.rstrip().endswith(self.answer_start_tags)

    def has_unclosed_reasoning(self, text: str) -> bool:
        """Whether the reasoning in `text`, the start of an answer, lacks an end tag."""
        opened = max(text.rfind(mark) for mark in self.start_tags)
        return opened > max(text.rfind(mark) for mark in self.end_tags)

    def parser(
        self, *, is_inside: bool, keeps_whitespace: bool = False, calls: CallFinder = NO_CALLS
    ) -> ReasoningParser:
        """A parser for an answer. `keeps_whitespace`: keep all whitespace of the text after the
        reasoning. `calls`: detects calls that end the reasoning."""
        return ReasoningTagParser(
            self,
            is_inside=is_inside,
            keeps_whitespace=keeps_whitespace,
            calls=NO_CALLS if self.has_messages else calls,
        )


@dataclass(frozen=True, slots=True)
class ShownReasoning(ReasoningFormat):
    """Format for reasoning that is shown as text of the answer, including its tags."""

    def parser(
        self, *, is_inside: bool, keeps_whitespace: bool = False, calls: CallFinder = NO_CALLS
    ) -> ReasoningParser:
        return ShownReasoningParser(self.start_tags[0] if is_inside else "")


class ShownReasoningParser(ReasoningParser):
    """Adds `start_tag` to the start of the text, unless the text starts with it."""

    def __init__(self, start_tag: str) -> None:
        super().__init__(is_inside=False)
        self._start_tag = start_tag

    def _run(self) -> Steps[None]:
        source, output = self._source, self._output
        self.is_done = True
        if not (yield from source.peek_word(self._start_tag)):
            output.add_text(self._start_tag)
        while not source.has_ended:
            source.take_all(output.add_text)
            yield
        source.take_all(output.add_text)


class ReasoningTagParser(ReasoningParser):
    """Parser of reasoning between tags. Drops whitespace around the tags, except after the
    reasoning with `keeps_whitespace`. Reasoning without an end tag ends before a call or at the end
    of the answer."""

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        is_inside: bool,
        keeps_whitespace: bool = False,
        calls: CallFinder = NO_CALLS,
    ) -> None:
        super().__init__(is_inside=is_inside)
        self._form = form
        self._is_inside = is_inside
        self._keeps_whitespace = keeps_whitespace
        self._calls = calls

    def _run(self) -> Steps[None]:
        form, source, output = self._form, self._source, self._output
        if not self._is_inside:
            yield from self._skip_header(form.header_tag)
        space = yield from source.skip_whitespace()
        while form.is_anywhere and (tag := (yield from source.accept(*form.dropped))):
            yield from self._skip_header(tag)
            space += yield from source.skip_whitespace()
        opened = yield from source.accept(*form.start_tags)
        if form.label and not opened and not self._is_inside:
            # The label alone also starts reasoning.
            opened = yield from source.accept(f"{form.label}\n")
        if opened or self._is_inside:
            self.has_reasoning = True
            yield from self._skip_label()
            self.is_done = bool((yield from self._read_reasoning()))
            if not self._keeps_whitespace:
                self.late_end_tags = form.stray_end_tags
                yield from source.skip_whitespace()
        else:
            self.is_done = True
            if not self._keeps_whitespace and (yield from source.accept(*form.stray_end_tags)):
                yield from source.skip_whitespace()
            else:
                output.add_text(space)
        if (
            form.answer_open
            and not self._keeps_whitespace
            and (yield from source.accept(form.answer_open))
        ):
            yield from source.skip_whitespace()
            yield from source.read_until((form.answer_close,), Trimmed(output.add_text))
            yield from source.skip_whitespace()
        if form.is_anywhere and not self._keeps_whitespace:
            yield from self._read_blocks()
        while not source.has_ended:
            source.take_all(output.add_text)
            yield
        source.take_all(output.add_text)

    def _skip_label(self) -> Steps[None]:
        """Skip the label of the reasoning, if any, and whitespace. If the prompt ends with the
        start tag, the model writes the label."""
        label, source = self._form.label, self._source
        if label:
            lines = (f"{label}\n", *(label + tag for tag in self._form.end_tags))
            if (yield from source.peek_word(*lines)):
                source.take(len(label))
        yield from source.skip_whitespace()

    def _skip_header(self, tag: str) -> Steps[None]:
        form, source = self._form, self._source
        if form.header is None or tag != form.header_tag:
            return
        head = yield from source.peek_until(("<|",), 0, MAX_HEADER_CHARACTERS)
        match = form.header.match(head or "")
        if match is not None:
            source.take(match.end())

    def _read_blocks(self) -> Steps[None]:
        """Read text and further reasoning. In formats without `dropped` tags, everything from a
        call's marker on is text."""
        form, source, output = self._form, self._source, self._output
        marks = (*form.start_tags, *form.end_tags, *form.dropped)
        tags = tuple(mark for mark in marks if mark not in _TEXT_TAGS)
        markers = () if form.dropped else self._calls.markers
        while tag := (yield from source.read_until((*tags, *markers), output.add_text)):
            if tag in markers:
                output.add_text(tag)
                return
            yield from self._skip_header(tag)
            if tag in form.start_tags:
                yield from self._skip_label()
                if self.has_reasoning:
                    output.add_reasoning("\n")
                self.has_reasoning = True
                yield from self._read_reasoning()

    def _read_reasoning(self) -> Steps[str]:
        """Read reasoning up to and including its end tag, or up to a call; returns the end tag or
        the call's marker, "" at the end of the answer."""
        source, ends = self._source, (*self._form.end_tags, *self._form.dropped)
        take = Trimmed(self._output.add_reasoning)
        while word := (
            yield from source.read_until((*ends, *self._calls.markers), take, leave=True)
        ):
            if word in ends:
                return source.take(len(word))
            if (yield from self._calls.starts_call(source)):
                self.call_marker, self.late_end_tags = word, ends
                return word
            take(source.take(len(word)))
        return ""


THINK = ReasoningFormat()
DEEPSEEK_R1 = ReasoningFormat(always=True)
SHOWN_THINK = ShownReasoning(always=True)
GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
MISTRAL = ReasoningFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>"), is_anywhere=True)
HUNYUAN = ReasoningFormat(answer_open="<answer>", answer_close="</answer>")
MINIMAX_M3 = ReasoningFormat(("<mm:think>",), ("</mm:think>",))
SEED = ReasoningFormat(("<seed:think>",), ("</seed:think>",))
GEMMA4 = ReasoningFormat(("<|channel>",), ("<channel|>",), label="thought", is_anywhere=True)
KIMI = ReasoningFormat(("\u25c1think\u25b7", "<think>"), ("\u25c1/think\u25b7", "</think>"))
ERNIE = ReasoningFormat(always=True, answer_open="<response>", answer_close="</response>")
COHERE = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    is_anywhere=True,
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
HY3 = ReasoningFormat(("<think:opensource>", "<think>"), ("</think:opensource>", "</think>"))
KIMI_K3 = ReasoningFormat(
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    is_anywhere=True,
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
INKLING = ReasoningFormat(
    ("<|content_thinking|>",),
    ("<|end_message|>", "<|content_model_end_sampling|>"),
    is_anywhere=True,
    dropped=(
        "<|message_model|>",
        "<|content_text|>",
        "<|content_invoke_tool_text|>",
        "<|content_tool_error|>",
    ),
    header=re.compile(r"[\w.-]+$"),
    header_tag="<|message_model|>",
)
MUSE_GLIMMER = ReasoningFormat(
    ("to=self<|message|>",),
    ("<|eom|>", "<|eot|>"),
    is_anywhere=True,
    dropped=("to=user<|message|>", "<|start|>assistant", "<|message|>"),
    has_messages=True,
    header=re.compile(r"\s*(to=(?!(self|user)$)\S+)?(?=$|to=)"),
    header_tag="<|start|>assistant",
)

REASONING_PARSERS = by_name(
    ParserKind(
        (
            "qwen3",
            "deepseek_v3",
            "deepseek_v4",
            "mimo",
            "nemotron_v3",
            "glm45",
            "glm47",
            "ling3",
            "poolside_v1",
            "olmo3",
        ),
        THINK,
        "`<think>...</think>`, if the answer or the end of the prompt opens it",
        marks=("think>",),
        rank=3,
    ),
    ParserKind(
        ("hy_v3",),
        HY3,
        "`<think>...</think>`, if the answer or the end of the prompt opens it",
        marks=("<arg_key{}>", ":opensource>"),
    ),
    ParserKind(
        ("deepseek_r1", "holo2", "minimax_m2", "step3p5"),
        DEEPSEEK_R1,
        "up to `</think>`, unless the prompt ends with it",
    ),
    ParserKind(
        ("step3",),
        DEEPSEEK_R1,
        "up to `</think>`, unless the prompt ends with it",
        marks=("<steptml:",),
    ),
    ParserKind(
        ("minimax_m2_append_think",),
        SHOWN_THINK,
        "as `minimax_m2`, but the reasoning stays in `content`, with its tags",
    ),
    ParserKind(
        ("ernie45",),
        ERNIE,
        "up to `</think>`; the answer may be in `<response>...</response>`",
        marks=("<response>",),
        rank=1,
    ),
    ParserKind(
        ("mistral",),
        MISTRAL,
        "`[THINK]...[/THINK]`",
        marks=("[THINK]",),
        rank=1,
    ),
    ParserKind(
        ("seed_oss",),
        SEED,
        "`<seed:think>...</seed:think>`",
        marks=("<seed:think>",),
    ),
    ParserKind(
        ("kimi_k2",),
        KIMI,
        "`\u25c1think\u25b7...\u25c1/think\u25b7`",
        marks=("\u25c1/think\u25b7",),
    ),
    ParserKind(
        ("minimax_m3",),
        MINIMAX_M3,
        "`<mm:think>...</mm:think>`",
        marks=("<mm:think>",),
    ),
    ParserKind(
        ("granite",),
        GRANITE,
        '"Here is my thought process:" ... "Here is my response:"',
        marks=("Here is my thought process:",),
        rank=1,
    ),
    ParserKind(
        ("hunyuan_a13b",),
        HUNYUAN,
        "`<think>...</think><answer>...</answer>`",
        marks=("<answer>", "<|extra_4|>"),
        rank=2,
    ),
    ParserKind(
        ("gemma4",),
        GEMMA4,
        "`<|channel>thought ... <channel|>`, anywhere in an answer",
        marks=("<|channel>",),
    ),
    ParserKind(
        ("cohere_command3", "cohere_command4"),
        COHERE,
        "special tokens anywhere in an answer; with the tool parser of the same name",
        marks=("<|START_THINKING|>",),
    ),
    ParserKind(
        ("kimi_k3",),
        KIMI_K3,
        "special tokens anywhere in an answer; with the tool parser of the same name",
        marks=("<|open|>",),
    ),
    ParserKind(
        ("inkling",),
        INKLING,
        "special tokens anywhere in an answer; with the tool parser of the same name",
        marks=("<|content_thinking|>",),
    ),
    ParserKind(
        ("muse_glimmer",),
        MUSE_GLIMMER,
        "special tokens anywhere in an answer; with the tool parser of the same name",
        marks=("to=self",),
        rank=1,
    ),
)
