"""rope_fields: rope_scaling and rope_parameters of config.json, alone and together."""

from pathlib import Path
from typing import Any

import pytest

from config.model.json_fields import Fields
from config.model.rope_fields import describe_rope_conflict, rope_fields

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def _fields(**raw: Any) -> Fields:
    return Fields(raw, Path("config.json"))


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_rope_object_is_ignored(empty: Any) -> None:
    assert rope_fields(_fields(rope_parameters=DEFAULT, rope_scaling=empty)) == DEFAULT
    assert rope_fields(_fields(rope_parameters=empty, rope_scaling=YARN)) == YARN
    assert rope_fields(_fields(rope_parameters=empty, rope_scaling=empty)) == {}


def test_rope_scaling_applies_to_full_attention_if_rope_is_set_per_layer_type() -> None:
    several = {FULL: {"rope_theta": 5e5}, SLIDING: DEFAULT}

    found = rope_fields(_fields(rope_parameters=several, rope_scaling=YARN))

    assert found == {FULL: {"rope_theta": 5e5, **YARN}, SLIDING: DEFAULT}


def test_mrope_sections_are_kept_with_rope_scaling() -> None:
    sections = {"mrope_section": [2, 3, 3], "mrope_interleaved": True}

    found = rope_fields(_fields(rope_parameters={**DEFAULT, **sections}, rope_scaling=YARN))

    assert found == {**YARN, **sections}


@pytest.mark.parametrize(
    ("parameters", "scaling", "more", "lost"),
    [
        (DEFAULT, YARN, {}, "rope_type 'default'"),
        ({**DEFAULT, "rope_theta": 5e5}, YARN, {}, "rope_type 'default', rope_theta 500000.0"),
        (DEFAULT, YARN, {"rope_theta": 10000.0}, "rope_type 'default'"),
        ({**DEFAULT, **YARN, "rope_type": "yarn"}, {**YARN, "rope_theta": 1e4}, {}, ""),
        (DEFAULT, {"type": "mrope", "mrope_section": [2, 3, 3]}, {"rope_theta": 10000.0}, ""),
        (DEFAULT, None, {}, ""),
        (None, YARN, {}, ""),
    ],
)
def test_a_conflict_names_the_fields_without_effect(
    parameters: Any, scaling: Any, more: dict[str, Any], lost: str
) -> None:
    fields = _fields(rope_parameters=parameters, rope_scaling=scaling, **more)

    assert describe_rope_conflict(fields) == lost
