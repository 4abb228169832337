"""BoundedEncoder: a checkpoint's tokenizer with limits on time and memory."""

from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as Encoder

from config.checkpoint.tokenizer_bounds import TokenizerBounds
from config.errors import RequestFailed, UserError
from config.native import NativePanic, panics_as_errors
from engine.process.isolation import (
    Call,
    ForkServer,
    Limits,
    failures_of_requests,
)
from server.text.long_texts import without_lone_surrogates

UNLIMITED_GROWTH = 16
"""Maximum TokenizerBounds.growth of tokenizers that encode texts of any length in this process."""
MAX_DIRECT_BYTES = 16 * 2**20
"""Maximum product of the bytes of texts and TokenizerBounds.growth that tokenizers with more growth
encode in this process: 1 to 8 s."""
LIMITS = Limits(cpu_s=5.0, wall_s=10.0, memory_bytes=2 * 2**30, stack_bytes=8 * 2**20)
"""Limits of the isolated process that encodes all other texts."""
MAX_REPLY_BYTES = 64 * 2**20

Text = str | tuple[str, str]


class BoundedEncoder:
    """Tokenizer of the tokenizers library with bounded encoding. Thread-safe.

    Texts without known bounds on time or memory are encoded in a fork that can be killed. All other
    texts, and all texts of ordinary checkpoints, are encoded directly. Attributes that this class
    lacks are read from the library's tokenizer.
    """

    def __init__(self, encoder: Encoder, bounds: TokenizerBounds) -> None:
        self._encoder = encoder
        self.bounds = bounds
        self._max_direct_bytes: float = MAX_DIRECT_BYTES // bounds.growth
        if not bounds.takes_linear_time:
            self._max_direct_bytes = -1
        elif bounds.growth <= UNLIMITED_GROWTH:
            self._max_direct_bytes = float("inf")
        self.is_ordinary = self._max_direct_bytes == float("inf")
        """Whether all texts are encoded directly."""
        setup = b"" if self.is_ordinary else encoder.to_str().encode()
        self._isolation = ForkServer("server.text.bounded_encoder", setup, LIMITS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def copy_of(self, encoder: Encoder) -> "BoundedEncoder":
        """A bounded encoder for `encoder`, a modified copy of this tokenizer, with the same
        bounds."""
        return BoundedEncoder(encoder, self.bounds)

    def encode_batch_fast(
        self, texts: Sequence[Text], add_special_tokens: bool = True
    ) -> list[Encoding]:
        """Encode each text or pair. Raises UserError if the tokenizer fails, panics or exceeds the
        limits, and Overloaded if the isolated process ended for another reason."""
        if not self.is_ordinary and _num_bytes(texts) > self._max_direct_bytes:
            return self._encode_isolated(texts, add_special_tokens)
        try:
            with panics_as_errors():
                encodings: list[Encoding] = self._encoder.encode_batch_fast(
                    texts, add_special_tokens=add_special_tokens
                )
        except Exception as error:
            # The library's own errors have the class Exception.
            if type(error) not in (Exception, NativePanic):
                raise
            raise UserError(f"{_refusal(texts)}: {error}") from None
        return encodings

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Raises RequestFailed if the tokenizer panics."""
        try:
            with panics_as_errors():
                text: str = self._encoder.decode(ids, skip_special_tokens=skip_special_tokens)
        except NativePanic as error:
            raise RequestFailed(
                f"the tokenizer of this model cannot decode {len(ids)} tokens: {error}"
            ) from None
        return text

    def close(self) -> None:
        """Stop the isolated process; safe to call twice."""
        self._isolation.close()

    def _encode_isolated(self, texts: Sequence[Text], add_special_tokens: bool) -> list[Encoding]:
        clean = [
            without_lone_surrogates(text)
            if isinstance(text, str)
            else tuple(map(without_lone_surrogates, text))
            for text in texts
        ]
        with failures_of_requests("encoding a text", _refusal(texts)):
            reply = self._isolation.call(msgspec.msgpack.encode((clean, add_special_tokens)))
        return [_encoding(state) for state in msgspec.msgpack.decode(reply, type=list[bytes])]


def prepare(setup: bytes) -> Call:
    """Entry point of the fork server. `setup`: the tokenizer as JSON."""
    encoder = Encoder.from_str(setup.decode())

    def encode(payload: bytes) -> bytes:
        texts, add_special_tokens = msgspec.msgpack.decode(payload)
        whole = [text if isinstance(text, str) else tuple(text) for text in texts]
        encodings = encoder.encode_batch_fast(whole, add_special_tokens=add_special_tokens)
        reply = msgspec.msgpack.encode([encoding.__getstate__() for encoding in encodings])
        if len(reply) > MAX_REPLY_BYTES:
            raise ValueError(
                f"its tokens take {len(reply)} bytes, at most {MAX_REPLY_BYTES} are allowed"
            )
        return reply

    return encode


def _encoding(state: bytes) -> Encoding:
    encoding = Encoding()
    encoding.__setstate__(state)
    return encoding


def _num_bytes(texts: Sequence[Text]) -> int:
    return sum(
        len(part.encode("utf-8", "replace"))
        for text in texts
        for part in ((text,) if isinstance(text, str) else text)
    )


def _refusal(texts: Sequence[Text]) -> str:
    return f"the tokenizer of this model cannot encode a text of {_num_bytes(texts)} bytes"
