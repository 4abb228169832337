"""Any text, in any split, through every parser: no error is raised and no text is lost."""

import json
import re
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parsing import TOOLS, good_calls, read
from written_calls import BROKEN, TEXT, WHOLE

from server.parsers.harmony import HARMONY_REASONING
from server.parsers.output_parser import OutputParser
from server.parsers.reasoning.tags import ReasoningFormat, ShownReasoning
from server.parsers.registry import REASONING_FORMATS, TOOL_CALL_FORMATS, words_of
from server.parsers.stream.base import Parser
from server.parsers.stream.text_stream import WHITESPACE
from server.parsers.tool.base import ToolCallFormat, ToolCallParser
from server.parsers.tool.json import CALLS_ALONE, Arguments

PLAIN = st.text("abxyzÅé\u03b1\u2028\U0001f600 \n.!?-=0189", min_size=1, max_size=12)
"""Text that no format treats as markup."""


def without_blanks(text: str) -> str:
    return "".join(text.split())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def texts_of(words: frozenset[str]) -> st.SearchStrategy[str]:
    """Markers, parts of markers, text that may occur between them, and any other text."""
    marks = st.sampled_from(sorted(words) or ["["])
    halves = st.builds(lambda word, end: word[: end % len(word)], marks, st.integers(1, 30))
    known = [text for _, text, *_ in (*WHOLE, *TEXT, *BROKEN)]
    pieces = st.sampled_from([text[i : i + 11] for text in known for i in range(0, len(text), 11)])
    return st.lists(st.one_of(marks, halves, pieces, st.text(max_size=8)), max_size=12).map("".join)


FORMS = {family: name for name, family in TOOL_CALL_FORMATS.items()}
"""One name per format, and the parsers of calls that a grammar forces."""
FORMS |= {Arguments("now"): "named", CALLS_ALONE: "required"}
CUTS = st.lists(st.integers(0, 400), max_size=6)


@pytest.mark.parametrize("family", FORMS, ids=FORMS.values())
def test_any_text_gives_the_same_calls_whole_and_in_pieces(family: ToolCallFormat) -> None:
    @settings(max_examples=40)
    @given(texts_of(words_of(family)), CUTS, st.booleans())
    @example("".join((*family.section[:1], *family.ends)), [], False)
    def check(text: str, places: list[int], is_cut: bool) -> None:
        make = partial(ToolCallParser, family, TOOLS)
        whole = read(make, [text], is_cut=is_cut)

        assert read(make, cut(text, places), is_cut=is_cut) == whole
        assert read(make, list(text), is_cut=is_cut) == whole
        if not is_cut:
            assert all(isinstance(arguments, dict) for _, arguments in good_calls(whole))
        _, said, calls, _ = whole
        if not calls:
            assert bare(said, family) == bare(text, family)

    check()


def bare(text: str, family: ToolCallFormat) -> str:
    """`text` without ignored markers and without blocks that contain no calls, at any nesting."""
    starts, ends = (
        "|".join(map(re.escape, words)) for words in (family.markers, family.block_ends)
    )
    empty = rf"(?:{starts})[{WHITESPACE}]*(?:\[[{WHITESPACE}]*\])?[{WHITESPACE}]*(?:{ends})"
    before = ""
    while before != text:
        before = text
        for word in family.ignored_markers:
            text = text.replace(word, "")
        if family.block_ends:
            text = re.sub(empty, "", text)
    return text


SAMPLES = {
    name: [
        (text, calls)
        for family, text, content, calls in WHOLE
        if family == name
        and not content
        and text.startswith(
            (*TOOL_CALL_FORMATS[name].markers, *TOOL_CALL_FORMATS[name].ignored_markers)
        )
    ]
    for name in {name for name, *_ in WHOLE}
}


@pytest.mark.parametrize("name", sorted(name for name, samples in SAMPLES.items() if samples))
def test_calls_and_the_text_around_them_are_kept(name: str) -> None:
    @settings(max_examples=15)
    @given(st.lists(st.tuples(PLAIN, st.sampled_from(SAMPLES[name])), min_size=1, max_size=4), CUTS)
    def check(parts: list[tuple[str, tuple[str, list[Any]]]], places: list[int]) -> None:
        text = "".join(f"{plain}.{call}" for plain, (call, _) in parts)

        found = read(partial(ToolCallParser, TOOL_CALL_FORMATS[name], TOOLS), cut(text, places))

        said = "".join(f"{plain}." for plain, _ in parts)
        assert without_blanks(found[1]) == without_blanks(said)
        wanted = [call for _, (_, calls) in parts for call in calls]
        assert json.dumps(good_calls(found)) == json.dumps(wanted)

    check()


@pytest.mark.parametrize("form", set(REASONING_FORMATS.values()))
def test_any_text_gives_the_same_reasoning_whole_and_in_pieces(form: ReasoningFormat) -> None:
    words = words_of(form)

    @settings(max_examples=40)
    @given(
        texts_of(words),
        CUTS,
        st.booleans(),
        st.booleans(),
        st.sampled_from(sorted(TOOL_CALL_FORMATS)),
    )
    def check(
        text: str, places: list[int], is_inside: bool, keeps_whitespace: bool, family: str
    ) -> None:
        def make() -> Parser:
            return form.parser(is_inside=is_inside, keeps_whitespace=keeps_whitespace)

        def both() -> Parser:
            return OutputParser(
                make(), ToolCallParser(TOOL_CALL_FORMATS[family], TOOLS), lambda: "ID", 2
            )  # type: ignore[arg-type]

        whole = read(make, [text])
        assert read(make, cut(text, places)) == whole
        assert read(make, list(text)) == whole
        assert read(both, cut(text, places)) == read(both, [text])
        # Headers are not part of the output.
        if not (form is HARMONY_REASONING or form.header or isinstance(form, ShownReasoning)):
            said = without_blanks(in_order(make(), text))
            assert lost_of(without_blanks(text), said, [*map(without_blanks, words)]) is not None

    check()


def in_order(parser: Parser, text: str) -> str:
    """The reasoning and the text of an answer without calls."""
    events = [*parser.feed(text), *parser.finish(is_cut=False)]
    return "".join(getattr(event, "text", "") for event in events)


def lost_of(text: str, said: str, marks: list[str]) -> list[str] | None:
    """The marks that `said` omits from `text`; None if `said` omits other text."""
    if text == said:
        return []
    place = next(
        (i for i, (a, b) in enumerate(zip(text, said, strict=False)) if a != b),
        min(len(text), len(said)),
    )
    for mark in marks:
        # The omitted part may begin before the first difference, with the same characters.
        for start in range(max(0, place - len(mark)), place + 1):
            if text.startswith(mark, start):
                rest = lost_of(text[start + len(mark) :], said[start:], marks)
                if rest is not None:
                    return [mark, *rest]
    return None


CHANNELS = {"analysis": 0, "final": 1, "commentary": 1}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(sorted(CHANNELS)), PLAIN), min_size=1, max_size=5), CUTS)
def test_text_of_every_channel_is_kept(parts: list[tuple[str, str]], places: list[int]) -> None:
    messages = [f"<|channel|>{channel}<|message|>{text}" for channel, text in parts]
    found = read(
        lambda: HARMONY_REASONING.parser(is_inside=False),
        cut("<|end|><|start|>assistant".join(messages), places),
    )

    for kind in (0, 1):
        said = "".join(text for channel, text in parts if CHANNELS[channel] == kind)
        assert without_blanks(found[kind]) == without_blanks(said)
