"""Feed-forward parts of gpt-oss, Llama 4 and Phi-MoE compared with the modules of transformers,
with weights from a checkpoint that transformers wrote."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
from releases import transformers_before
from tiny_models import make_tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.model.read_config import read_model_config
from hpu.layers.moe import MoE
from hpu.model_loader.loader import load_weights
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model

pytestmark = pytest.mark.skipif(transformers_before("5"), reason="names of version 5")

ODD = {"hidden_size": 52, "head_dim": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", "mlp", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss: three of five experts, another limit": (
        "gpt_oss",
        "mlp",
        {
            **ODD,
            "intermediate_size": 36,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.5,
        },
    ),
    "llama4: dense layers by step": (
        "llama4_text",
        "feed_forward",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    "llama4: a list of layers, two of three experts": (
        "llama4_text",
        "feed_forward",
        {
            **ODD,
            "num_hidden_layers": 3,
            "intermediate_size": 36,
            "intermediate_size_mlp": 44,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 1],
        },
    ),
    "phimoe": ("phimoe", "mlp", {"num_local_experts": 4}),
    "phimoe: seven experts, wide jitter": (
        "phimoe",
        "mlp",
        {**ODD, "intermediate_size": 36, "num_local_experts": 7, "router_jitter_noise": 0.3},
    ),
}
"""Model type, name of the feed-forward part in transformers, config fields."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    random_checkpoint.register(monkeypatch)
    with torch.inference_mode():
        yield


class FeedForward:
    """The feed-forward parts of a decoder, as a loadable model."""

    def __init__(self, decoder: Decoder, blocks: tuple[str, ...]) -> None:
        self._decoder = decoder
        whole = decoder.weight_map
        layers = tuple(
            tuple(spec for spec in layer if spec.name.startswith(blocks)) for layer in whole.layers
        )
        self.weight_map: WeightMap = replace(
            whole, outer=(), layers=layers, ignored_prefixes=("model.", "lm_head.")
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._decoder.named_parameters()


def load_blocks(folder: Path) -> Decoder:
    config = read_model_config(str(folder))
    decoder = build_model(config, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))
    blocks = ("mlp.", "feed_forward.", "block_sparse_moe.")
    feed_forward = FeedForward(decoder, blocks)
    load_weights(feed_forward, str(folder), on_progress=lambda done, total: None)
    return decoder


@pytest.mark.parametrize("case", CASES)
def test_each_feed_forward_layer_equals_transformers(case: str, tmp_path: Path) -> None:
    family, name, fields = CASES[case]
    folder = make_tiny(family, tmp_path, **fields)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    layers = load_blocks(folder).layers

    torch.manual_seed(0)
    for theirs, ours in zip(reference.model.layers, layers, strict=True):
        hidden = torch.randn(3, 7, reference.config.hidden_size)
        expected = getattr(theirs, name)(hidden)
        expected = expected[0] if isinstance(expected, tuple) else expected
        is_moe = hasattr(getattr(theirs, name), "experts")
        assert isinstance(ours.mlp, MoE) is is_moe
        found: Tensor = ours.mlp(hidden)
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected.view(hidden.shape), rtol=1e-4, atol=1e-4)


def test_the_feed_forward_part_has_the_name_of_the_checkpoint(tmp_path: Path) -> None:
    random_checkpoint.write_config(tmp_path, "Llama4ForCausalLM")

    decoder = build_model(
        read_model_config(str(tmp_path)),
        ModelBuild(dtype=torch.float32, device=torch.device("meta")),
    )

    names = {name for name, _ in decoder.named_parameters() if "feed_forward" in name}
    assert names == {
        "model.layers.0.feed_forward.gate_up_proj.weight",
        "model.layers.0.feed_forward.down_proj.weight",
        "model.layers.1.feed_forward.gate.weight",
        "model.layers.1.feed_forward.experts.w13_weight",
        "model.layers.1.feed_forward.experts.w2_weight",
        "model.layers.1.feed_forward.shared_experts.gate_up_proj.weight",
        "model.layers.1.feed_forward.shared_experts.down_proj.weight",
    }


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "PhimoeForCausalLM",
            {"num_experts_per_tok": 3},
            "is 3, the router of this architecture requires",
        ),
        ("Llama4ForCausalLM", {"moe_layers": ["1"]}, r"moe_layers in .* is \['1'\]"),
        ("Llama4ForCausalLM", {"intermediate_size_mlp": None}, "has no intermediate_size_mlp"),
        (
            "GptOssForCausalLM",
            {"hidden_size": 72, "quantization_config": {"quant_method": "mxfp4"}},
            "hidden_size in .* is 72, MXFP4 needs a multiple of 32",
        ),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "hqq"}},
            r"an unsupported quantization \(hqq\)",
        ),
        (
            "Llama4ForCausalLM",
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"an unsupported quantization \(mxfp4\)",
        ),
        ("GptOssForCausalLM", {"swiglu_limit": 0}, "swiglu_limit in .* is 0, it must be above 0"),
    ],
)
def test_unsupported_model_features_are_refused_by_name(
    architecture: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    random_checkpoint.write_config(tmp_path, architecture, **fields)

    with pytest.raises(ConfigError, match=message):
        build_model(
            read_model_config(str(tmp_path)),
            ModelBuild(dtype=torch.float32, device=torch.device("meta")),
        )
