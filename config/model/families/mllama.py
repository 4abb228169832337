"""The text model of Llama 3.2 Vision: Llama with additional cross-attention layers for images."""

from collections.abc import Mapping
from dataclasses import replace

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, LayerSpec
from config.model.families.dense import llama
from config.model.json_fields import shown
from config.model.model_config import ModelConfig

IMAGE_EMBEDDINGS = 8
"""Embedding rows after the vocabulary, for image tokens."""
_DEFAULT_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


def _mllama(config: ModelConfig) -> DecoderSpec:
    fields = config.fields
    numbers = fields.get("cross_attention_layers", list, list(_DEFAULT_LAYERS))
    # check_shapes first maps the model without layers (num_layers 0): skip the check then.
    if config.num_layers and not all(
        isinstance(number, int) and 0 <= number < config.num_layers for number in numbers
    ):
        raise ConfigError(
            f"cross_attention_layers in {fields.file} is {shown(numbers)}, each must be an "
            f"integer from 0 to {config.num_layers - 1}, below num_hidden_layers"
        )
    spec = llama(config)
    layers = [
        LayerSpec(rope="none", attention="cross") if index in numbers else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), num_further_embeddings=IMAGE_EMBEDDINGS)


FAMILIES: Mapping[str, Family] = {
    "MllamaForCausalLM": Family(
        _mllama, "Llama 3.2 Vision 11B and 90B (text)", "no pipeline stages"
    ),
}
