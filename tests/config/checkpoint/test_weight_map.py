"""The declared tensors of a checkpoint: names, parameters and shards."""

import pytest

from config.checkpoint.weight_maps.base import WeightSpec
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.errors import ConfigError
from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.model_config import ModelConfig
from config.model.multimodal.text_part import WHOLE_MODELS


def config_of(architecture: str, *, tied: bool = False) -> ModelConfig:
    """Hidden size 8, two heads of 4 over one key head, two layers."""
    return ModelConfig(
        "m", architecture, 10, 8, 16, 2, 2, 1, 4, max_position=64, tie_word_embeddings=tied
    )


def specs_of(architecture: str, *, tied: bool = False) -> dict[str, WeightSpec]:
    config = config_of(architecture, tied=tied)
    return {spec.name: spec for spec in decoder_weight_map(config, decoder_spec(config)).entries()}


def test_a_separate_projection_is_mapped_to_its_outputs_of_the_merged_parameter() -> None:
    specs = specs_of("LlamaForCausalLM")

    key = specs["model.layers.1.self_attn.k_proj.weight"]

    assert key.parameter == "model.layers.1.self_attn.qkv_proj.weight"
    assert (key.shape, key.output_sizes, key.outputs) == ((4, 8), (8, 4, 4), (1,))
    assert key.fields == "num_key_value_heads * head_dim x hidden_size"


def test_a_fused_tensor_is_mapped_to_all_outputs_of_its_parameter() -> None:
    specs = specs_of("Phi3ForCausalLM")

    fused = specs["model.layers.0.mlp.gate_up_proj.weight"]

    assert fused.parameter == fused.name
    assert (fused.shape, fused.output_sizes, fused.outputs) == ((32, 8), (16, 16), (0, 1))


@pytest.mark.parametrize("tied", [False, True])
def test_a_stored_head_is_ignored_only_if_it_is_tied(tied: bool) -> None:
    config = config_of("LlamaForCausalLM", tied=tied)
    weight_map = decoder_weight_map(config, decoder_spec(config))

    assert ("lm_head.weight" in specs_of("LlamaForCausalLM", tied=tied)) is not tied
    assert weight_map.ignores("lm_head.weight") is tied


def test_names_of_a_checkpoint_without_a_head_get_the_prefix() -> None:
    config = config_of("Qwen3Model")
    weight_map = decoder_weight_map(config, decoder_spec(config, has_head=False), has_head=False)

    assert weight_map.map_name("norm.weight") == "model.norm.weight"
    assert weight_map.map_name("score.weight") == "score.weight"
    assert weight_map.ignores("score.weight")


def test_projections_are_sharded_by_outputs_or_inputs_and_norms_are_whole() -> None:
    config = config_of("Qwen2ForCausalLM")

    specs = [*decoder_weight_map(config, decoder_spec(config)).layers[0]]

    dims = {spec.name: spec.shard_dim for spec in specs}
    assert dims["self_attn.q_proj.bias"] == dims["self_attn.q_proj.weight"] == 0
    assert dims["self_attn.o_proj.weight"] == dims["mlp.down_proj.weight"] == 1
    assert dims["input_layernorm.weight"] is None


def test_an_unrecognizable_architecture_is_refused_with_the_list_of_models() -> None:
    with pytest.raises(
        ConfigError, match=r"docs/models\.md lists the \d+ supported architectures"
    ) as refused:
        decoder_spec(config_of("FooBarForCausalLM"))

    assert "nearest" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "WhisperForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "GraniteSpeechForConditionalGeneration",
        "MossTranscribeDiarizeForConditionalGeneration",
    ],
)
def test_a_speech_model_gets_no_text_model_as_suggestion(name: str) -> None:
    with pytest.raises(ConfigError, match=r"speech models are not supported$") as refused:
        decoder_spec(config_of(name))

    assert "nearest" not in str(refused.value)


def test_an_unknown_architecture_is_refused_with_the_nearest_three() -> None:
    with pytest.raises(ConfigError) as refused:
        decoder_spec(config_of("Olmo3ForCausalLM"))

    text, near = str(refused.value).rsplit(" are ", 1)
    assert text == (
        "m is a Olmo3ForCausalLM, which is not supported; the nearest of the "
        f"{len(ARCHITECTURES) + len(WHOLE_MODELS)} architectures in docs/models.md"
    )
    assert "Olmo2ForCausalLM" in near
    assert len(near.split(", ")) == 3
