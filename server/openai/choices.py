"""Deltas to OpenAI choices: log-probabilities, usage, and whole answers. Knows no sockets."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from server.generation.answer_parser import AssistantMessage, ChoiceParser
from server.generation.outputs import Delta, GenerationStream, PositionLogprobs, TokenLogprob

Choice = dict[str, Any]


def usage_of(
    generation: GenerationStream, num_output_tokens: int | None = None, num_thinking_tokens: int = 0
) -> dict[str, Any]:
    """The usage object, as far as the generation has come."""
    output = generation.num_output_tokens if num_output_tokens is None else num_output_tokens
    prompt = generation.num_prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_thinking_tokens},
    }


class TokenFormatter:
    """How a token is written in log-probabilities: its text, or `token_id:N`."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids

    def __call__(self, token: TokenLogprob) -> str:
        return f"token_id:{token.token_id}" if self._as_ids else token.token


def chat_logprobs(positions: Sequence[PositionLogprobs], name: TokenFormatter) -> dict[str, Any]:
    """The logprobs object of a chat choice or delta."""
    content = [
        {
            **_chat_token(position.chosen, name),
            "top_logprobs": [_chat_token(token, name) for token in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob, name: TokenFormatter) -> dict[str, Any]:
    return {"token": name(token), "logprob": token.logprob, "bytes": list(token.bytes)}


class TextLogprobs:
    """The logprobs object of a completion choice, piece by piece; offsets run on."""

    def __init__(self, name: TokenFormatter, hidden: frozenset[int] = frozenset()) -> None:
        """`hidden` are ids that have no text (skipped special tokens)."""
        self._name = name
        self._hidden = hidden
        self._start_at(0)

    def _start_at(self, offset: int) -> None:
        """The next token starts at character `offset`, and a character with it."""
        self._offset = offset
        self._text = ""
        """The prompt as it is echoed, while its tokens are written: control tokens of a text that
        was sent are shown there, those that the tokenizer adds to it are not."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, positions: Sequence[PositionLogprobs]) -> Choice:
        """Generated tokens."""
        made = _empty()
        for position in positions:
            self._one(position, len(position.top), made)
        return made

    def write_prompt(
        self,
        first_id: int,
        first_bytes: bytes,
        positions: Sequence[PositionLogprobs | None],
        width: int,
        text: str,
    ) -> Choice:
        """Prompt tokens with their `width` rivals; the first, which follows on nothing, has null
        for both. `text` is the prompt as it is echoed; what comes next starts behind it."""
        self._text = text
        first = TokenLogprob(first_id, first_bytes.decode("utf-8", "replace"), first_bytes, 0.0, 0)
        made = _empty()
        made["tokens"].append(self._name(first))
        made["token_logprobs"].append(None)
        made["top_logprobs"].append(None)
        made["text_offset"].append(self._take(first))
        for position in positions:
            if position is not None:
                self._one(position, width, made)
        self._start_at(len(text))
        return made

    def _one(self, position: PositionLogprobs, width: int, made: Choice) -> None:
        chosen = position.chosen
        name = self._name(chosen)
        top: dict[str, float] = {}
        for token in position.top[:width]:
            label = self._name(token)
            # Two tokens may look alike (halves of characters). Harnesses find the likeliest by the
            # values, so none may be lost, and the chosen one goes by the name it has in `tokens`.
            if label in top or (label == name and token.token_id != chosen.token_id):
                label = f"token_id:{token.token_id}"
            top[label] = token.logprob
        top[name] = chosen.logprob
        made["tokens"].append(name)
        made["token_logprobs"].append(chosen.logprob)
        made["top_logprobs"].append(top)
        made["text_offset"].append(self._take(chosen))

    def _take(self, token: TokenLogprob) -> int:
        """Where `token` starts, in characters; one that goes on with a character starts there.
        Bytes that are no text count as they are shown: as one replacement character or several."""
        start = self._offset
        if token.token_id in self._hidden:
            if token.token and self._text.startswith(token.token, start):
                self._offset += len(token.token)
            return start
        piece = self._decoder.decode(token.bytes)
        bare = piece.removeprefix(" ")
        if self._text.startswith((piece, bare), start) and not self._text.startswith(piece, start):
            # A space that only the tokenizer puts before a text.
            piece = bare
        self._offset += len(piece)
        return start


def _empty() -> Choice:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined_logprobs(parts: Sequence[Choice]) -> Choice:
    """Logprobs objects one after the other."""
    made = _empty()
    for part in parts:
        for key, entries in part.items():
            made[key] += entries
    return made


def prompt_logprobs_of(
    positions: Sequence[PositionLogprobs | None] | None, width: int
) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` extension: one entry a token, by token id; the first is null."""
    if positions is None:
        return None
    made: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            made.append(None)
            continue
        entries = {}
        for token in (*position.top[:width], position.chosen):
            entries[str(token.token_id)] = {
                "logprob": token.logprob,
                "rank": token.rank,
                "decoded_token": token.token,
            }
        made.append(entries)
    return made


class ChoiceOutput:
    """One choice of an answer that is sent whole."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.message = AssistantMessage()
        """What `texts` mean, where answers are read."""

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def add_parsed(self, delta: Delta, reader: ChoiceParser) -> None:
        """Take a delta that is more than text."""
        self.message.add(reader.parse(delta))
        self.add(delta)
        self.finish_reason = reader.finish_reason(self.finish_reason)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; minus infinity without any. Log-probabilities must have been asked for."""
        if not self.logprobs:
            return -math.inf
        return sum(position.chosen.logprob for position in self.logprobs) / len(self.logprobs)


def most_likely(choices: list[ChoiceOutput], num_drawn: int, num_kept: int) -> list[ChoiceOutput]:
    """Of every `num_drawn` choices in a row the `num_kept` whose tokens are likeliest on average,
    likeliest first."""
    kept = []
    for start in range(0, len(choices), num_drawn):
        drawn = choices[start : start + num_drawn]
        kept += sorted(drawn, key=lambda choice: -choice.mean_logprob)[:num_kept]
    return kept


class DeltaBatcher:
    """Deltas of several choices, held back until `interval` tokens of a choice are together.

    The first tokens and the last ones of a choice are never held back.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, Delta] = {}
        self._begun: set[int] = set()

    def add(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas that may go out now."""
        if self._interval <= 1:
            return deltas
        ripe = []
        for new in deltas:
            delta = _merged(self._held.pop(new.index, None), new)
            first = new.index not in self._begun
            if first or delta.finish_reason or len(delta.token_ids) >= self._interval:
                self._begun.add(new.index)
                ripe.append(delta)
            else:
                self._held[new.index] = delta
        return ripe


def _merged(held: Delta | None, new: Delta) -> Delta:
    if held is None:
        return new
    held.text += new.text
    held.token_ids = held.token_ids + new.token_ids
    if new.logprobs is not None:
        held.logprobs = (held.logprobs or []) + new.logprobs
    held.finish_reason, held.stop_reason = new.finish_reason, new.stop_reason
    return held
