"""The only place where an architecture's name becomes a model."""

import importlib

import torch

from config.errors import ConfigError
from config.model.model_config import ModelConfig
from hpu.models.decoder import Decoder
from hpu.models.encoder import Encoder

FAMILIES = {
    "LlamaForCausalLM": "llama:llama",
    "MistralForCausalLM": "llama:mistral",
    "Qwen2ForCausalLM": "qwen:qwen2",
    "Qwen3ForCausalLM": "qwen:qwen3",
    "GraniteForCausalLM": "granite:granite",
    "Phi3ForCausalLM": "phi:phi3",
}
"""Architecture to "file:function", where the function makes the DecoderSpec."""


HEADLESS = ("Model", "ForSequenceClassification")
"""Endings of the same families where there is no head for tokens."""


def build_body(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Encoder | Decoder:
    """The model of `config` for its hidden states alone, with empty parameters. ConfigError for an
    architecture we don't have."""
    if config.encoder is not None:
        return Encoder(config, dtype=dtype, device=device)
    return _decoder(config, dtype, device, max_model_len, has_head=False)


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
    length = config.max_position if max_model_len is None else max_model_len
    return _decoder(config, dtype, device, length, has_head=True)


def _decoder(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, length: int, *, has_head: bool
) -> Decoder:
    name = config.architecture
    if not has_head:
        name = next(
            (f"{name.removesuffix(e)}ForCausalLM" for e in HEADLESS if name.endswith(e)), name
        )
    if name not in FAMILIES:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, supported are {', '.join(FAMILIES)}"
        )
    file, function = FAMILIES[name].split(":")
    family = getattr(importlib.import_module(f"hpu.models.{file}"), function)
    return Decoder(
        config, family(config), dtype=dtype, device=device, length=length, has_head=has_head
    )
