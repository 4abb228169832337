"""Models that the library does not run: their products are packed, and torch runs the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import PagedHarness, load_decoder
from tiny_models import make_tiny

from hpu.backends.cpu import use_cpu_kernels
from hpu.native.decoder import CompiledDecoder
from hpu.native.library import Library

FULL = "full_attention"


def packed(folder: Path, library: Library) -> CompiledDecoder:
    model = use_cpu_kernels(load_decoder(folder, dtype=torch.bfloat16), library)
    assert isinstance(model, CompiledDecoder)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_next"])
def test_recurrent_layers_run_on_torch(family: str, library: Library, tmp_path: Path) -> None:
    # Each token uses all experts, so that rounding does not change the routing.
    folder = make_tiny(family, tmp_path, num_experts_per_tok=4)
    prompt = {0: list(range(10, 60))}
    model = packed(folder, library)
    rigs = [PagedHarness(item) for item in (load_decoder(folder), model)]

    prefills = [rig.prefill(prompt)[0].float() for rig in rigs]
    decodes = [rig.decode({0: 5})[0].float() for rig in rigs]

    assert not model.is_compiled
    for expected, found in (prefills, decodes):
        error = (found - expected).square().mean().sqrt()
        assert error < 0.05 * expected.square().mean().sqrt()


@pytest.mark.parametrize(
    ("family", "overrides", "is_compiled"),
    [
        ("granitemoehybrid", {"position_embedding_type": "rope"}, True),
        ("granitemoehybrid", {"position_embedding_type": "nope"}, False),
        ("qwen3_next", {"partial_rotary_factor": 1.0}, False),
    ],
    ids=["rotated", "not rotated", "with a gate"],
)
def test_attention_that_the_library_lacks_runs_on_torch(
    family: str, overrides: dict[str, Any], is_compiled: bool, library: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, layer_types=[FULL, FULL], head_dim=32, **overrides)

    assert packed(folder, library).is_compiled == is_compiled
