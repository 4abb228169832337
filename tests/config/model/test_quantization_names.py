"""Names of quantization methods, and of modules that a quantized checkpoint leaves in plain
weights."""

import pytest

from config.loading.sources import load
from config.model.quantization.base import QuantizationConfig, Rule, WeightScheme
from config.model.quantization.registry import METHODS

MODULE = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "is_plain"),
    [
        ("model.layers.1.mlp.down_proj", True),
        ("down_proj", True),
        ("layers.1", True),
        ("language_model.model.layers.1.mlp.down_proj", True),
        ("model.language_model.layers.1.mlp.down_proj", True),
        ("model.language_model.layers.1", True),
        ("re:.*down_proj", True),
        ("re:language_model[.]model[.]layers[.]1[.].*", True),
        ("re:model[.]language_model[.]layers[.]1[.].*", True),
        ("model.layers.11.mlp.down_proj", False),
        ("model.language_model.layers.11", False),
        ("model.visual", False),
        ("re:vision_tower.*", False),
        ("re:model[.]visual.*", False),
        ("re:.*visual.*", False),
        # Python's `re` would backtrack for years on this pattern.
        ("re:(([a-z0-9_.]+)+)+!", False),
        ("multi_modal_projector", False),
    ],
)
def test_ignored_modules_match_names_of_the_multimodal_model(pattern: str, is_plain: bool) -> None:
    scheme = WeightScheme(8, ())
    config = QuantizationConfig("gptq", (Rule(("Linear",), scheme),), ignored=(pattern,))

    assert config.scheme_of(MODULE) is (None if is_plain else scheme)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_of_a_checkpoint_is_a_value_of_the_flag(method: str) -> None:
    loaded = load(["demo", f"--quantization={method}"], environ={})

    assert loaded.engine.quantization == method.removeprefix("intel/")
