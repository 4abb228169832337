"""Qwen 2, 2.5 and 3: biases on queries, keys and values; from 3 on norms on queries and keys."""

from config.model.model_config import ModelConfig
from hpu.models.decoder import DecoderSpec, layer_windows


def qwen2(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(qkv_bias=True, windows=layer_windows(config))


def qwen3(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
        head_norm=True,
        windows=layer_windows(config),
    )
