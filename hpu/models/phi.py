"""Phi 3 and 4-mini: merged weights in the checkpoint, and only a part of each head rotated."""

from config.model.model_config import ModelConfig
from hpu.models.decoder import DecoderSpec, layer_windows


def phi3(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(merged_names=True, windows=layer_windows(config))
