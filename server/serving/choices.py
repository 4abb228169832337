"""Choices of an OpenAI response: log-probabilities, complete choices and batched deltas."""

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from config.json_text import Json
from server.generation.answer_parser import AssistantMessage
from server.generation.logprobs import PositionLogprobs, TokenLogprob
from server.generation.outputs import Delta, Output

Choice = Json
TokenFormatter = Callable[[TokenLogprob], str]


def token_formatter(*, as_ids: bool) -> TokenFormatter:
    """Formatter for tokens in log-probabilities: the token's text, or `token_id:N`."""
    if as_ids:
        return lambda token: f"token_id:{token.token_id}"
    return lambda token: token.token


def chat_logprobs(positions: Sequence[PositionLogprobs], name: TokenFormatter) -> Json:
    """The logprobs object of a chat choice or delta."""
    content = [
        {
            **_chat_token(position.chosen, name),
            "top_logprobs": [_chat_token(token, name) for token in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def consumed(positions: list[PositionLogprobs] | None) -> Iterator[PositionLogprobs]:
    """Remove the positions from the list and yield them in order: freeing a million positions at
    once holds the GIL for 0.2 s."""
    positions = positions or []
    positions.reverse()
    while positions:
        yield positions.pop()


def encoded_chat_logprobs(positions: Iterable[PositionLogprobs], name: TokenFormatter) -> Json:
    """`chat_logprobs` of a complete choice, as encoded JSON per position: it takes a fifth of the
    memory of the objects, and the garbage collector does not traverse it."""
    content: list[msgspec.Raw] = []
    for position in positions:
        (entry,) = chat_logprobs([position], name)["content"]
        content.append(msgspec.Raw(msgspec.json.encode(entry)))
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob, name: TokenFormatter) -> Json:
    return {"token": name(token), "logprob": token.logprob, "bytes": list(token.bytes)}


class TextLogprobs:
    """Writer of the logprobs objects of a text completion; text offsets continue between calls."""

    def __init__(self, name: TokenFormatter, hidden: frozenset[int] = frozenset()) -> None:
        """`hidden`: ids of tokens without text (skipped special tokens)."""
        self._name = name
        self._hidden = hidden
        self._start_at(0)

    def _start_at(self, offset: int) -> None:
        """Set the character offset of the next token and reset the UTF-8 decoder."""
        self._offset = offset
        self._text = ""
        """The echoed prompt during `write_prompt`, otherwise empty. It may lack the control
        tokens that the tokenizer added."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, positions: Iterable[PositionLogprobs]) -> Choice:
        """The logprobs object of generated tokens."""
        result = _empty()
        for position in positions:
            self._add_token(position, len(position.top), result)
        return result

    def write_prompt(
        self,
        first_id: int,
        first_bytes: bytes,
        positions: Iterable[PositionLogprobs | None],
        width: int,
        text: str,
    ) -> Choice:
        """The logprobs object of the prompt's tokens, with the `width` most likely tokens at each
        position. The first token has null log-probabilities. `text`: the echoed prompt."""
        self._text = text
        first = TokenLogprob(first_id, first_bytes.decode("utf-8", "replace"), first_bytes, 0.0, 0)
        result = _empty()
        result["tokens"].append(self._name(first))
        result["token_logprobs"].append(None)
        result["top_logprobs"].append(None)
        result["text_offset"].append(self._offset_of(first))
        for position in positions:
            if position is not None:
                self._add_token(position, width, result)
        self._start_at(len(text))
        return result

    def _add_token(self, position: PositionLogprobs, width: int, result: Choice) -> None:
        chosen = position.chosen
        name = self._name(chosen)
        top: dict[str, float] = {}
        for token in position.top[:width]:
            label = self._name(token)
            # Two tokens can have the same text (partial characters). Evaluation harnesses take the
            # maximum of the values, so each token needs its own key; the chosen token keeps its
            # name in `tokens`.
            if label in top or (label == name and token.token_id != chosen.token_id):
                label = f"token_id:{token.token_id}"
            top[label] = token.logprob
        top[name] = chosen.logprob
        result["tokens"].append(name)
        result["token_logprobs"].append(chosen.logprob)
        result["top_logprobs"].append(top)
        result["text_offset"].append(self._offset_of(chosen))

    def _offset_of(self, token: TokenLogprob) -> int:
        """Character offset of `token`; a token that continues a character starts at that character.
        Invalid bytes count as the replacement characters that are shown for them."""
        start = self._offset
        if token.token_id in self._hidden:
            if token.token and self._text.startswith(token.token, start):
                self._offset += len(token.token)
            return start
        piece = self._decoder.decode(token.bytes)
        stripped = piece.removeprefix(" ")
        if self._text.startswith((piece, stripped), start) and not self._text.startswith(
            piece, start
        ):
            # The tokenizer added this space at the start of the text.
            piece = stripped
        self._offset += len(piece)
        return start


def _empty() -> Choice:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined_logprobs(parts: Sequence[Choice]) -> Choice:
    """Concatenate logprobs objects."""
    result = _empty()
    for part in parts:
        for key, entries in part.items():
            result[key] += entries
    return result


def prompt_logprobs_of(
    positions: Iterable[PositionLogprobs | None] | None, width: int
) -> list[msgspec.Raw | None] | None:
    """The list `prompt_logprobs`: for each prompt token a JSON object, token id -> log-probability,
    rank and text; null for the first token. None if `positions` is None."""
    if positions is None:
        return None
    result: list[msgspec.Raw | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        entries = {}
        for token in (*position.top[:width], position.chosen):
            entries[str(token.token_id)] = {
                "logprob": token.logprob,
                "rank": token.rank,
                "decoded_token": token.token,
            }
        # Encoded JSON takes a fifth of the memory of the objects.
        result.append(msgspec.Raw(msgspec.json.encode(entries)))
    return result


@dataclass(slots=True)
class ChoiceOutput(Output):
    """A choice of a complete response."""

    message: AssistantMessage = field(default_factory=AssistantMessage)
    """The parsed output."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; minus infinity without log-probabilities."""
        if not self.logprobs:
            return -math.inf
        return sum(position.chosen.logprob for position in self.logprobs) / len(self.logprobs)


def most_likely(choices: list[ChoiceOutput], num_drawn: int, num_kept: int) -> list[ChoiceOutput]:
    """The `num_kept` choices with the highest mean log-probability of each group of `num_drawn`
    consecutive choices, highest first."""
    best = []
    for start in range(0, len(choices), num_drawn):
        drawn = choices[start : start + num_drawn]
        best += sorted(drawn, key=lambda choice: -choice.mean_logprob)[:num_kept]
    return best


class DeltaBatcher:
    """Buffers deltas until a choice has `interval` new tokens.

    The first and the last delta of a choice are never delayed.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._buffered: dict[int, Delta] = {}
        self._started: set[int] = set()

    def add(self, deltas: list[Delta]) -> list[Delta]:
        """Add `deltas`; returns the deltas to send now."""
        if self._interval <= 1:
            return deltas
        ready = []
        for new in deltas:
            delta = _merged(self._buffered.pop(new.index, None), new)
            first = new.index not in self._started
            if first or delta.finish_reason or len(delta.token_ids) >= self._interval:
                self._started.add(new.index)
                ready.append(delta)
            else:
                self._buffered[new.index] = delta
        return ready


def _merged(buffered: Delta | None, new: Delta) -> Delta:
    if buffered is None:
        return new
    buffered.text += new.text
    buffered.token_ids = buffered.token_ids + new.token_ids
    if new.logprobs is not None:
        buffered.logprobs = (buffered.logprobs or []) + new.logprobs
    buffered.finish_reason, buffered.stop_reason = new.finish_reason, new.stop_reason
    return buffered
