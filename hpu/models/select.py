"""The only place where an architecture's name becomes a model."""

import importlib

import torch

from config.errors import ConfigError
from config.model import ModelConfig
from hpu.models.decoder import Decoder

FAMILIES = {
    "LlamaForCausalLM": "llama:llama",
    "MistralForCausalLM": "llama:mistral",
    "Qwen2ForCausalLM": "qwen:qwen2",
    "Qwen3ForCausalLM": "qwen:qwen3",
    "GraniteForCausalLM": "granite:granite",
    "Phi3ForCausalLM": "phi:phi3",
}
"""Architecture to "file:function", where the function makes the DecoderSpec."""


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
) -> Decoder:
    """The decoder of `config` with empty parameters.

    `max_model_len`: tokens of the longest sequence that will be served (None: the checkpoint's
    own); it sizes the rotary table, and some rope scalings depend on it. ConfigError for an
    architecture we don't have.
    """
    if config.architecture not in FAMILIES:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, supported are {', '.join(FAMILIES)}"
        )
    file, function = FAMILIES[config.architecture].split(":")
    family = getattr(importlib.import_module(f"hpu.models.{file}"), function)
    length = config.max_position if max_model_len is None else max_model_len
    return Decoder(config, family(config), dtype=dtype, device=device, length=length)
