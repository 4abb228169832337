"""SpeculationConfig: how tokens are drafted that a decode verifies, as `vllm serve` spells it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from config.errors import ConfigError
from config.setting import check_settings, setting

NGRAM = "ngram"
BUILT = (NGRAM,)
"""Values of SpeculationMethod.method."""
NOT_BUILT = (
    *("suffix", "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp"),
    *("deepseek_mtp", "ngram_gpu", "custom_class"),
)
"""Methods of vLLM that are refused."""
OLD_NGRAM = "[ngram]"
"""The value of --speculative-model that means the method."""
DEFAULT_LOOKUP_MAX, DEFAULT_LOOKUP_MIN = 4, 2
MAX_DRAFTS, MAX_LOOKUP = 64, 64

_KEYS = {
    "method": str,
    "num_speculative_tokens": int,
    "prompt_lookup_max": int,
    "prompt_lookup_min": int,
    "adaptive": bool,
}
_REFUSED_KEYS = (
    *("model", "draft_tensor_parallel_size", "quantization", "max_model_len", "revision"),
    *("code_revision", "disable_by_batch_size", "speculative_token_tree", "enforce_eager"),
    *("disable_padded_drafter_batch", "parallel_drafting", "draft_load_config"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
)
"""Keys of vLLM that mean nothing to the methods that are built."""


@dataclass(frozen=True, slots=True)
class SpeculationMethod:
    """A method of speculation and its limits."""

    method: str
    max_drafts: int
    """Draft tokens of a request in one step."""
    lookup_max: int = DEFAULT_LOOKUP_MAX
    lookup_min: int = DEFAULT_LOOKUP_MIN
    """Longest and shortest n-gram that `ngram` looks for."""
    adaptive: bool = True
    """Whether fewer tokens are drafted where drafts cost more than they bring."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding; off unless a method is named."""

    speculative_config: str | None = setting(
        None,
        'Speculative decoding as JSON: {"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_max": 4, "prompt_lookup_min": 2}; none: off (docs/speculation.md)',
    )
    speculative_model: str | None = setting(None, "Older form of the method: [ngram]")
    num_speculative_tokens: int | None = setting(
        None, "Draft tokens of a request in one step, at most", minimum=1, maximum=MAX_DRAFTS
    )
    ngram_prompt_lookup_max: int | None = setting(
        None, "Longest n-gram that the method ngram looks for", minimum=1, maximum=MAX_LOOKUP
    )
    ngram_prompt_lookup_min: int | None = setting(
        None, "Shortest n-gram that the method ngram looks for", minimum=1, maximum=MAX_LOOKUP
    )
    speculative_draft_tensor_parallel_size: int | None = setting(
        None, "Devices that the draft model is divided among", minimum=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.choose()

    def choose(self) -> SpeculationMethod | None:
        """The method with its limits; None: off. Raises ConfigError."""
        options = _parse(self.speculative_config)
        flags = {
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_lookup_max": self.ngram_prompt_lookup_max,
            "prompt_lookup_min": self.ngram_prompt_lookup_min,
        }
        given: dict[str, object] = {n: value for n, value in flags.items() if value is not None}
        if self.speculative_model is not None:
            if self.speculative_model != OLD_NGRAM:
                raise ConfigError(
                    f"speculative_model is {self.speculative_model!r}, and drafts of a model are "
                    f"not in this version: use {OLD_NGRAM}"
                )
            given["method"] = NGRAM
        for name, value in given.items():
            if options.setdefault(name, value) != value:
                raise ConfigError(
                    f"speculative_config says that {name} is {options[name]!r}, and another flag "
                    f"says that it is {value!r}"
                )
        if self.speculative_draft_tensor_parallel_size is not None:
            raise ConfigError(
                "speculative_draft_tensor_parallel_size is "
                f"{self.speculative_draft_tensor_parallel_size}, and the method ngram has no draft "
                "model"
            )
        return _speculation(options) if options else None


def _parse(text: str | None) -> dict[str, object]:
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is {text!r}, which is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"speculative_config is {text!r}, it must be a JSON object")
    # vLLM's own defaults written out ask for nothing.
    return {name: value for name, value in options.items() if value is not None}


def _speculation(options: Mapping[str, object]) -> SpeculationMethod:
    for name, value in options.items():
        if name in _REFUSED_KEYS:
            raise ConfigError(
                f"speculative_config has {name}, which the method ngram does not use, and no other "
                "method is in this version"
            )
        if name not in _KEYS:
            raise ConfigError(
                f"speculative_config has {name!r}, which is not one of {', '.join(_KEYS)}"
            )
        if type(value) is not _KEYS[name]:
            raise ConfigError(
                f"speculative_config has {name} {value!r}, it must be of type "
                f"{_KEYS[name].__name__}"
            )
    method = options.get("method")
    if method is None:
        raise ConfigError(f"speculative_config names no method: {NGRAM} is the one in this version")
    if method in NOT_BUILT:
        raise ConfigError(
            f"the method {method!r} of speculative_config is not in this version, which has "
            f"{', '.join(BUILT)}"
        )
    if method not in BUILT:
        raise ConfigError(
            f"the method {method!r} of speculative_config is none; this version has "
            f"{', '.join(BUILT)}"
        )
    if "num_speculative_tokens" not in options:
        raise ConfigError("speculative_config has no num_speculative_tokens")
    lookup_max, lookup_min = _lookups(options)
    return SpeculationMethod(
        str(method),
        _limited(options, "num_speculative_tokens", MAX_DRAFTS),
        lookup_max,
        lookup_min,
        adaptive=bool(options.get("adaptive", True)),
    )


def _lookups(options: Mapping[str, object]) -> tuple[int, int]:
    """The longest and the shortest n-gram; one that is not given is the other's, as in vLLM."""
    names = ("prompt_lookup_max", "prompt_lookup_min")
    given = [_limited(options, name, MAX_LOOKUP) for name in names if name in options]
    if not given:
        return DEFAULT_LOOKUP_MAX, DEFAULT_LOOKUP_MIN
    longest, shortest = given[0], given[-1]
    if shortest > longest:
        raise ConfigError(
            f"prompt_lookup_min is {shortest} and prompt_lookup_max is {longest}: the shortest "
            "n-gram is longer than the longest"
        )
    return longest, shortest


def _limited(options: Mapping[str, object], name: str, most: int) -> int:
    value = options[name]
    assert isinstance(value, int)
    if not 1 <= value <= most:
        raise ConfigError(f"{name} is {value}, it must be between 1 and {most}")
    return value
