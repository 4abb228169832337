"""Chunked attention, sinks, soft caps, ALiBi and several RoPE settings in models: compared with
transformers in float32, and on the strict emulated card."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import load_decoder
from releases import transformers_before
from safetensors.torch import load_file, save_file
from strict_card import assert_nothing_compiles_after_warmup
from tiny_models import make_tiny

from config.execution import ExecutionConfig
from config.model.architectures import ARCHITECTURES
from config.model.decoder_spec import DecoderSpec, Family, TemperatureTuning, uniform_layers
from config.model.families.dense import granite, llama
from config.model.model_config import ModelConfig, RopeConfig
from config.model.read_config import read_model_config
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder

NEW_TOKENS, TOLERANCE = 24, 1e-3


def llama4(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=tuple(
            layer._replace(qk_norm=layer.rope != "none", tunes_temperature=layer.rope == "none")
            for layer in uniform_layers(config)
        ),
        interleaved_rope=True,
        qk_norm="unweighted",
        qk_norm_after_rope=True,
        temperature=TemperatureTuning(
            config.fields.raw["attn_scale"], config.fields.raw["floor_scale"], offset=1
        ),
    )


def granite_swa(config: ModelConfig) -> DecoderSpec:
    spec = granite(config)
    return replace(spec, layers=tuple(layer._replace(sinks=True) for layer in spec.layers))


def capped(config: ModelConfig) -> DecoderSpec:
    return replace(llama(config), attention_soft_cap=1.5)


def alibi(config: ModelConfig) -> DecoderSpec:
    spec = llama(config)
    layers = tuple(layer._replace(rope="none") for layer in spec.layers)
    return replace(spec, layers=layers, alibi_max_bias=8.0)


CHUNKS: dict[str, Any] = {
    "attention_chunk_size": 7,
    "no_rope_layers": [1, 0],
    "moe_layers": [],
    "intermediate_size_mlp": 128,
    "head_dim": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "seed": 3,
}
SINKS: dict[str, Any] = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_multiplier": 0.25,
}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[ModelConfig], DecoderSpec]]] = {
    "chunks, no rotation, temperature, norm after rotation": ("llama4_text", CHUNKS, llama4),
    "sinks": ("granite_swa", SINKS, granite_swa),
    "no rotation": ("smollm3", {"no_rope_layers": [1, 0]}, llama),
}
ON_CARD = {
    **{name: CASES[name] for name in list(CASES)[:2]},
    "soft cap": ("llama", {}, capped),
    "ALiBi": ("llama", {}, alibi),
}


def install(folder: Path, family: Callable[[ModelConfig], DecoderSpec], patch: Any) -> None:
    """Register `family` for the checkpoint's architecture, and rename its MLPs to the usual
    names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    patch.setitem(ARCHITECTURES, name, Family(family, "for a test"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace("feed_forward", "mlp"): tensor for name, tensor in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def prompts() -> list[list[int]]:
    return random_prompts(1, 23, 40)


@pytest.mark.skipif(transformers_before("5.18"), reason="needs families of transformers 5")
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields, family = CASES[name]
    folder = make_tiny(kind, tmp_path, **fields)
    reference = load_reference(folder)
    install(folder, family, monkeypatch)

    found = greedy_by_pages(load_decoder(folder), prompts(), NEW_TOKENS)

    assert_same_as_transformers(found, prompts(), reference, TOLERANCE)


@pytest.mark.parametrize("clip", [0.3, 1.0])
@torch.inference_mode()
def test_clamped_projections_equal_transformers(clip: float, tmp_path: Path) -> None:
    folder = make_tiny("olmoe", tmp_path, clip_qkv=clip)

    found = greedy_by_pages(load_decoder(folder), prompts(), 8)

    assert_same_as_transformers(found, prompts(), load_reference(folder), TOLERANCE)


@torch.inference_mode()
def test_each_layer_type_uses_its_own_rope_parameters(tmp_path: Path) -> None:
    folder = make_tiny(
        "qwen3", tmp_path, use_sliding_window=True, sliding_window=9, max_window_layers=1
    )
    config = read_model_config(str(folder))
    local, device = RopeConfig(77.0), torch.device("cpu")

    def angles(config: ModelConfig) -> list[torch.Tensor]:
        spec = ARCHITECTURES[config.architecture].make_spec(config)
        model = Decoder(
            config, spec, ModelBuild(dtype=torch.float32, device=device, max_model_len=32)
        )
        return [rotary_emb.table for rotary_emb in model.model.rotary_embs]

    (plain,), both = angles(config), angles(replace(config, local_rope=local))

    (expected,) = angles(replace(config, rope=local))
    assert torch.equal(both[0], plain) and torch.equal(both[1], expected)
    spec = ARCHITECTURES[config.architecture].make_spec(replace(config, local_rope=local))
    assert [layer.rope for layer in spec.layers] == ["default", "local"]


@pytest.mark.skipif(transformers_before("5.18"), reason="needs families of transformers 5")
@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ON_CARD)
def test_the_card_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warm_up(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields, family = ON_CARD[name]
    folder = make_tiny(kind, tmp_path, **fields)
    install(folder, family, monkeypatch)

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode))
