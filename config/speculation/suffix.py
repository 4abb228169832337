"""Facts of suffix decoding (https://arxiv.org/abs/2411.04975), with vLLM's settings."""

from collections.abc import Mapping
from typing import NamedTuple

from config.errors import ConfigError
from config.speculation.base import MAX_DRAFTS, MethodFacts, Options, number

MAX_CACHED_REQUESTS = 10**6
_PREFIX = "suffix_decoding_"


class SuffixLimits(NamedTuple):
    """vLLM's settings of suffix decoding."""

    max_depth: int = 24
    """Maximum total tokens of a match and its continuation."""
    max_cached_requests: int = 10_000
    """Maximum number of requests whose outputs are indexed; 0: only the request's own text is
    searched."""
    max_spec_factor: float = 1.0
    """Maximum drafts per token of the match."""
    min_token_prob: float = 0.1
    """Minimum estimated probability of a draft token and all draft tokens before it, from
    continuation counts."""


USUAL_LIMITS = SuffixLimits()
_RANGES = ((2, 4096), (0, MAX_CACHED_REQUESTS), (0, MAX_DRAFTS), (0, 1))


class Suffix(MethodFacts):
    keys: Mapping[str, type] = {
        f"{_PREFIX}max_tree_depth": int,
        f"{_PREFIX}max_cached_requests": int,
        f"{_PREFIX}max_spec_factor": float,
        f"{_PREFIX}min_token_prob": float,
    }

    def default_drafts(self, options: Options) -> int:
        """max_tree_depth, as in vLLM, but at most MAX_DRAFTS."""
        depth = number(options, f"{_PREFIX}max_tree_depth") or USUAL_LIMITS.max_depth
        return min(depth, MAX_DRAFTS)

    def settings(self, options: Options) -> SuffixLimits:
        values: list[float] = []
        for name, usual, (least, most) in zip(self.keys, USUAL_LIMITS, _RANGES, strict=True):
            given = options.get(name, usual)
            assert isinstance(given, int | float)
            value = type(usual)(given)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, it must be between {least} and {most}")
            values.append(value)
        depth, num_requests, factor, probability = values
        return SuffixLimits(int(depth), int(num_requests), factor, probability)

    def reads_earlier_outputs(self, settings: object) -> bool:
        assert isinstance(settings, SuffixLimits)
        return settings.max_cached_requests > 0


METHODS = {"suffix": Suffix()}
