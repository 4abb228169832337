"""The settings of speculation, as vLLM spells them."""

import json

import pytest

from config.errors import ConfigError
from config.loading.sources import from_keywords
from config.params.speculation import SpeculationConfig
from config.speculation.base import SpeculationMethod
from config.speculation.ngram import NgramLimits
from config.speculation.suffix import SuffixLimits


def config(**options: object) -> SpeculationConfig:
    return SpeculationConfig(speculative_config=json.dumps(options))


def test_without_settings_nothing_is_drafted() -> None:
    assert SpeculationConfig().choose() is None


def test_both_forms_of_speculation_settings_are_equivalent() -> None:
    older = SpeculationConfig(
        speculative_model="[ngram]",
        num_speculative_tokens=3,
        ngram_prompt_lookup_max=5,
        ngram_prompt_lookup_min=2,
    )
    newer = config(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=5, prompt_lookup_min=2
    )

    assert older.choose() == newer.choose() == SpeculationMethod("ngram", 3, NgramLimits(5, 2))


def test_a_model_without_a_method_is_a_draft_model() -> None:
    older = SpeculationConfig(
        speculative_model="org/small",
        num_speculative_tokens=3,
        speculative_draft_tensor_parallel_size=2,
    )
    newer = config(
        method="draft_model",
        model="org/small",
        num_speculative_tokens=3,
        draft_tensor_parallel_size=2,
    )

    assert older.choose() == newer.choose()
    assert older.choose() == SpeculationMethod(
        "draft_model", 3, model="org/small", draft_tensor_parallel_size=2
    )


def test_suffix_decoding_is_limited_by_its_depth() -> None:
    found = config(method="suffix", suffix_decoding_max_tree_depth=12).choose()
    factor = config(method="suffix", suffix_decoding_max_spec_factor=2).choose()

    assert found is not None and factor is not None
    assert (found.max_drafts, found.settings) == (12, SuffixLimits(12, 10_000, 1.0, 0.1))
    assert (factor.max_drafts, factor.settings) == (24, SuffixLimits(max_spec_factor=2.0))


def test_a_single_lookup_length_sets_minimum_and_maximum() -> None:
    found = config(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3).choose()

    assert found == SpeculationMethod("ngram", 3, NgramLimits(3, 3))


def test_the_speculative_config_keyword_accepts_a_dictionary() -> None:
    loaded = from_keywords(
        model="m", speculative_config={"method": "ngram", "num_speculative_tokens": 2}
    )

    assert loaded.engine.speculation.choose() == SpeculationMethod("ngram", 2, NgramLimits(4, 2))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "names no method"),
        ({"method": "ngram"}, "has no num_speculative_tokens"),
        (
            {"method": "ngram_gpu", "num_speculative_tokens": 2},
            "'ngram_gpu' .* is not supported",
        ),
        ({"method": "eagle", "num_speculative_tokens": 2}, "names the method eagle and no model"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            "min_token_prob is 1.5, it must be between 0 and 1",
        ),
        ({"method": "suffix", "model": "x"}, "has model, which the method suffix does not use"),
        ({"method": "telepathy", "num_speculative_tokens": 2}, "'telepathy' .* is unknown"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "is 0, it must be between 1 and 64"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "'5', it must be of type int"),
        ({"method": "ngram", "num_speculative_tokens": True}, "True, it must be of type int"),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "model": "x"},
            "has model, which the method ngram does not use",
        ),
        (
            {"method": "draft_model", "num_speculative_tokens": 2},
            "names the method draft_model and no model",
        ),
        (
            {"model": "x", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
            "has prompt_lookup_max, which the method draft_model does not use",
        ),
        (
            {"model": "x", "num_speculative_tokens": 2, "max_model_len": 0},
            "max_model_len is 0, it must be at least 1",
        ),
        (
            {"model": "x", "num_speculative_tokens": 2, "enforce_eager": True},
            "has enforce_eager, which no method of this version uses",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2, "x": 1}, "has 'x', which is not one of"),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_min": 5,
                "prompt_lookup_max": 4,
            },
            "prompt_lookup_min is 5 and prompt_lookup_max is 4",
        ),
    ],
)
def test_invalid_or_contradictory_speculation_settings_are_refused(
    options: dict[str, object], error: str
) -> None:
    if not options:
        options = {"num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=error):
        config(**options)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_speculation_settings_other_than_a_json_object_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is .*(not JSON|a JSON object)"):
        SpeculationConfig(speculative_config=text)


def test_two_flags_that_disagree_are_refused() -> None:
    text = json.dumps({"method": "ngram", "num_speculative_tokens": 2})

    with pytest.raises(ConfigError, match="to 2, and another flag sets it to 3"):
        SpeculationConfig(speculative_config=text, num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size, which the method ngram"):
        SpeculationConfig(speculative_config=text, speculative_draft_tensor_parallel_size=1)
