"""Tokenizer: converts text to token ids and back, using threads for long texts."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from tokenizers import Encoding

from config.errors import UserError
from config.fair_threads import FairThreads
from config.loading.env import cache_home
from config.native import panics_as_errors
from server.text.bounded_encoder import BoundedEncoder
from server.text.control_tokens import ControlTokenEncoder
from server.text.length_bounds import token_length_bound
from server.text.long_texts import (
    MARGIN_TOKENS,
    TooManyTokens,
    initial_characters,
    max_characters,
    read_part,
    without_lone_surrogates,
)
from server.text.pooling_inputs import (
    TEXT_CHARACTERS,
    InputTokens,
    Text,
    TextInputOptions,
    batches,
    encode_inputs,
)
from server.text.pooling_inputs import num_characters as length_of
from server.text.token_bytes import TokenBytesRule, TokenBytesTable, token_bytes_rule
from server.text.tokenizer_files import TextFiles, read_text_files

INLINE_CHARACTERS = 2_000
"""Maximum characters of a text that is encoded on the event loop: at 0.3 us per character, less
than a millisecond."""
SHORT_CHARACTERS = 50_000
"""Maximum characters of a text, or of a batch of inputs, that is encoded on the threads for short
texts."""
MAX_CHARACTER_BYTES = 4
MAX_PENDING = 1_024
"""Maximum number of short texts, and of long texts, that wait for a thread or are being encoded; a
batch of inputs counts as a text. Beyond it, only clients with less than their share may add
texts."""
INLINE_GROWN_BYTES = 2**17
"""Maximum product of the characters of a text and TokenizerBounds.growth, for encoding on the event
loop: 0.06 s."""
INLINE_COUNTED_CHARACTERS = 200_000
"""Maximum characters of a text whose bytes are counted on the event loop: 0.2 ms."""
_CUT_TOKENS = 16

Tokens = TypeVar("Tokens", Encoding, list[int])
Result = TypeVar("Result")


class TooManyCharacters(UserError):
    """A text has more characters than its maximum number of tokens allows."""

    def __init__(self, count: int, most: int) -> None:
        super().__init__(
            f"a text has {count} characters, at most {most} are allowed",
            code="context_length_exceeded",
        )


def _checked(tokens: Tokens, most: int | None) -> Tokens:
    if most is not None and len(tokens) > most:
        raise TooManyTokens(len(tokens))
    return tokens


class Tokenizer:
    """Encodes and decodes text. Thread-safe."""

    def __init__(
        self, files: TextFiles, threads: int = 2, *, special_tokens_as_text: bool = False
    ) -> None:
        """`special_tokens_as_text`: see `controls`."""
        self._encoder = BoundedEncoder(files.encoder, files.bounds)
        self.inline_characters = 0
        """Maximum characters of a text that is encoded on the event loop."""
        if files.bounds.takes_linear_time:
            most = INLINE_GROWN_BYTES // files.bounds.growth
            self.inline_characters = min(INLINE_CHARACTERS, most)
        self.chat_template = files.chat_template
        self.special_tokens = files.special_tokens
        self.tokenizer_class = files.tokenizer_class
        added = self._encoder.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = self._encoder.get_vocab_size(with_added_tokens=True)
        """Number of tokens, including added tokens: the highest token id plus 1 if ids have no
        gaps."""
        decoder = self._encoder.decoder
        self.rule = token_bytes_rule(json.loads(decoder.__getstate__()) if decoder else None)
        rule = self.rule or TokenBytesRule(self._isolated_bytes)
        self._pieces = TokenBytesTable(self._encoder.id_to_token, rule)
        self._rule = rule
        self._partly_shown: dict[frozenset[int], TokenBytesTable] = {}
        """Tables by set of hidden ids; an entry for each combination of parsers."""
        self._visible_pieces = TokenBytesTable(self._encoder.id_to_token, rule, self.special_ids)
        self._length_bound = token_length_bound(files.encoder)
        self._special_tokens_as_text = special_tokens_as_text
        self.controls = ControlTokenEncoder(self._encoder) if special_tokens_as_text else None
        """Keeps text in messages from becoming control tokens; None: no protection."""
        self._short = self._threads(threads, "encode")
        # Separate threads, so that short texts do not wait for long texts.
        self._long = self._threads(max(1, threads // 2), "encode-long")

    def protect(self, texts: Collection[str]) -> None:
        """Keep text in messages from becoming the tokens `texts`, even without
        special_tokens_as_text (see `controls`). Call it before the first text is encoded."""
        if self._special_tokens_as_text:
            added = self._encoder.get_added_tokens_decoder().values()
            texts = {*texts, *(token.content for token in added if token.special)}
        self.controls = ControlTokenEncoder(self._encoder, texts)

    def token(self, token_id: int) -> str | None:
        """The token as it is in the vocabulary; None for an unknown id."""
        token: str | None = self._encoder.id_to_token(token_id)
        return token

    @classmethod
    def load(
        cls,
        path: str,
        threads: int = 2,
        cache_dir: str | None = None,
        *,
        special_tokens_as_text: bool = False,
    ) -> "Tokenizer":
        """Load the tokenizer of a checkpoint's folder. Raises ConfigError."""
        files = read_text_files(path, Path(cache_dir or cache_home()))
        return cls(files, threads, special_tokens_as_text=special_tokens_as_text)

    async def encode(
        self, text: str, add_special_tokens: bool, most: int | None = None
    ) -> list[int]:
        """Token ids of `text`; long texts are encoded on a thread. Raises Overloaded if too many
        texts wait, TooManyTokens for more than `most` tokens (before tokenization if the length is
        enough to tell), TooManyCharacters for a text that is too long to be tokenized, and the
        errors of `encode_now`."""
        if most is not None and len(text) <= INLINE_COUNTED_CHARACTERS:
            self._check_length(text, most)
        elif most is not None:
            # If this class's threads counted the bytes, a rejection would wait for other texts.
            await asyncio.to_thread(self._check_length, text, most)
        if len(text) <= self.inline_characters:
            return self.encode_now(text, add_special_tokens, most)
        return await self._on_thread(
            len(text), lambda: self.encode_now(text, add_special_tokens, most)
        )

    async def encode_part(
        self, text: str, add_special_tokens: bool, num_tokens: int, *, from_end: bool
    ) -> list[int]:
        """Encode a text that is truncated to its first or last `num_tokens`. Reads only as much of
        a long text as necessary (see `read_part`). Raises Overloaded if too many texts wait, and
        the errors of `encode_now`."""

        def encode(part: str) -> list[int]:
            return self.encode_now(part, add_special_tokens)

        if len(text) <= self.inline_characters:
            return encode(text)
        size = min(len(text), initial_characters(num_tokens))
        return await self._on_thread(
            size, lambda: read_part(encode, text, num_tokens, from_end=from_end)
        )

    async def encode_inputs(
        self, texts: Sequence[Text], rule: TextInputOptions
    ) -> list[InputTokens]:
        """Tokens of many texts or pairs. Unless their total size is small, they are encoded on a
        thread, in batches so that other requests can run in between. Raises TooManyTokens,
        TooManyCharacters, Overloaded and UserError."""
        size = sum(length_of(text, rule.prefix) + TEXT_CHARACTERS for text in texts)
        if not rule.cuts:
            if size <= INLINE_COUNTED_CHARACTERS:
                self._check_inputs(texts, rule)
            else:
                await asyncio.to_thread(self._check_inputs, texts, rule)
        if size <= self.inline_characters:
            return self._inputs_now(texts, rule)
        result: list[InputTokens] = []
        for batch in batches(texts, SHORT_CHARACTERS, rule.prefix):
            size = sum(length_of(text, rule.prefix) for text in batch)
            try:
                result += await self._on_thread(size, partial(self._inputs_now, batch, rule))
            except TooManyTokens as error:
                error.index += len(result)
                raise
        return result

    def encode_now(self, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Token ids of `text`, encoded on the calling thread; lone surrogates become U+FFFD. Raises
        TooManyTokens, UserError for a marked text that would become a control token, and the errors
        of BoundedEncoder.encode_batch_fast."""
        if most is not None and len(text) > initial_characters(most):
            self._check_density(text, most)
        if not text.isascii():
            text = without_lone_surrogates(text)
        if self.controls is not None and self.controls.is_marked(text):
            return _checked(self.controls.encode(text, add_special_tokens), most)
        # Check before building the list: 8 million ids hold the GIL for 0.3 s.
        ids: list[int] = _checked(self._encoding(text, add_special_tokens), most).ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        # The batch call releases the GIL, the single call does not: for 390,000 characters, other
        # threads wait 2 ms instead of 250 ms.
        return self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _check_length(self, text: str, most: int, index: int = 0) -> None:
        """Raise TooManyTokens if the length of `text` implies more than `most` tokens; for a
        tokenizer without such a bound, TooManyCharacters if the length exceeds the maximum."""
        if self._length_bound is None:
            if len(text) > max_characters(most):
                raise TooManyCharacters(len(text), max_characters(most))
        elif (least := self.least_tokens(text, most)) > most:
            raise TooManyTokens(least, at_least=True, index=index)

    def _check_density(self, text: str, most: int, index: int = 0) -> None:
        """Raise TooManyTokens for a long text as soon as its parts, tokenized separately, have more
        than `most` tokens: the tokens of the whole text would take a hundred times its size."""
        size, count = initial_characters(most), -MARGIN_TOKENS
        for start in range(0, len(text), size):
            part = without_lone_surrogates(self.unmarked(text[start : start + size]))
            # Each cut adds a few tokens: subtract _CUT_TOKENS.
            count += max(0, len(self._encoding(part, False)) - _CUT_TOKENS)
            if count > most:
                raise TooManyTokens(count, at_least=True, index=index)

    def _check_inputs(self, texts: Sequence[Text], rule: TextInputOptions) -> None:
        """`_check_length` for all inputs that are not truncated."""
        for index, text in enumerate(texts):
            first, second = (rule.prefix + text, "") if isinstance(text, str) else text
            for segment, limit in (
                (first, rule.max_first_tokens),
                (second, rule.max_second_tokens),
            ):
                if limit is None:
                    self._check_length(segment, rule.most, index)

    def _threads(self, count: int, name: str) -> FairThreads:
        # A tokenizer without bounds may take 10 s for a text, so leave a thread to other clients.
        per_client = count if self._encoder.is_ordinary else max(1, count - 1)
        nouns = "texts to tokenize"
        return FairThreads(count, name, per_client=per_client, max_calls=MAX_PENDING, nouns=nouns)

    async def _on_thread(self, num_characters: int, call: Callable[[], Result]) -> Result:
        threads = self._short if num_characters <= SHORT_CHARACTERS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def _inputs_now(self, texts: Sequence[Text], rule: TextInputOptions) -> list[InputTokens]:
        if not rule.cuts and rule.max_first_tokens is None and rule.max_second_tokens is None:
            for index, text in enumerate(texts):
                if length_of(text, rule.prefix) > initial_characters(rule.most):
                    whole = rule.prefix + text if isinstance(text, str) else "".join(text)
                    self._check_density(whole, rule.most, index)
        with panics_as_errors():
            return encode_inputs(self._encoder, texts, rule)

    def unmarked(self, text: str) -> str:
        """`text` without the marks of `controls`."""
        return text if self.controls is None else self.controls.unmarked(text)

    def least_tokens(self, text: str, most: int) -> int:
        """Lower bound on the number of tokens of `text`, from its length; 0 if the text is too
        short to exceed `most`, or if the tokenizer has no TokenLengthBound."""
        bound = self._length_bound
        text = self.unmarked(text)
        if bound is None or len(text) * MAX_CHARACTER_BYTES < most * bound.max_bytes_per_token:
            return 0
        # Stop counting the bytes of a huge text as soon as there are too many.
        num_bytes = 0
        for start in range(0, len(text), INLINE_COUNTED_CHARACTERS):
            num_bytes += bound.num_encoded_bytes(text[start : start + INLINE_COUNTED_CHARACTERS])
            if num_bytes > most * bound.max_bytes_per_token:
                break
        return -(-num_bytes // bound.max_bytes_per_token)

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Decode `ids`; invalid UTF-8 becomes U+FFFD, unknown ids are dropped.
        `spaces_between_special_tokens` affects only decoders that put spaces between tokens."""
        if self.rule is None:
            return self.decode_dependent(ids, skip_special_tokens, spaces_between_special_tokens)
        pieces = self.pieces(skip_special_tokens)
        text = b"".join([pieces[token_id] for token_id in ids]).decode("utf-8", "replace")
        for _ in range(self.rule.strip_first):
            text = text.removeprefix(" ")
        return text

    def decode_dependent(self, ids: list[int], skip_special: bool, spaces: bool) -> str:
        """Decode with the library, for decoders in which a token's text depends on neighbouring
        tokens."""
        if skip_special or spaces:
            text: str = self._encoder.decode(ids, skip_special_tokens=skip_special)
            return text
        runs: list[list[int]] = []
        for index, token_id in enumerate(ids):
            if index and token_id in self.special_ids and ids[index - 1] in self.special_ids:
                runs.append([token_id])
            elif runs:
                runs[-1].append(token_id)
            else:
                runs = [[token_id]]
        return "".join(self._encoder.decode(run, skip_special_tokens=False) for run in runs)

    def pieces(
        self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> TokenBytesTable:
        """Table of token id -> bytes. With `skip_special_tokens`, special tokens have no bytes,
        except `shown`."""
        if not skip_special_tokens:
            return self._pieces
        if not shown:
            return self._visible_pieces
        hidden = self.special_ids - shown
        if hidden not in self._partly_shown:
            self._partly_shown[hidden] = TokenBytesTable(
                self._encoder.id_to_token, self._rule, hidden
            )
        return self._partly_shown[hidden]

    def special_ids_in(self, words: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens whose texts occur in any of `words`."""
        texts = {i: self._encoder.id_to_token(i) for i in self.special_ids}
        whole = "\0".join(words)
        return frozenset(i for i, text in texts.items() if text and text in whole)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, which may be a partial character; b"" for an unknown id."""
        return self._pieces[token_id]

    def close(self) -> None:
        """Stop the threads and the isolated processes; waiting texts are dropped."""
        self._encoder.close()
        if self.controls is not None:
            self.controls.close()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    def _isolated_bytes(self, token: str) -> bytes:
        """Bytes of a token inside a text: the bytes that a second occurrence adds to the first."""
        token_id = self._encoder.token_to_id(token) or 0
        once: str = self._encoder.decode([token_id], skip_special_tokens=False)
        twice: str = self._encoder.decode([token_id, token_id], skip_special_tokens=False)
        return twice.removeprefix(once).encode()
