"""SpeculationConfig: settings of speculative decoding, with the names of `vllm serve`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ConfigError
from config.json_text import parse_json
from config.setting import check_settings, setting

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
EAGLE, EAGLE3, MTP = "eagle", "eagle3", "mtp"
MEDUSA, MLP_SPECULATOR = "medusa", "mlp_speculator"
SUFFIX = "suffix"
_SUFFIX = "suffix_decoding_"
_COMMON = ("method", "num_speculative_tokens", "adaptive")
_HEAD = ("model", "revision", "draft_tensor_parallel_size")
_DRAFTER = (*_HEAD, "max_model_len")
METHOD_KEYS: Mapping[str, tuple[str, ...]] = {
    NGRAM: ("prompt_lookup_max", "prompt_lookup_min"),
    SUFFIX: tuple(
        f"{_SUFFIX}{name}"
        for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    ),
    DRAFT_MODEL: _DRAFTER,
    EAGLE: _DRAFTER,
    EAGLE3: _DRAFTER,
    MTP: ("draft_tensor_parallel_size",),
    MEDUSA: _HEAD,
    MLP_SPECULATOR: _HEAD,
}
"""SpeculationMethod.method -> keys that the method accepts besides the common keys."""
NOT_BUILT = ("ngram_gpu", "custom_class")
"""Methods of vLLM that are not supported."""
SPELLINGS: Mapping[str, str] = {"deepseek_mtp": MTP}
"""Older names of methods."""
OLD_NGRAM = "[ngram]"
"""Value of --speculative-model that selects the ngram method."""
DEFAULT_LOOKUP_MAX, DEFAULT_LOOKUP_MIN = 4, 2
DEFAULT_SUFFIX_DEPTH = 24
MAX_DRAFTS, MAX_LOOKUP = 64, 64
MAX_CACHED_REQUESTS = 10**6

_TYPES: Mapping[str, type] = {
    "method": str,
    "num_speculative_tokens": int,
    "adaptive": bool,
    "prompt_lookup_max": int,
    "prompt_lookup_min": int,
    "model": str,
    "revision": str,
    "max_model_len": int,
    "draft_tensor_parallel_size": int,
    f"{_SUFFIX}max_tree_depth": int,
    f"{_SUFFIX}max_cached_requests": int,
    f"{_SUFFIX}max_spec_factor": float,
    f"{_SUFFIX}min_token_prob": float,
}
_REFUSED_KEYS = (
    *("quantization", "code_revision", "disable_by_batch_size", "speculative_token_tree"),
    *("enforce_eager", "disable_padded_drafter_batch", "parallel_drafting", "draft_load_config"),
)
"""Keys of vLLM that no supported method reads."""


class SuffixLimits(NamedTuple):
    """vLLM's settings of suffix decoding."""

    max_depth: int = DEFAULT_SUFFIX_DEPTH
    """Maximum total tokens of a match and its continuation."""
    max_cached_requests: int = 10_000
    """Maximum number of requests whose outputs are indexed; 0: only the request's own text is
    searched."""
    max_spec_factor: float = 1.0
    """Maximum drafts per token of the match."""
    min_token_prob: float = 0.1
    """Minimum estimated probability of a draft token and all draft tokens before it, from
    continuation counts."""


USUAL_SUFFIX_LIMITS = SuffixLimits()


@dataclass(frozen=True, slots=True)
class SpeculationMethod:
    """Speculation method and its limits."""

    method: str
    max_drafts: int
    """Maximum draft tokens per request and step."""
    lookup_max: int = DEFAULT_LOOKUP_MAX
    lookup_min: int = DEFAULT_LOOKUP_MIN
    """Minimum n-gram length for the method `ngram`; `lookup_max` is the maximum."""
    adaptive: bool = True
    """Whether to draft fewer tokens when drafts cost more time than they save."""
    model: str = ""
    """Draft checkpoint, in the same forms as --model; empty: the method needs no checkpoint."""
    revision: str | None = None
    """Revision of a hub id."""
    max_model_len: int | None = None
    """Maximum context of the drafter in tokens; it drafts nothing for longer contexts. None: the
    limit of the drafter's checkpoint."""
    draft_tensor_parallel_size: int | None = None
    """Number of devices that the drafter is divided among; None: as many as the target."""

    suffix: SuffixLimits = USUAL_SUFFIX_LIMITS
    """Limits of the method `suffix`."""

    @property
    def has_drafter(self) -> bool:
        """Whether a draft model or a draft head proposes tokens."""
        return "draft_tensor_parallel_size" in METHOD_KEYS[self.method]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Settings of speculative decoding. It is off unless a method or a model is given."""

    speculative_config: str | None = setting(
        None,
        'Speculative decoding as JSON: {"method": "ngram", "num_speculative_tokens": 5} or '
        '{"method": "draft_model", "model": "NAME", "num_speculative_tokens": 5}; none: off '
        "(docs/speculation.md)",
    )
    speculative_model: str | None = setting(
        None, "Older form of the method: [ngram], or the name of a draft model"
    )
    num_speculative_tokens: int | None = setting(
        None, "Maximum number of draft tokens of a request in a step", minimum=1, maximum=MAX_DRAFTS
    )
    ngram_prompt_lookup_max: int | None = setting(
        None, "Longest n-gram that the method ngram looks for", minimum=1, maximum=MAX_LOOKUP
    )
    ngram_prompt_lookup_min: int | None = setting(
        None, "Shortest n-gram that the method ngram looks for", minimum=1, maximum=MAX_LOOKUP
    )
    speculative_draft_tensor_parallel_size: int | None = setting(
        None,
        "Number of devices among which the draft model is divided; must equal "
        "--tensor-parallel-size",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.choose()

    @property
    def reads_embedding(self) -> bool:
        """Whether the drafter uses the target's embedding."""
        method = self.choose()
        return method is not None and method.method in (EAGLE, EAGLE3, MTP)

    def max_tokens_per_step(self) -> int:
        """Maximum tokens per sequence in a decode step: its last token and its drafts. Raises
        ConfigError."""
        method = self.choose()
        return 1 if method is None else 1 + method.max_drafts

    def choose(self) -> SpeculationMethod | None:
        """The method with its limits; None: off. Raises ConfigError."""
        options = _parse(self.speculative_config)
        flags: dict[str, object] = {
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_lookup_max": self.ngram_prompt_lookup_max,
            "prompt_lookup_min": self.ngram_prompt_lookup_min,
            "draft_tensor_parallel_size": self.speculative_draft_tensor_parallel_size,
        }
        if self.speculative_model == OLD_NGRAM:
            flags["method"] = NGRAM
        else:
            flags["model"] = self.speculative_model
        for name, value in flags.items():
            if value is not None and options.setdefault(name, value) != value:
                raise ConfigError(
                    f"speculative_config sets {name} to {options[name]!r}, and another flag sets "
                    f"it to {value!r}"
                )
        return _speculation(options) if options else None


def _parse(text: str | None) -> dict[str, object]:
    if not text:
        return {}
    try:
        options = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is {text!r}, which is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"speculative_config is {text!r}, it must be a JSON object")
    # null selects vLLM's default, like an absent key.
    return {name: value for name, value in options.items() if value is not None}


def _speculation(options: Mapping[str, object]) -> SpeculationMethod:
    for name, value in options.items():
        if name in _REFUSED_KEYS:
            raise ConfigError(
                f"speculative_config has {name}, which no method of this version uses"
            )
        if name not in _TYPES:
            raise ConfigError(
                f"speculative_config has {name!r}, which is not one of {', '.join(_TYPES)}"
            )
        if type(value) is not _TYPES[name] and (type(value), _TYPES[name]) != (int, float):
            raise ConfigError(
                f"speculative_config has {name} {value!r}, it must be of type "
                f"{_TYPES[name].__name__}"
            )
    method = _method(options)
    for name in options:
        if name not in (*_COMMON, *METHOD_KEYS[method]):
            raise ConfigError(
                f"speculative_config has {name}, which the method {method} does not use"
            )
    if method == SUFFIX:
        # Only the depth limits the drafts, as in vLLM.
        depth = _number(options, f"{_SUFFIX}max_tree_depth") or DEFAULT_SUFFIX_DEPTH
        options = {"num_speculative_tokens": min(depth, MAX_DRAFTS), **options}
    if "num_speculative_tokens" not in options:
        raise ConfigError(
            "speculative_config has no num_speculative_tokens: set it to the maximum number of "
            "draft tokens, such as 5"
        )
    if "model" in METHOD_KEYS[method] and not options.get("model"):
        raise ConfigError(
            f"speculative_config names the method {method} and no model: set model to the folder "
            "or hub id of the drafter"
        )
    lookup_max, lookup_min = _lookups(options)
    return SpeculationMethod(
        method,
        _limited(options, "num_speculative_tokens", MAX_DRAFTS),
        lookup_max,
        lookup_min,
        adaptive=bool(options.get("adaptive", True)),
        model=_text(options, "model") or "",
        revision=_text(options, "revision"),
        max_model_len=_number(options, "max_model_len"),
        draft_tensor_parallel_size=_number(options, "draft_tensor_parallel_size"),
        suffix=_suffix(options),
    )


def _method(options: Mapping[str, object]) -> str:
    """The method; if only a model is given, the method that vLLM infers from the model's name."""
    method = options.get("method")
    method = SPELLINGS.get(str(method), method)
    built = ", ".join(METHOD_KEYS)
    if method is None:
        if "model" in options:
            name = str(options["model"]).lower()
            return EAGLE3 if "eagle3" in name else EAGLE if "eagle-" in name else DRAFT_MODEL
        raise ConfigError(f"speculative_config names no method: it must be one of {built}")
    if method in NOT_BUILT:
        raise ConfigError(
            f"the method {method!r} of speculative_config is not supported: use one of {built}"
        )
    if method not in METHOD_KEYS:
        raise ConfigError(
            f"the method {method!r} of speculative_config is unknown: use one of {built}"
        )
    return str(method)


def _suffix(options: Mapping[str, object]) -> SuffixLimits:
    """Settings of suffix decoding. Raises ConfigError for numbers out of range."""
    given: dict[str, float] = {}
    for name in METHOD_KEYS[SUFFIX]:
        value = options.get(name)
        if isinstance(value, int | float):
            given[name.removeprefix(_SUFFIX)] = value
    usual = USUAL_SUFFIX_LIMITS
    found = SuffixLimits(
        int(given.get("max_tree_depth", usual.max_depth)),
        int(given.get("max_cached_requests", usual.max_cached_requests)),
        float(given.get("max_spec_factor", usual.max_spec_factor)),
        float(given.get("min_token_prob", usual.min_token_prob)),
    )
    ranges = ((2, 4096), (0, MAX_CACHED_REQUESTS), (0, MAX_DRAFTS), (0, 1))
    for name, number, (least, most) in zip(METHOD_KEYS[SUFFIX], found, ranges, strict=True):
        if not least <= number <= most:
            raise ConfigError(f"{name} is {number}, it must be between {least} and {most}")
    return found


def _lookups(options: Mapping[str, object]) -> tuple[int, int]:
    """(maximum, minimum) n-gram length. If only the maximum or the minimum is given, it is used for
    both, as in vLLM."""
    names = ("prompt_lookup_max", "prompt_lookup_min")
    given = [_limited(options, name, MAX_LOOKUP) for name in names if name in options]
    if not given:
        return DEFAULT_LOOKUP_MAX, DEFAULT_LOOKUP_MIN
    longest, shortest = given[0], given[-1]
    if shortest > longest:
        raise ConfigError(
            f"prompt_lookup_min is {shortest} and prompt_lookup_max is {longest}: set "
            "prompt_lookup_min to at most prompt_lookup_max"
        )
    return longest, shortest


def _text(options: Mapping[str, object], name: str) -> str | None:
    return str(options[name]) if name in options else None


def _number(options: Mapping[str, object], name: str) -> int | None:
    return _limited(options, name, None) if name in options else None


def _limited(options: Mapping[str, object], name: str, most: int | None) -> int:
    value = options[name]
    assert isinstance(value, int)
    if value < 1 or (most is not None and value > most):
        allowed = "at least 1" if most is None else f"between 1 and {most}"
        raise ConfigError(f"{name} is {value}, it must be {allowed}")
    return value
