"""SpeculationConfig: settings of speculative decoding, with the names of `vllm serve`."""

from collections.abc import Mapping
from dataclasses import dataclass

from config.errors import ConfigError
from config.json_text import json_setting_problem, parse_json
from config.setting import check_settings, setting
from config.speculation.base import (
    DRAFT_METHODS,
    MAX_DRAFTS,
    Options,
    SpeculationMethod,
    number,
)
from config.speculation.ngram import MAX_LOOKUP

NOT_BUILT = ("ngram_gpu", "custom_class")
"""Methods of vLLM that are not supported."""
OLD_NGRAM = "[ngram]"
"""Value of --speculative-model that selects the method ngram."""

_COMMON: Mapping[str, type] = {"method": str, "num_speculative_tokens": int, "adaptive": bool}
"""Keys of --speculative-config that all methods accept, and the types of their values."""
_REFUSED_KEYS = (
    *("quantization", "code_revision", "disable_by_batch_size", "speculative_token_tree"),
    *("enforce_eager", "disable_padded_drafter_batch", "parallel_drafting", "draft_load_config"),
)
"""Keys of vLLM that no supported method reads."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Settings of speculative decoding. It is off if no setting is given."""

    speculative_config: str | None = setting(
        None,
        'Speculative decoding: {"method": "ngram", "num_speculative_tokens": 5}; '
        "docs/speculation.md has the methods",
        metavar="JSON",
    )
    speculative_model: str | None = setting(
        None, "Older form: [ngram], or the name of a draft model"
    )
    num_speculative_tokens: int | None = setting(
        None, "Maximum draft tokens of a request in a step", minimum=1, maximum=MAX_DRAFTS
    )
    ngram_prompt_lookup_max: int | None = setting(
        None, "Longest n-gram of method ngram", minimum=1, maximum=MAX_LOOKUP
    )
    ngram_prompt_lookup_min: int | None = setting(
        None, "Shortest n-gram of method ngram", minimum=1, maximum=MAX_LOOKUP
    )
    speculative_draft_tensor_parallel_size: int | None = setting(
        None,
        "Devices of the draft model; must equal --tensor-parallel-size",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.choose()

    @property
    def reads_embedding(self) -> bool:
        """Whether the drafter uses the target's embedding."""
        method = self.choose()
        return method is not None and method.facts.reads_embedding

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
            flags["method"] = "ngram"
        else:
            flags["model"] = self.speculative_model
        for name, value in flags.items():
            if value is not None and options.setdefault(name, value) != value:
                raise ConfigError(
                    f"speculative_config sets {name} to {options[name]!r}, and another flag sets "
                    f"it to {value!r}"
                )
        return _speculation(options) if options else None


_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def _parse(text: str | None) -> dict[str, object]:
    if not text:
        return {}
    try:
        options = parse_json(text)
    except ValueError as error:
        problem = json_setting_problem(error, _EXAMPLE)
        raise ConfigError(f"speculative_config is {text!r}, {problem}") from None
    if not isinstance(options, dict):
        raise ConfigError(
            f"speculative_config is {text!r}, it must be a JSON object, such as '{_EXAMPLE}'"
        )
    # null selects vLLM's default, like an absent key.
    return {name: value for name, value in options.items() if value is not None}


def _speculation(options: Options) -> SpeculationMethod:
    types = dict(_COMMON)
    for facts in DRAFT_METHODS.all.values():
        types.update(facts.keys)
    for name, value in options.items():
        if name in _REFUSED_KEYS:
            raise ConfigError(
                f"speculative_config has {name}, which no method of this version uses"
            )
        if name not in types:
            raise ConfigError(
                f"speculative_config has {name!r}, which is not one of {', '.join(types)}"
            )
        if type(value) is not types[name] and (type(value), types[name]) != (int, float):
            raise ConfigError(
                f"speculative_config has {name} {value!r}, it must be of type "
                f"{types[name].__name__}"
            )
    method = _method(options)
    facts = DRAFT_METHODS[method]
    for name in options:
        if name not in (*_COMMON, *facts.keys):
            raise ConfigError(
                f"speculative_config has {name}, which the method {method} does not use"
            )
    max_drafts = facts.default_drafts(options)
    max_drafts = number(options, "num_speculative_tokens", most=MAX_DRAFTS) or max_drafts
    if max_drafts is None:
        raise ConfigError(
            "speculative_config has no num_speculative_tokens: set it to the maximum number of "
            "draft tokens, such as 5"
        )
    if "model" in facts.keys and not options.get("model"):
        raise ConfigError(
            f"speculative_config names the method {method} and no model: set model to the folder "
            "or hub id of the drafter"
        )
    return SpeculationMethod(
        method,
        max_drafts,
        facts.settings(options),
        adaptive=bool(options.get("adaptive", True)),
        model=_text(options, "model") or "",
        revision=_text(options, "revision"),
        max_model_len=number(options, "max_model_len"),
        draft_tensor_parallel_size=number(options, "draft_tensor_parallel_size"),
    )


def _method(options: Options) -> str:
    """The method; without `method`, the method that vLLM infers from the name of the model. Raises
    ConfigError."""
    methods = DRAFT_METHODS.all
    spellings = {word: name for name, facts in methods.items() for word in facts.spellings}
    method = options.get("method")
    method = spellings.get(str(method), method)
    built = ", ".join(methods)
    if method is None:
        if "model" in options:
            model = str(options["model"]).lower()
            return [name for name, facts in methods.items() if facts.is_inferred(model)][-1]
        raise ConfigError(f"speculative_config names no method: it must be one of {built}")
    if method in NOT_BUILT:
        raise ConfigError(
            f"the method {method!r} of speculative_config is not supported: use one of {built}"
        )
    if method not in methods:
        raise ConfigError(
            f"the method {method!r} of speculative_config is unknown: use one of {built}"
        )
    return str(method)


def _text(options: Options, name: str) -> str | None:
    return str(options[name]) if name in options else None
