"""Llama 2 and 3, and Mistral: the plain decoder, with biases and windows where the checkpoint has
them. Knows no tensors."""

from config.model.model_config import ModelConfig
from hpu.models.decoder import DecoderSpec, layer_windows


def llama(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        windows=layer_windows(config),
    )


def mistral(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(windows=layer_windows(config))
