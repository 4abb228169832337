"""Quantized experts of Llama 4: a stacked tensor per layer, or a tensor per expert."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from paged_harness import PagedHarness, load_decoder
from quantized_checkpoints import FORMATS, STACKING, Quantized, make_quantized, replace_tensor
from torch import Tensor
from transformers import AutoModelForCausalLM

from config.errors import CheckpointError
from config.model.read_config import read_model_config
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.gaudi_devices import GENERATIONS
from hpu.layers.moe import Experts
from hpu.model_loader.loader import load_weights
from hpu.model_loader.size_estimate import weight_bytes
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.quantization.registry import process_weights
from hpu.quantization.stored.checkpoint import CheckpointScheme
from hpu.quantization.stored.fp8 import Fp8LinearMethod, Fp8MoEMethod, Fp8Range

Make = Callable[[str], Quantized]
PROMPT = {0: list(range(10, 40)), 1: [5, 6, 7]}
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "intermediate_size_mlp": 256,
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Quantized] = {}

    def make(name: str) -> Quantized:
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[name] = make_quantized(FORMATS[name], folder, "llama4_text", **FIELDS)
        return made[name]

    return make


def experts_of(model: Decoder) -> Experts:
    (found,) = (module for module in model.modules() if isinstance(module, Experts))
    return found


@torch.inference_mode()
@pytest.mark.parametrize("name", [STACKING, "wna16"])
def test_logits_equal_transformers(name: str, make: Make) -> None:
    quantized = make(name)
    reference = AutoModelForCausalLM.from_pretrained(quantized.reference, dtype=torch.float32)

    found = PagedHarness(load_decoder(quantized.folder)).prefill(PROMPT)

    for row, ids in PROMPT.items():
        expected = reference(torch.tensor([ids])).logits[0]
        assert torch.allclose(found[row], expected, rtol=1e-4, atol=1e-4)


def read(folder: Path, group: ProcessGroup, expert_group: ProcessGroup) -> dict[str, Tensor]:
    """Dequantized weights of a rank, in float32."""
    facts, cpu = read_model_config(str(folder)), torch.device("cpu")
    groups = {"group": group, "expert_group": expert_group}
    model = build_model(
        facts, ModelBuild(dtype=torch.float32, device=cpu, max_model_len=64, **groups)
    )
    load_weights(model, str(folder), on_progress=lambda done, total: None, **groups)
    process_weights(model, None)
    return dict(model.state_dict())


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("name", [STACKING, "wna16"])
def test_ranks_read_their_shards(name: str, is_distributed: bool, make: Make) -> None:
    quantized = make(name)
    for rank in range(2):
        group = ProcessGroup(range(2), rank)
        expert_group = group if is_distributed else SINGLE

        expected = read(quantized.reference, group, expert_group)
        found = read(quantized.folder, group, expert_group)

        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], tensor) for path, tensor in expected.items())


def traffic(hidden: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weights, ids = torch.rand(9, 4).topk(1, dim=-1)
    return torch.randn(9, hidden).bfloat16(), ids, weights


@torch.inference_mode()
@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_card_multiplies_in_fp8(generation: str, is_distributed: bool, make: Make) -> None:
    quantized, largest = make(STACKING), GENERATIONS[generation].fp8_max
    facts = read_model_config(str(quantized.folder))
    hidden, ids, weights = traffic()
    expected = experts_of(load_decoder(quantized.reference))(hidden.float(), ids, weights)

    parts = []
    for rank in range(2):
        group = ProcessGroup(range(2), rank)
        groups = {"group": group, "expert_group": group if is_distributed else SINGLE}
        with emulated(generation=generation, strict=True):
            model = build_model(
                facts,
                ModelBuild(
                    dtype=torch.bfloat16,
                    device=torch.device("hpu", 0),
                    max_model_len=64,
                    quantization=CheckpointScheme(
                        lambda weight: Fp8LinearMethod(weight, Fp8Range(largest)),
                        lambda experts: Fp8MoEMethod(experts, Fp8Range(largest)),  # type: ignore[arg-type]
                    ),
                    **groups,
                ),
            )
            path = str(quantized.folder)
            load_weights(model, path, on_progress=lambda done, total: None, **groups)
            process_weights(model, None)
            held = sum(parameter.nbytes for parameter in model.parameters())
            experts = experts_of(model)
            assert experts.w13_weight is None
            experts.group = SINGLE
            parts.append(experts(*(request.to("hpu") for request in traffic())).cpu().float())
        own = {"num_cards": 2, "distributes_experts": is_distributed}
        assert held == weight_bytes(facts, width=2, length=0, **own)

    error = (parts[0] + parts[1] - expected).square().mean().sqrt() / expected.std()
    assert all(part.std() > 0 for part in parts) and error < 0.08


def test_a_scale_of_zero_names_the_stacked_tensor(tmp_path: Path) -> None:
    folder = make_quantized(FORMATS[STACKING], tmp_path, "llama4_text", **FIELDS).folder
    name = "model.layers.1.feed_forward.experts.down_proj_scale"
    replace_tensor(folder, name, lambda scales: scales * (torch.arange(4).view(4, 1, 1) > 0))

    with pytest.raises(CheckpointError, match=r"experts\.down_proj_scale in .* has 128 of 512"):
        load_decoder(folder)
