"""Weights of an adapter of stacked experts, in both orders in which tools store them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny

from config.checkpoint.weight_maps.shard import ShardRank
from config.lora.adapter import load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config
from hpu.lora.adapter_weights import LowRank, rank_weights

EXPERTS = "base_model.model.model.layers.0.mlp.experts"
NUM_EXPERTS, RANK = 4, 3
GROUPED = "grouped_by_expert"
BOTH = {"gate_up_proj": GROUPED, "down_proj": GROUPED}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def by_parameter(layouts: dict[str, str]) -> dict[str, Any]:
    parameters = {name: {"lora_B_layout": layout} for name, layout in layouts.items()}
    return {"unsloth_fused_expert_lora": {"parameters": parameters}}


def loaded(folder: Path, mixture: Path, grouped: dict[str, str], **fields: Any) -> list[LowRank]:
    """Weights of an adapter whose `grouped` parameters store one block of columns per expert."""
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    write_adapter(folder, mixture, targets=["q_proj"], rank=RANK, target_parameters=parameters)
    file = folder / "adapter_model.safetensors"
    torch.manual_seed(5)
    shapes = {"gate_up_proj": (64, 2 * 48, ".base_layer"), "down_proj": (48, 64, "")}
    tensors = load_file(file)
    for name, (inputs, outputs, path) in shapes.items():
        columns = torch.randn(outputs, RANK, NUM_EXPERTS)
        if name in grouped:
            columns = columns.swapaxes(1, 2)
        tensors[f"{EXPERTS}{path}.lora_A.weight"] = torch.randn(NUM_EXPERTS * RANK, inputs)
        tensors[f"{EXPERTS}{path}.lora_B.weight"] = columns.reshape(outputs, -1).contiguous()
    save_file(tensors, file)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    base = BaseModules(read_model_config(str(mixture)))
    adapter = load_adapter(AdapterFolder(str(folder)), base, 16, ("experts",), keeps_bytes=True)
    return list(rank_weights(adapter, ShardRank(0, 1), torch.float32))


@pytest.mark.parametrize(
    ("grouped", "fields"),
    [
        ({}, {"lora_B_layout": "rank_major", "auto_mapping": {"unsloth_fixed": True}}),
        (BOTH, {"lora_B_layout": GROUPED}),
        (BOTH, {"auto_mapping": {"unsloth_fixed": True, "lora_B_layout": GROUPED}}),
        (BOTH, {"auto_mapping": {"unsloth_fixed": True}}),
        (
            {"down_proj": GROUPED},
            by_parameter({"gate_up_proj": "rank_major", "down_proj": GROUPED}),
        ),
    ],
)
def test_columns_grouped_by_expert_equal_peft(
    grouped: dict[str, str], fields: dict[str, Any], tmp_path: Path, mixture: Path
) -> None:
    expected = loaded(tmp_path / "peft", mixture, {})

    found = loaded(tmp_path / "unsloth", mixture, grouped, **fields)

    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[:3] == theirs[:3]
        assert torch.equal(ours.a, theirs.a)
        assert torch.equal(ours.b, theirs.b)
