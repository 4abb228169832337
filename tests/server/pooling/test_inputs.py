"""Texts, pairs and token ids as inputs of a pooling model."""

import asyncio
import threading
import time
from typing import Any

import pytest
import text_folders
from pooling_client import EMBEDDER
from tokenizers import Tokenizer as Encoder
from tokenizers import processors

from config.errors import PromptTooLong, UserError
from config.params.pooling import PoolingFacts, PoolingParams
from server.pooling.inputs import InputOptions, InputProcessor
from server.pooling.pipeline import PoolingInput
from server.text.long_texts import max_characters
from server.text.pooling_inputs import (
    InputTokens,
    Text,
    TextInputOptions,
    batches,
    encode_inputs,
)
from server.text.tokenizer import Tokenizer, TooManyCharacters
from server.text.tokenizer_files import TextFiles

EMBED = PoolingParams(task="embed")


def encoder(*, typed: bool = True) -> Encoder:
    """A whole-word tokenizer with the special tokens of BERT, or of RoBERTa without token types."""
    made = text_folders.words()
    cls, sep = (made.token_to_id(token) for token in ("<s>", "</s>"))
    kind = processors.BertProcessing if typed else processors.RobertaProcessing
    made.post_processor = kind(("</s>", sep), ("<s>", cls))
    return made


def processor(facts: PoolingFacts = EMBEDDER, *, max_model_len: int = 8) -> InputProcessor:
    tokenizer = Tokenizer(TextFiles(encoder(), {}, None))
    vocab_size = tokenizer.vocab_size
    return InputProcessor(tokenizer, facts, vocab_size=vocab_size, max_model_len=max_model_len)


def process(texts: list[Text], target: InputProcessor, **options: Any) -> list[PoolingInput]:
    return asyncio.run(target.texts(texts, InputOptions(EMBED, **options)))


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("most", [6, 7, 8, 30])
@pytest.mark.parametrize(
    "text", ["hello world . , hello world .", ("hello world .", ". , é . , é"), ("é é é é", ".")]
)
def test_truncation_equals_the_library(text: Text, most: int, typed: bool) -> None:
    plain, cutting = encoder(typed=typed), encoder(typed=typed)
    cutting.enable_truncation(most)

    (made,) = encode_inputs(plain, [text], TextInputOptions(most, cuts=True))

    pair = (text, None) if isinstance(text, str) else text
    expected = cutting.encode(*pair)
    assert made.ids == expected.ids
    types = expected.type_ids
    assert made.num_first == (types.index(1) if 1 in types else 0)


def test_the_end_of_a_text_is_kept_on_demand() -> None:
    made = encoder()
    hello, world, dot = (made.token_to_id(word) for word in ("hello", "world", "."))
    cls, sep = (made.token_to_id(token) for token in ("<s>", "</s>"))

    rule = TextInputOptions(4, cuts=True, keep_end=True)
    (tokens,) = encode_inputs(made, ["hello hello world ."], rule)

    assert tokens.ids == [cls, world, dot, sep]
    assert hello not in tokens.ids


@pytest.mark.parametrize("keep_end", [True, False])
def test_a_pair_of_long_texts_is_cut_in_linear_time(keep_end: bool) -> None:
    pair = ("hello " * 2_000, "world " * 2_000)
    start_s = time.thread_time()

    (made,) = encode_inputs(encoder(), [pair], TextInputOptions(6, cuts=True, keep_end=keep_end))

    # The library combines each truncated piece with each piece of the other text: 100 s.
    assert time.thread_time() - start_s < 10
    assert len(made.ids) == 6


def test_batches_are_limited_in_characters_and_keep_the_order() -> None:
    texts: list[Text] = ["aa", ("a", "b"), "a" * 9, "b", "c"]

    made = [list(batch) for batch in batches(texts, 4, "")]

    assert made == [["aa", ("a", "b")], ["a" * 9], ["b", "c"]]


def test_the_prefix_of_each_text_counts_in_batches() -> None:
    texts: list[Text] = ["a", "b", ("c", "d"), "e", "f"]

    made = [list(batch) for batch in batches(texts, 8, "pre")]

    assert made == [["a", "b"], [("c", "d"), "e"], ["f"]]


@pytest.mark.parametrize(
    ("texts", "prefix", "is_inline"),
    [
        (["a"] * 30, "", True),
        (["a"] * 2_048, "", False),
        ([("a", "b")] * 2_048, "", False),
        (["a"] * 20, "hello " * 10, False),
    ],
)
@pytest.mark.parametrize("cuts", [False, True])
def test_the_event_loop_tokenizes_only_inputs_that_are_few_and_short_with_their_prefix(
    texts: list[Text], prefix: str, is_inline: bool, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def record(*arguments: Any) -> list[InputTokens]:
        threads.append(threading.current_thread())
        return encode_inputs(*arguments)

    monkeypatch.setattr("server.text.tokenizer.encode_inputs", record)
    tokenizer = Tokenizer(TextFiles(encoder(), {}, None))
    rule = TextInputOptions(100, prefix=prefix, cuts=cuts)

    made = asyncio.run(tokenizer.encode_inputs(texts, rule))

    assert made == encode_inputs(encoder(), texts, rule)
    assert {thread is threading.main_thread() for thread in threads} == {is_inline}


def test_the_prefix_counts_when_the_length_of_a_text_is_checked() -> None:
    tokenizer = Tokenizer(TextFiles(encoder(), {}, None))
    rule = TextInputOptions(8, prefix="a" * max_characters(8))

    with pytest.raises(TooManyCharacters):
        asyncio.run(tokenizer.encode_inputs(["b"], rule))


def test_the_error_has_the_index_of_a_long_input_over_all_batches() -> None:
    texts: list[Text] = ["hello " * 4] * 3_000 + ["hello " * 9]

    with pytest.raises(PromptTooLong, match=r"8 tokens\. .* 11 tokens in input\[3000\]") as refusal:
        process(texts, processor())

    assert (refusal.value.param, refusal.value.code) == ("input", "context_length_exceeded")


def test_truncation_must_leave_more_than_special_tokens() -> None:
    with pytest.raises(
        UserError, match=r"is 2, and the text gets 2 special tokens.* at least 3"
    ) as refusal:
        process(["hello world"], processor(), truncate=2)

    assert refusal.value.param == "truncate_prompt_tokens"


PROMPTED = PoolingFacts(
    tasks=("embed",),
    width=8,
    token_width=8,
    prompts={"query": "Hello world ", "none": ""},
    default_prompt="query",
    includes_prompt=False,
    lowers_case=True,
)


def test_the_prompt_of_the_model_precedes_the_text_and_may_be_excluded_from_pooling() -> None:
    made = encoder()
    cls, sep = (made.token_to_id(token) for token in ("<s>", "</s>"))
    hello, world, dot = (made.token_to_id(word) for word in ("hello", "world", "."))

    (prompted,) = process(["."], processor(PROMPTED))
    (bare,) = process(["."], processor(PROMPTED), prompt_name="none")

    assert prompted.token_ids == [cls, hello, world, dot, sep]
    assert prompted.params.num_skipped == 3
    assert (bare.token_ids, bare.params) == ([cls, dot, sep], EMBED)
    with pytest.raises(UserError, match="'passage', this model has query, none"):
        process(["."], processor(PROMPTED), prompt_name="passage")


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([[1], []], r"input\[1\] has 0 token ids, .* at least 1"),
        ([[1], [99]], r"input\[1\] has token id 99, .* between 0 and 14"),
    ],
)
def test_token_ids_are_checked(lists: list[list[int]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        asyncio.run(processor().token_lists(lists, InputOptions(EMBED)))


@pytest.mark.parametrize(
    ("dimensions", "asked", "words"),
    [
        ((), 4, "dimensions is 4, this model has 8: it must be absent"),
        ((2, 4), 3, "it must be one of 2, 4"),
        (None, 9, "at most 8"),
        ((), 8, None),
        ((2, 4), 4, None),
        (None, 3, None),
    ],
)
def test_vectors_are_shortened_only_for_matryoshka_models(dimensions, asked, words) -> None:  # type: ignore[no-untyped-def]
    facts = PoolingFacts(tasks=("embed",), width=8, token_width=8, dimensions=dimensions)
    params = PoolingParams(task="embed", dimensions=asked)

    if words is None:
        processor(facts).check(params)
    else:
        with pytest.raises(UserError, match=words):
            processor(facts).check(params)
