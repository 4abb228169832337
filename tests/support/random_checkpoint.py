"""Checkpoints of random tensors with the shapes of a family's weight map."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import COMMON
from torch import Tensor

from config.checkpoint.weight_maps.base import WeightSpec
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.model import architectures
from config.model.decoder_spec import DecoderSpec, Family, uniform_layers
from config.model.families import gpt_oss
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config


def _combined(config: ModelConfig) -> DecoderSpec:
    """gpt-oss with the router of Phi-MoE, whose weights are applied to the inputs as in Llama 4."""
    spec = gpt_oss.FAMILIES["GptOssForCausalLM"].make_spec(config)
    assert spec.moe is not None
    return replace(spec, moe=replace(spec.moe, sparse_mixer=0.1, scales_input=True))


def _biased(config: ModelConfig) -> DecoderSpec:
    """ALiBi, capped scores, learned positions, two parallel layer norms, a layer norm per head, and
    an MLP without a gate."""
    layers = tuple(layer._replace(rope="none") for layer in uniform_layers(config))
    return DecoderSpec(
        layers=layers,
        norm="layer",
        norm_bias=True,
        arrangement="parallel_two_norms",
        gated_mlp=False,
        qk_norm="each_head",
        learned_positions=True,
        attention_soft_cap=1.5,
        alibi_max_bias=8.0,
    )


def _sinks(config: ModelConfig) -> DecoderSpec:
    """Sinks, clamped projections, norms after attention and MLP, and a norm over all heads."""
    layers = tuple(layer._replace(sinks=True) for layer in uniform_layers(config))
    return DecoderSpec(layers=layers, arrangement="after", qk_norm="all")


FAMILIES: dict[str, Family] = {
    "BiasedForCausalLM": Family(_biased, "for a test"),
    "SinksForCausalLM": Family(_sinks, "for a test"),
    "CombinedForCausalLM": gpt_oss.FAMILIES["GptOssForCausalLM"]._replace(make_spec=_combined),
}
TINY: dict[str, dict[str, Any]] = {
    "BiasedForCausalLM": {"num_hidden_layers": 1},
    "SinksForCausalLM": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "clip_qkv": 1.0,
        "partial_rotary_factor": 0.5,
    },
    "GptOssForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        # Low, so that values are clamped.
        "swiglu_limit": 0.6,
    },
    "Llama4ForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "intermediate_size": 64,
    },
    "PhimoeForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2},
}
TINY["CombinedForCausalLM"] = TINY["GptOssForCausalLM"]


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add FAMILIES to the registry."""
    for name, family in FAMILIES.items():
        monkeypatch.setitem(architectures.ARCHITECTURES, name, family)


def write_config(folder: Path, architecture: str, **overrides: Any) -> None:
    """Write config.json of a tiny model."""
    fields = {**COMMON, **TINY[architecture], "architectures": [architecture], **overrides}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


def write_random(folder: Path, architecture: str, **overrides: Any) -> Path:
    """A tiny float32 checkpoint; equal arguments give equal tensors."""
    write_config(folder, architecture, **overrides)
    config = read_model_config(str(folder))
    weight_map = decoder_weight_map(config, architectures.decoder_spec(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {spec.name: _tensor(spec, generator) for spec in weight_map.entries()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_mxfp4(folder: Path) -> Path:
    """A tiny gpt-oss with MXFP4 experts. Each token uses all experts, so that rounding does not
    change the routing."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_experts_per_tok": 4}
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    return write_random(folder, "GptOssForCausalLM", **sizes, **config)


def _tensor(spec: WeightSpec, generator: torch.Generator) -> Tensor:
    if spec.mxfp4:
        # Blocks may be any bytes; scales are powers of two, and 127 means 1.
        limits = (0, 256) if spec.mxfp4 == "blocks" else (120, 127)
        return torch.randint(*limits, spec.shape, dtype=torch.uint8, generator=generator)
    values = torch.randn(spec.shape, generator=generator)
    return 1 + 0.2 * values if "norm" in spec.name else 0.15 * values
