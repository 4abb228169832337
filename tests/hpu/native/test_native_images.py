"""Launches with images on the CPU's compiled decoder, compared with torch's operators in
bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from image_traffic import ImageRig, text, write
from tiny_vision_models import make_tiny_vision, prepare
from torch import Tensor
from worker_rig import WorkerRig

from hpu.layers.metadata import AttentionInputs, PrefillAttentionInputs
from hpu.native.decoder import CompiledDecoder

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_given_embeddings_and_positions_with_three_axes_run_compiled(
    name: str, tmp_path: Path
) -> None:
    has_axes = name == "qwen2_vl"
    overrides = {**SIZES, "rope_parameters": AXES} if has_axes else SIZES
    vision = {"hidden_size": 128} if has_axes else None
    whole = make_tiny_vision(name, tmp_path, vision, **overrides)
    pictures = prepare(name, whole, [0, 1])
    first, second = ((b"%d" % index, item) for index, item in enumerate(pictures))
    rig = WorkerRig(tmp_path, dtype="bfloat16")
    try:
        model = rig.worker.loaded.model
        assert isinstance(model, CompiledDecoder)
        if not model.is_compiled:
            pytest.skip("this machine has no compiled decoder")
        compiled, layered = model.forward, model.model
        seen: list[tuple[bool, bool]] = []

        def both(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
            found, own = compiled(tokens, inputs), layered(tokens, inputs)
            real = own
            if isinstance(inputs, PrefillAttentionInputs):
                seen.append((tokens.dim() == 3, inputs.features.rope_positions is not None))
                lengths = inputs.query_lens.unsqueeze(1)
                is_real = torch.arange(own.shape[1]) < lengths
                found, real = found[is_real], own[is_real]
            error = (found.float() - real.float()).square().mean().sqrt()
            assert error < 0.02 * real.float().square().mean().sqrt()
            return compiled(tokens, inputs)

        model.forward = both  # type: ignore[method-assign]
        images = ImageRig(rig)
        images.admit(0, write(text(1, 9)))
        rig.prefill({0: None})
        rig.step()
        images.admit(1, write(text(2, 3), first, text(3, 7), second, text(4, 2)))
        images.admit(2, write(text(5, 21)))
        rig.prefill({1: 20, 2: None})
        rig.step()
        rig.prefill({1: None} if rig.requests[1].computed < rig.requests[1].known else {})
        rig.step()
        rig.run([0, 1, 2], 3)
    finally:
        rig.worker.close()

    # A launch without images equals the launch of a text model.
    assert seen[0] == (False, False)
    assert seen[1] == (True, has_axes)


def test_deepstack_prompts_run_on_torch_and_other_prompts_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {**AXES, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    sizes = {**SIZES, "rope_parameters": rope}
    whole = make_tiny_vision("qwen3_vl", tmp_path, {"out_hidden_size": 128}, **sizes)
    picture = prepare("qwen3_vl", whole, [0])[0]
    caplog.set_level("INFO")
    rig = WorkerRig(tmp_path, dtype="bfloat16")
    try:
        model = rig.worker.loaded.model
        assert isinstance(model, CompiledDecoder)
        if not model.is_compiled:
            pytest.skip("this machine has no compiled decoder")
        layered = model.model
        by_layers: list[tuple[int, ...]] = []

        handle = layered.register_forward_pre_hook(
            lambda module, given: by_layers.append(tuple(given[0].shape[2:]))
        )
        images = ImageRig(rig)
        images.admit(0, write(text(1, 9)))
        rig.prefill({0: None})
        rig.step()
        images.admit(1, write(text(2, 3), (b"0", picture), text(3, 7)))
        rig.prefill({1: None})
        rig.step()
        rig.run([0, 1], 3)
        handle.remove()
    finally:
        rig.worker.close()

    assert by_layers == [(3 * 128,)]
    assert "Prompts with images run layer by layer: 2 layers" in caplog.text
