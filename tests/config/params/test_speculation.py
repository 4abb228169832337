"""The settings of speculation, as vLLM spells them."""

import json

import pytest

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.sources import from_keywords
from config.parallel import ParallelConfig
from config.params.speculation import SpeculationConfig, SpeculationMethod


def config(**options: object) -> SpeculationConfig:
    return SpeculationConfig(speculative_config=json.dumps(options))


def test_without_settings_nothing_is_drafted() -> None:
    assert SpeculationConfig().choose() is None


def test_both_forms_mean_the_same() -> None:
    older = SpeculationConfig(
        speculative_model="[ngram]",
        num_speculative_tokens=3,
        ngram_prompt_lookup_max=5,
        ngram_prompt_lookup_min=2,
    )
    newer = config(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=5, prompt_lookup_min=2
    )

    assert older.choose() == newer.choose() == SpeculationMethod("ngram", 3, 5, 2)


def test_a_single_lookup_is_both() -> None:
    found = config(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3).choose()

    assert found == SpeculationMethod("ngram", 3, 3, 3)


def test_a_keyword_takes_a_dictionary() -> None:
    loaded = from_keywords(
        model="m", speculative_config={"method": "ngram", "num_speculative_tokens": 2}
    )

    assert loaded.engine.speculation.choose() == SpeculationMethod("ngram", 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "names no method"),
        ({"method": "ngram"}, "has no num_speculative_tokens"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "'eagle' .* is not in this version"),
        ({"method": "telepathy", "num_speculative_tokens": 2}, "'telepathy' .* is none"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "is 0, it must be between 1 and 64"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "'5', it must be of type int"),
        ({"method": "ngram", "num_speculative_tokens": True}, "True, it must be of type int"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "has model, which"),
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
def test_what_contradicts_itself_is_refused(options: dict[str, object], error: str) -> None:
    if not options:
        options = {"num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=error):
        config(**options)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is .*(no JSON|a JSON object)"):
        SpeculationConfig(speculative_config=text)


def test_two_flags_that_disagree_are_refused() -> None:
    text = json.dumps({"method": "ngram", "num_speculative_tokens": 2})

    with pytest.raises(ConfigError, match="is 2, and another flag says that it is 3"):
        SpeculationConfig(speculative_config=text, num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="the method ngram has no draft model"):
        SpeculationConfig(speculative_config=text, speculative_draft_tensor_parallel_size=1)


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        EngineConfig(
            "m",
            parallel=ParallelConfig(pipeline_parallel_size=2),
            speculation=config(method="ngram", num_speculative_tokens=2),
        )
