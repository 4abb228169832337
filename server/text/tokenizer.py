"""Tokenizer: text to token ids and back, off the event loop if it takes long. Knows no requests."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenizers import Encoding
from tokenizers import Tokenizer as Encoder

from config.errors import Overloaded, UserError
from config.loading.env import cache_home
from server.text.control_tokens import ControlTokenEncoder
from server.text.length_bounds import token_length_bound
from server.text.long_texts import (
    SPARE_TOKENS,
    max_characters,
    read_part,
    usual_characters,
    without_lone_surrogates,
)
from server.text.pooling_inputs import (
    InputRule,
    InputTokens,
    InputTooLong,
    Text,
    batches,
    encode_inputs,
)
from server.text.pooling_inputs import num_characters as length_of
from server.text.token_bytes import TokenBytesRule, TokenBytesTable, token_bytes_rule
from server.text.tokenizer_files import TextFiles, read_text_files

INLINE_CHARACTERS = 2_000
"""Encoded where it is called: at 0.3 us a character, under a millisecond."""
SHORT_CHARACTERS = 50_000
"""Texts up to here never wait behind longer ones."""
MAX_CHARACTER_BYTES = 4
MAX_PENDING = 1_024
"""Texts that may wait for a thread."""
COUNTED_CHARACTERS = 200_000
"""Whose bytes are counted at once, on the event loop too: 0.2 ms."""
_CUT_TOKENS = 16

Tokens = TypeVar("Tokens", Encoding, list[int])
Made = TypeVar("Made")


class TooManyCharacters(UserError):
    """A text is longer than any that is read for so many tokens."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(
            f"a text has {count} characters, at most {most} are read",
            code="context_length_exceeded",
        )


class TooManyTokens(Exception):
    """A text has more tokens than its caller can use: `count`, or still more."""

    def __init__(self, count: int, *, at_least: bool) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} tokens")
        self.count = count
        self.at_least = at_least


def _checked(tokens: Tokens, most: int | None) -> Tokens:
    if most is not None and len(tokens) > most:
        raise TooManyTokens(len(tokens), at_least=False)
    return tokens


class Tokenizer:
    """Encodes and decodes. Safe to call from any thread."""

    def __init__(
        self, files: TextFiles, threads: int = 2, *, special_tokens_as_text: bool = False
    ) -> None:
        """`special_tokens_as_text`: see `controls`."""
        self._encoder: Encoder = files.encoder
        self.chat_template = files.chat_template
        self.special_tokens = files.special_tokens
        added = self._encoder.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._encoder.get_vocab_size(with_added_tokens=True)
        """One more than the highest token id that has a text, if ids have no gaps."""
        decoder = self._encoder.decoder
        self.rule = token_bytes_rule(json.loads(decoder.__getstate__()) if decoder else None)
        rule = self.rule or TokenBytesRule(self._lone_bytes)
        self._pieces = TokenBytesTable(self._encoder.id_to_token, rule)
        self._rule = rule
        self._partly_shown: dict[frozenset[int], TokenBytesTable] = {}
        """A few: one for each way of reading answers."""
        self._shown_pieces = TokenBytesTable(self._encoder.id_to_token, rule, self.special_ids)
        self._cover = token_length_bound(self._encoder)
        self.controls = ControlTokenEncoder(self._encoder) if special_tokens_as_text else None
        """Marks texts in messages that are not to become control tokens; None: they may."""
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        # Long texts have threads of their own, fewer than there are for short ones.
        self._long = ThreadPoolExecutor(max(1, threads // 2), thread_name_prefix="encode-long")
        self._pending = 0

    @classmethod
    def load(
        cls,
        path: str,
        threads: int = 2,
        cache_dir: Path | None = None,
        *,
        special_tokens_as_text: bool = False,
    ) -> "Tokenizer":
        """Read a checkpoint's folder. Raises ConfigError when it holds no tokenizer."""
        files = read_text_files(path, cache_dir or Path(cache_home()))
        return cls(files, threads, special_tokens_as_text=special_tokens_as_text)

    async def encode(
        self, text: str, add_special_tokens: bool, most: int | None = None
    ) -> list[int]:
        """Token ids; long texts on a thread. Raises Overloaded when too many texts wait,
        TooManyTokens for a text of more than `most`: at once, where its length alone tells, and
        TooManyCharacters for one that is not read at all."""
        if most is not None and len(text) <= COUNTED_CHARACTERS:
            self._check_length(text, most)
        elif most is not None:
            # Not on the threads of this class: what is refused does not wait for what is not.
            await asyncio.to_thread(self._check_length, text, most)
        if len(text) <= INLINE_CHARACTERS:
            return self.encode_now(text, add_special_tokens, most)
        return await self._on_thread(
            len(text), lambda: self.encode_now(text, add_special_tokens, most)
        )

    async def encode_part(
        self, text: str, add_special_tokens: bool, num_tokens: int, *, from_end: bool
    ) -> list[int]:
        """As `encode`, for a text that is then cut to its first or last `num_tokens`: of a long one
        no more is read than that takes (see `read_part`)."""

        def encode(part: str) -> list[int]:
            return self.encode_now(part, add_special_tokens)

        if len(text) <= INLINE_CHARACTERS:
            return encode(text)
        size = min(len(text), usual_characters(num_tokens))
        return await self._on_thread(
            size, lambda: read_part(encode, text, num_tokens, from_end=from_end)
        )

    async def encode_inputs(self, texts: Sequence[Text], rule: InputRule) -> list[InputTokens]:
        """Tokens of many texts or pairs, some of them at a time, so that others get their turn.
        Raises InputTooLong, TooManyCharacters, Overloaded and UserError."""
        if not rule.cuts:
            if sum(map(length_of, texts)) <= COUNTED_CHARACTERS:
                self._check_inputs(texts, rule)
            else:
                await asyncio.to_thread(self._check_inputs, texts, rule)
        made: list[InputTokens] = []
        for batch in batches(texts, SHORT_CHARACTERS):
            size = sum(map(length_of, batch))
            try:
                if size <= INLINE_CHARACTERS:
                    made += self._inputs_now(batch, rule)
                else:
                    made += await self._on_thread(size, partial(self._inputs_now, batch, rule))
            except InputTooLong as error:
                place = len(made) + error.place
                raise InputTooLong(place, error.count, at_least=error.at_least) from None
        return made

    def encode_now(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids; lone surrogates become U+FFFD. Raises TooManyTokens, and UserError for a
        marked text that cannot be kept from becoming a control token."""
        if most is not None and len(text) > usual_characters(most):
            self._check_density(text, most)
        if not text.isascii():
            text = without_lone_surrogates(text)
        if self.controls is not None and self.controls.is_marked(text):
            return _checked(self.controls.encode(text, add_special_tokens), most)
        # Before the list is made: that of 8 million ids holds all threads up for 0.3 s.
        ids: list[int] = _checked(self._encoding(text, add_special_tokens), most).ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        # The batch call lets other threads run meanwhile, the one for a single text does not
        # (measured: 250 ms against 2 ms on 390,000 characters).
        return self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _check_length(self, text: str, most: int) -> None:
        """Raise TooManyTokens where the length of `text` shows that it has more than `most`, and
        TooManyCharacters where a length shows nothing and it has more than are ever read."""
        if self._cover is None:
            if len(text) > max_characters(most):
                raise TooManyCharacters(len(text), max_characters(most))
        elif (least := self.least_tokens(text, most)) > most:
            raise TooManyTokens(least, at_least=True)

    def _check_density(self, text: str, most: int) -> None:
        """Raise TooManyTokens for a long text once its parts, each tokenized alone, have more than
        `most`: tokens of all of it would take a hundred times its size."""
        size, count = usual_characters(most), -SPARE_TOKENS
        for start in range(0, len(text), size):
            part = without_lone_surrogates(self.unmarked(text[start : start + size]))
            # A cut makes a few tokens more.
            count += max(0, len(self._encoding(part, False)) - _CUT_TOKENS)
            if count > most:
                raise TooManyTokens(count, at_least=True)

    def _check_inputs(self, texts: Sequence[Text], rule: InputRule) -> None:
        """As `_check_length`, for inputs, but for texts that are cut."""
        for place, text in enumerate(texts):
            first, second = (text, "") if isinstance(text, str) else text
            for one, limit in ((first, rule.most_first), (second, rule.most_second)):
                if limit is None:
                    try:
                        self._check_length(one, rule.most)
                    except TooManyTokens as error:
                        raise InputTooLong(place, error.count, at_least=True) from None

    async def _on_thread(self, num_characters: int, call: Callable[[], Made]) -> Made:
        if self._pending >= MAX_PENDING:
            raise Overloaded(f"{self._pending} texts wait to be tokenized, {MAX_PENDING} may")
        threads = self._short if num_characters <= SHORT_CHARACTERS else self._long
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, call)
        finally:
            self._pending -= 1

    def _inputs_now(self, texts: Sequence[Text], rule: InputRule) -> list[InputTokens]:
        if not rule.cuts and rule.most_first is None and rule.most_second is None:
            for place, text in enumerate(texts):
                if length_of(text) > usual_characters(rule.most):
                    try:
                        whole = text if isinstance(text, str) else "".join(text)
                        self._check_density(whole, rule.most)
                    except TooManyTokens as error:
                        raise InputTooLong(place, error.count, at_least=True) from None
        return encode_inputs(self._encoder, texts, rule)

    def unmarked(self, text: str) -> str:
        """A text as it was meant, without the marks of `controls`."""
        return text if self.controls is None else self.controls.unmarked(text)

    def least_tokens(self, text: str, most: int) -> int:
        """`text` has at least so many tokens, as its length shows; 0 when it may have less than
        `most`, or there is no telling."""
        cover = self._cover
        text = self.unmarked(text)
        if cover is None or len(text) * MAX_CHARACTER_BYTES < most * cover.most_bytes:
            return 0
        # The bytes of a huge text need not all be counted to see that there are too many.
        num_kept = 0
        for start in range(0, len(text), COUNTED_CHARACTERS):
            num_kept += cover.num_kept_bytes(text[start : start + COUNTED_CHARACTERS])
            if num_kept > most * cover.most_bytes:
                break
        return -(-num_kept // cover.most_bytes)

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `ids`; bytes that are no UTF-8 show as U+FFFD. Unknown ids stand for nothing.

        `spaces_between_special_tokens` matters only to decoders that put spaces between tokens.
        """
        if self.rule is None:
            return self.decode_dependent(ids, skip_special_tokens, spaces_between_special_tokens)
        pieces = self.pieces(skip_special_tokens)
        text = b"".join([pieces[token_id] for token_id in ids]).decode("utf-8", "replace")
        for _ in range(self.rule.strip_first):
            text = text.removeprefix(" ")
        return text

    def decode_dependent(self, ids: list[int], skip_special: bool, spaces: bool) -> str:
        """Decode by the library, for decoders in which a token's text depends on its neighbours."""
        if skip_special or spaces:
            text: str = self._encoder.decode(ids, skip_special_tokens=skip_special)
            return text
        runs: list[list[int]] = []
        for place, token_id in enumerate(ids):
            if place and token_id in self.special_ids and ids[place - 1] in self.special_ids:
                runs.append([token_id])
            elif runs:
                runs[-1].append(token_id)
            else:
                runs = [[token_id]]
        return "".join(self._encoder.decode(run, skip_special_tokens=False) for run in runs)

    def pieces(
        self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> TokenBytesTable:
        """Token id to bytes; special tokens but those `shown` stand for nothing when they are
        skipped."""
        if not skip_special_tokens:
            return self._pieces
        if not shown:
            return self._shown_pieces
        hidden = self.special_ids - shown
        if hidden not in self._partly_shown:
            self._partly_shown[hidden] = TokenBytesTable(
                self._encoder.id_to_token, self._rule, hidden
            )
        return self._partly_shown[hidden]

    def special_ids_in(self, words: Iterable[str]) -> frozenset[int]:
        """The special tokens whose texts are part of one of `words`."""
        texts = {i: self._encoder.id_to_token(i) for i in self.special_ids}
        whole = "\0".join(words)
        return frozenset(i for i, text in texts.items() if text and text in whole)

    def id_of(self, token: str) -> int | None:
        """The id of a token written as the vocabulary has it, if there is one."""
        token_id: int | None = self._encoder.token_to_id(token)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, also when they are half a character; b"" for an unknown id."""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """A token alone as text; half a character shows as U+FFFD."""
        return self._pieces[token_id].decode("utf-8", "replace")

    def close(self) -> None:
        """Let the threads go; texts that still wait are dropped."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    def _lone_bytes(self, token: str) -> bytes:
        """A token's bytes amid a text: what a second one adds to a first."""
        token_id = self._encoder.token_to_id(token) or 0
        once: str = self._encoder.decode([token_id], skip_special_tokens=False)
        twice: str = self._encoder.decode([token_id, token_id], skip_special_tokens=False)
        return twice.removeprefix(once).encode()
