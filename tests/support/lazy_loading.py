"""Loading weights to the emulated card, where writes are recorded and run later."""

from collections.abc import Mapping
from pathlib import Path

import torch
from emulated import emulated
from torch import Tensor

from config.model.read_config import read_model_config
from hpu.model_loader.loader import load_weights
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model


def assert_lazy_load_copies_nothing(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """Assert that a bfloat16 model gets the `expected` weights, rounded, without more memory than
    before they are loaded."""
    with emulated(strict=True, workspace_ratio=0.0) as card:
        config = read_model_config(str(folder))
        device = torch.device("hpu", 0)
        model = build_model(
            config, ModelBuild(dtype=torch.bfloat16, device=device, max_model_len=64)
        )
        before = card.memory.in_use
        card.memory.reset_peak()

        load_weights(model, str(folder), on_progress=lambda done, total: None)
        loaded = {name: tensor.cpu() for name, tensor in model.named_parameters()}

        assert card.counters.counts["base_versions"] == 0
        assert card.memory.peak <= before
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
