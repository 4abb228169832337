"""Number of reasoning tokens: exact if the end tag is near, and found with bounded work."""

import time
from typing import Any

import pytest
import text_folders

from server.generation.answer_parser import MAX_CLOSING_TOKENS, ChoiceParsers, ReasoningParsing
from server.generation.outputs import Delta
from server.parsers.registry import REASONING_FORMATS
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TextFiles

TOKENIZER = Tokenizer(TextFiles(text_folders.byte_level(), {}, None))


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += len(ids)
        return TOKENIZER.decode(ids, **options)


def _parsing(name: str) -> ReasoningParsing:
    return ReasoningParsing(format=REASONING_FORMATS[name], is_inside=True, keeps_whitespace=False)


def num_reasoning_tokens(name: str, texts: list[str]) -> tuple[int, int]:
    """(reasoning tokens of an answer that arrives as `texts`, tokens decoded to count them)."""
    tokenizer: Any = CountingTokenizer()
    parsers = ChoiceParsers(
        tokenizer,
        None,
        _parsing(name),
        new_id=lambda: "ID",
    )
    for text in texts:
        parsers.parse(Delta(0, text, TOKENIZER.encode_now(text, False)))
    return parsers.num_reasoning_tokens, tokenizer.num_decoded


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode_now(text, False))


@pytest.mark.parametrize("num_before", [1, 100, 2 * MAX_CLOSING_TOKENS])
def test_the_tokens_up_to_the_end_tag_are_counted(num_before: int) -> None:
    texts = ["x"] * num_before + ["</think>", "answer" * 50]

    count, _ = num_reasoning_tokens("qwen3", texts)

    assert count == num_before + num_tokens("</think>")


def test_reasoning_without_its_end_tag_is_counted_with_bounded_work() -> None:
    texts = ["x" * 100] * 1_000 + ["<|START_RESPONSE|>answer"]

    count, num_decoded = num_reasoning_tokens("cohere_command3", texts)

    assert count == 100_000 + num_tokens(texts[-1])
    # A bisection over all tokens decoded 1.5 million.
    assert num_decoded <= 20 * MAX_CLOSING_TOKENS


def test_reasoning_tokens_of_many_choices_are_read_as_fast_as_those_of_a_single_choice() -> None:
    def reading_s(num_choices: int) -> float:
        parsers = ChoiceParsers(TOKENIZER, None, _parsing("qwen3"), new_id=lambda: "ID")
        for index in range(num_choices):
            parsers.parse(Delta(index, "x", TOKENIZER.encode_now("x", False)))
        assert parsers.num_reasoning_tokens == num_choices
        begun_s = time.process_time()
        total = sum([parsers.num_reasoning_tokens for _ in range(2_000)])
        assert total == 2_000 * num_choices
        return time.process_time() - begun_s

    assert min(reading_s(500) / reading_s(1) for _ in range(5)) < 4
