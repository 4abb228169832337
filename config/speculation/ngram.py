"""Facts of n-gram (prompt lookup) drafting."""

from collections.abc import Mapping
from typing import NamedTuple

from config.errors import ConfigError
from config.speculation.base import MethodFacts, Options, number

MAX_LOOKUP = 64
_LONGEST, _SHORTEST = "prompt_lookup_max", "prompt_lookup_min"


class NgramLimits(NamedTuple):
    """Lengths of the n-grams that are looked up."""

    longest: int = 4
    shortest: int = 2


class Ngram(MethodFacts):
    keys: Mapping[str, type] = {_LONGEST: int, _SHORTEST: int}

    def settings(self, options: Options) -> NgramLimits:
        """If only the maximum or the minimum is given, it is used for both, as in vLLM."""
        lengths = [number(options, name, most=MAX_LOOKUP) for name in (_LONGEST, _SHORTEST)]
        given = [length for length in lengths if length]
        if not given:
            return NgramLimits()
        longest, shortest = given[0], given[-1]
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min is {shortest} and prompt_lookup_max is {longest}: set "
                "prompt_lookup_min to at most prompt_lookup_max"
            )
        return NgramLimits(longest, shortest)


METHODS = {"ngram": Ngram()}
