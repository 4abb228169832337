"""Granite 3: a Llama with four multipliers (embeddings, attention, residual, logits)."""

from config.model.model_config import ModelConfig
from hpu.models.decoder import DecoderSpec, layer_windows


def granite(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        windows=layer_windows(config),
        attention_scale=config.attention_multiplier,
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )
