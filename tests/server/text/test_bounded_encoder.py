"""Tokenizers without known bounds encode in a process that can be killed."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import text_folders
from delays import least_awaited
from hostile_files import CATASTROPHE, hostile_tokenizer, replace_rule, split
from native_panics import EVIL
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from waits import WAIT_S, until

from config.checkpoint.tokenizer_bounds import TokenizerBounds
from config.errors import Overloaded, UserError
from config.fair_threads import current_client
from engine.process.isolation import ForkServer, Limits
from server.text import bounded_encoder
from server.text import tokenizer as tokenizer_module
from server.text.bounded_encoder import BoundedEncoder
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TextFiles

QUADRATIC = r"\s+$"
"""A pattern that is linear for most texts, but not for long runs of spaces."""


def catastrophic() -> BoundedEncoder:
    """An encoder with a catastrophic pattern that is treated as linear."""
    encoder = text_folders.byte_level()
    steps = [pre_tokenizers.Split(Regex(CATASTROPHE), "isolated"), encoder.pre_tokenizer]
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return BoundedEncoder(encoder, TokenizerBounds())


@pytest.fixture
def unbounded(tmp_path: Path) -> Iterator[Tokenizer]:
    """A tokenizer with an unknown form of pattern."""
    tokenizer = Tokenizer.load(hostile_tokenizer(tmp_path, {"pre_tokenizer": split(QUADRATIC)}))
    yield tokenizer
    tokenizer.close()


async def test_an_unknown_pattern_gives_the_same_ids_in_a_separate_process(
    unbounded: Tokenizer,
) -> None:
    direct = Tokenizer(replace(files_of(unbounded), bounds=TokenizerBounds()))
    texts = ["Hello, the world  ", "", "<s>\u00e9\ud800", "a <tool> b\n " * 500]

    ids = [await unbounded.encode(text, False) for text in texts]

    assert ids == [await direct.encode(text, False) for text in texts]
    assert unbounded._encoder._isolation.pid is not None
    assert direct._encoder._isolation.pid is None


def files_of(tokenizer: Tokenizer) -> TextFiles:
    return TextFiles(tokenizer._encoder._encoder, {}, None, tokenizer._encoder.bounds)


async def test_a_text_that_takes_too_long_is_refused_and_others_continue(
    unbounded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(cpu_s=1.0, wall_s=60.0, memory_bytes=2**30, stack_bytes=2**23)
    encoder = unbounded._encoder
    name, setup = "server.text.bounded_encoder", encoder.to_str().encode()
    monkeypatch.setattr(encoder, "_isolation", ForkServer(name, setup, limits))
    await unbounded.encode("warm", False)

    async def longest_gap_s() -> float:
        slow = asyncio.create_task(unbounded.encode(" " * 100_000 + "x", False))
        longest_s = 0.0
        while not slow.done():
            start_s = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - start_s)
        with pytest.raises(UserError, match="text of 100001 bytes: it took longer than 1 s of"):
            await slow
        return longest_s

    assert await least_awaited(longest_gap_s, 0.25) < 0.25
    assert await unbounded.encode("a", False)
    encoder.close()


async def test_a_text_that_grows_beyond_a_bound_is_encoded_in_a_process(tmp_path: Path) -> None:
    rule = replace_rule("h", "h" * 1_000)
    tokenizer = Tokenizer.load(hostile_tokenizer(tmp_path, {"normalizer": rule}))
    most = bounded_encoder.MAX_DIRECT_BYTES // 2_000

    short = await tokenizer.encode("h", False)
    pid_before = tokenizer._encoder._isolation.pid
    long = await tokenizer.encode("x" * (most + 1), False)
    pid_after = tokenizer._encoder._isolation.pid
    tokenizer.close()

    assert (len(short), len(long)) == (1_000, most + 1)
    assert pid_before is None
    assert pid_after is not None
    assert tokenizer.inline_characters == 2**17 // 2_000


def test_a_panic_of_the_library_is_a_user_error() -> None:
    with pytest.raises(UserError, match="text of 201 bytes: a native extension panicked: Onig"):
        catastrophic().encode_batch_fast([EVIL])


@pytest.mark.parametrize("takes_linear_time", [True, False])
def test_an_error_of_the_library_is_a_user_error(takes_linear_time: bool) -> None:
    words = Encoder(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    encoder = BoundedEncoder(words, TokenizerBounds(takes_linear_time=takes_linear_time))

    with pytest.raises(UserError, match=r"text of 1 bytes: .*Missing \[UNK\] token"):
        encoder.encode_batch_fast(["b"])
    encoder.close()


def test_a_panic_in_a_fork_is_reported() -> None:
    bounds = TokenizerBounds(takes_linear_time=False)
    encoder = BoundedEncoder(catastrophic()._encoder, bounds)

    with pytest.raises(UserError, match="a native extension panicked: Onig"):
        encoder.encode_batch_fast([EVIL])
    encoder.close()


@pytest.mark.parametrize(
    ("bounds", "num_running"),
    [(TokenizerBounds(takes_linear_time=False), 2), (TokenizerBounds(), 3)],
)
async def test_a_client_with_a_full_queue_leaves_others_room_and_with_slow_texts_a_thread(
    monkeypatch: pytest.MonkeyPatch, bounds: TokenizerBounds, num_running: int
) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_PENDING", 8)
    tokenizer = Tokenizer(TextFiles(text_folders.byte_level(), {}, None, bounds), 3)
    gate, running = threading.Event(), list[int]()

    def slow() -> bool:
        running.append(1)
        return gate.wait(WAIT_S)

    async def as_client(name: str, call: Callable[[], bool]) -> bool:
        current_client.set(name)
        return await tokenizer._on_thread(1, call)

    calls = [asyncio.create_task(as_client("a", slow)) for _ in range(8)]
    await until(lambda: len(running) == num_running)
    await asyncio.sleep(0.05)
    assert len(running) == num_running
    with pytest.raises(
        Overloaded, match="8 texts to tokenize of this client wait or run, at most 8"
    ):
        await asyncio.create_task(as_client("a", slow))
    other = asyncio.create_task(as_client("b", lambda: True))
    if num_running < 3:
        assert await asyncio.wait_for(other, WAIT_S)
    gate.set()
    assert all(await asyncio.gather(*calls, other))
    tokenizer.close()
