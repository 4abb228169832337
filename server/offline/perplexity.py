"""Perplexity of a model on a text."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from config.params.sampling import SamplingParams
from server.offline.llm import LLM

TEXT = Path(__file__).resolve().parent / "perplexity.txt"
"""Text for the measurement: 1,714 tokens with the demo tokenizer; written for gaudiserve."""
WINDOW = 512


@dataclass(frozen=True)
class Reading:
    """Predictions of a model for each token of a text. Two Readings of the same text and tokenizer
    have the same tokens."""

    logprobs: list[float]
    likeliest: list[int]
    """The most likely token at each position."""

    @property
    def perplexity(self) -> float:
        """exp(-mean(log p)) over the tokens."""
        return math.exp(-statistics.fmean(self.logprobs))

    def agreement(self, other: "Reading") -> float:
        """Fraction of positions where both readings have the same most likely token."""
        pairs = zip(self.likeliest, other.likeliest, strict=True)
        return statistics.fmean(own == other for own, other in pairs)


def windows(llm: LLM, text: str, size: int) -> list[list[int]]:
    """Split the tokens of a text into windows of at most `size` tokens. A window starts with the
    tokenizer's BOS token; without a BOS token, a window after the first starts with the last token
    of the previous window. Every token with a predecessor is predicted exactly once, from 1 to
    `size` - 1 earlier tokens."""
    tokenizer = llm.get_tokenizer()
    tokens = tokenizer.encode_now(text, add_special_tokens=False)
    begin = tokenizer.encode_now(text, add_special_tokens=True)[:1]
    stride = size - 1
    if begin != tokens[:1]:
        return [begin + tokens[at : at + stride] for at in range(0, len(tokens), stride)]
    return [tokens[at : at + size] for at in range(0, len(tokens) - 1, stride)]


def read(llm: LLM, text: str, window: int = WINDOW) -> Reading:
    """Predictions of `llm` for `text` in windows of `window` tokens; see `windows`."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate(windows(llm, text, window), params, use_tqdm=False)
    logprobs, likeliest = [], []
    for output in outputs:
        assert output.prompt_logprobs is not None, "they were asked for"
        following = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        for token, entries in following:
            assert entries is not None, "only a prompt's first token follows on nothing"
            logprobs.append(entries[token].logprob)
            likeliest.append(min(entries, key=lambda token: entries[token].rank))
    return Reading(logprobs, likeliest)


def perplexity(llm: LLM, text: str, window: int = WINDOW) -> float:
    """exp(-mean(log p)) over the tokens of `text`; see `windows`."""
    return read(llm, text, window).perplexity
