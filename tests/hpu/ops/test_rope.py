"""Rotary frequencies compared with transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from releases import transformers_before
from tiny_models import rope_fields
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from config.checkpoint.operations import ROPE_TYPES
from config.errors import ConfigError
from config.model.model_config import ModelConfig, RopeConfig, RopeScaling
from hpu.ops.rope import RotaryEmbedding, inverse_frequencies, rotate

THETA = 500000.0
ROPE = RopeConfig(THETA)
PLAIN = ModelConfig("here", "LlamaForCausalLM", 8, 512, 8, 1, 4, 4, 128, 4096, rope=ROPE)


def frequencies_of(rope: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    return inverse_frequencies(rope, 128, length=length, max_position=4096)


SCALINGS = {
    "linear": RopeScaling("linear", factor=3.0),
    "dynamic": RopeScaling("dynamic", factor=4.0),
    "llama3": RopeScaling("llama3", factor=8.0, original_max_position=1024),
    "llama3, other borders": RopeScaling(
        "llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=9.0, original_max_position=512
    ),
    "llama3, one border, as Llama 4 Scout": RopeScaling(
        "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=8192
    ),
    "yarn": RopeScaling("yarn", factor=4.0, original_max_position=1024),
    "yarn, untruncated": RopeScaling(
        "yarn", factor=4.0, original_max_position=1024, truncate=False
    ),
    "yarn, other ramp": RopeScaling(
        "yarn", factor=16.0, original_max_position=256, beta_fast=20.0, beta_slow=2.0
    ),
    "yarn, attention factor": RopeScaling(
        "yarn", factor=4.0, original_max_position=1024, attention_factor=0.9
    ),
    "yarn, mscale": RopeScaling(
        "yarn", factor=16.0, original_max_position=256, mscale=0.7, mscale_all_dim=1.3
    ),
    "yarn, factor beyond the positions": RopeScaling(
        "yarn", factor=40.0, original_max_position=1024
    ),
    "longrope": RopeScaling(
        "longrope",
        factor=4.0,
        original_max_position=1024,
        short_factor=tuple(1 + i / 64 for i in range(64)),
        long_factor=tuple(1 + i / 8 for i in range(64)),
    ),
}

# Older releases treat scalings that they do not know differently from the published code.
LATER = {
    "yarn, untruncated": pytest.mark.skipif(
        transformers_before("4.55"),
        reason="transformers before 4.55 rounds the ends of yarn's ramp whatever truncate says",
    ),
    "yarn, factor beyond the positions": pytest.mark.skipif(
        transformers_before("4.56"),
        reason="transformers before 4.56 puts max_position_embeddings / original_max_position_"
        "embeddings in the place of yarn's factor",
    ),
}


def _reference(scaling: RopeScaling, length: int) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of transformers for the same scaling and a sequence of
    `length` tokens."""
    names = {
        "rope_type": scaling.kind,
        "rope_theta": THETA,
        "factor": scaling.factor,
        "attention_factor": scaling.attention_factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
    }
    by_kind = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow"),
        "longrope": ("short_factor", "long_factor"),
    }
    rope: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    for name in by_kind.get(scaling.kind, ()):
        value = getattr(scaling, name)
        rope[name] = list(value) if isinstance(value, tuple) else value
    if not scaling.truncate:
        rope["truncate"] = False
    fields = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": PLAIN.max_position,
        "rope_parameters": rope,
    }
    config = LlamaConfig(**rope_fields(fields))
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, None, seq_len=length)
    return frequencies, float(factor)


@pytest.mark.parametrize("length", [512, 4096, 9000])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LATER.get(name, ())) for name in SCALINGS]
)
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    scaling = SCALINGS[name]

    frequencies, factor = frequencies_of(replace(ROPE, scaling=scaling), length)

    expected, expected_factor = _reference(scaling, length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_every_accepted_rope_type_is_compared() -> None:
    assert {"default", *(scaling.kind for scaling in SCALINGS.values())} == set(ROPE_TYPES)


def test_the_error_names_an_unknown_scaling() -> None:
    rope = replace(ROPE, scaling=RopeScaling("spiral"))

    with pytest.raises(ConfigError, match="'spiral' is not one of default, linear"):
        frequencies_of(rope, 10)


def test_longrope_with_too_few_factors_is_refused_with_both_numbers() -> None:
    rope = replace(ROPE, scaling=RopeScaling("longrope", short_factor=(1.0, 2.0)))

    with pytest.raises(ConfigError, match="2 factors, it must have 64 for 128 rope dimensions"):
        frequencies_of(rope, 10)


def test_products_of_rotated_heads_depend_only_on_the_distance() -> None:
    rotary = RotaryEmbedding(
        PLAIN, ROPE, length=200, dtype=torch.float32, device=torch.device("cpu")
    )
    heads = torch.randn(1, 1, 2, 128, generator=torch.Generator().manual_seed(0))

    def product(first: int, second: int) -> torch.Tensor:
        query = rotate(heads[:, :, :1], rotary(torch.tensor([[first]])))
        key = rotate(heads[:, :, 1:], rotary(torch.tensor([[second]])))
        return (query * key).sum()

    torch.testing.assert_close(product(17, 5), product(190, 178), rtol=1e-3, atol=1e-3)
    assert abs(product(17, 5) - product(18, 5)) > 1e-2


def test_entries_beyond_the_rotated_part_are_unchanged() -> None:
    half = replace(ROPE, partial=0.5)
    rotary = RotaryEmbedding(
        PLAIN, half, length=200, dtype=torch.float32, device=torch.device("cpu")
    )
    heads = torch.randn(1, 3, 2, 128, generator=torch.Generator().manual_seed(0))

    turned = rotate(heads, rotary(torch.tensor([[4, 5, 6]])))

    assert torch.equal(turned[..., 64:], heads[..., 64:])
    assert not torch.equal(turned[..., :64], heads[..., :64])
