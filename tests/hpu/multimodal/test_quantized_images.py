"""Images with a quantized text model and an unquantized tower: tokens equal transformers' tokens
with the same weights dequantized."""

from pathlib import Path
from typing import Any

import pytest
import torch
from image_traffic import ImageRig, Prompt, text, write
from quantized_checkpoints import FORMATS, quantize
from tiny_vision_models import generate, make_tiny_vision, prepare
from transformers import AutoModelForImageTextToText
from worker_rig import WorkerRig

from config.checkpoint.facts import model_facts
from hpu.quantization.weight_only import quantize_int4, quantize_int8

NEW_TOKENS = 6
TOWERS = ("visual", "vision_tower", "multi_modal_projector", "model.visual", "model.vision_tower",
          "model.multi_modal_projector")  # fmt: skip
TEXT: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
"""Sizes that are multiples of groups of 64 inputs."""
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}


def make(name: str, folder: Path) -> Any:
    if name.startswith("qwen"):
        return make_tiny_vision(
            name, folder, {"out_hidden_size": 128}, **TEXT, rope_parameters=MROPE
        )
    return make_tiny_vision(name, folder, **TEXT)


def prompt_of(name: str, whole: Any) -> Prompt:
    entry, two = prepare(name, whole, [0, 1])
    return write(text(1, 5), (b"one", entry), text(2, 4), (b"two", two), text(3, 3))


def tokens_of(rig: WorkerRig, prompt: Prompt) -> list[int]:
    ImageRig(rig).admit(0, prompt)
    rig.prefill({0: None})
    rig.step()
    rig.run([0], NEW_TOKENS - 1)
    return rig.free(0)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("llava", "gptq"),
        ("llava", "awq"),
        ("qwen2_5_vl", "fp8, blocks"),
        ("qwen2_5_vl", "wna16"),
        ("qwen2_5_vl", "nf4"),
    ],
)
def test_a_quantized_checkpoint_gives_the_tokens_of_its_dequantized_weights(
    name: str, form: str, tmp_path: Path
) -> None:
    make(name, tmp_path / "plain")
    made = quantize(FORMATS[form], tmp_path / "plain", tmp_path / "packed", other=TOWERS)
    whole: Any = AutoModelForImageTextToText.from_pretrained(made.reference, dtype=torch.float32)
    prompt = prompt_of(name, whole)
    expected = generate(name, whole.eval(), prompt.tokens, prompt.pictures, NEW_TOKENS)
    rig = WorkerRig(made.folder)
    try:
        assert tokens_of(rig, prompt) == expected
    finally:
        rig.worker.close()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_all_weights_except_the_tower_are_quantized_at_load(kind: str, tmp_path: Path) -> None:
    whole = make("llava", tmp_path)
    prompt = prompt_of("llava", whole)
    rig = WorkerRig(tmp_path, dtype="bfloat16", quantization=kind)
    try:
        tower = rig.worker.loaded.tower  # type: ignore[union-attr]
        assert tower is not None
        assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
        found = tokens_of(rig, prompt)
    finally:
        rig.worker.close()

    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith(TOWERS):
            # The head has 8 bits in both cases.
            is_int8 = kind == "int8" or name == "lm_head"
            rounded = quantize_int8 if is_int8 else quantize_int4
            weight = rounded(module.weight.data.bfloat16())
            module.weight.data = weight.dequantize(torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([prompt.tokens + found])
        pixels = torch.cat([picture.tensors["pixel_values"] for picture in prompt.pictures])
        logits = whole(input_ids=ids, pixel_values=pixels).logits[0, len(prompt.tokens) - 1 : -1]
    # bfloat16 may choose a different token among nearly equally likely tokens.
    chosen = logits[torch.arange(NEW_TOKENS), torch.tensor(found)]
    assert ((logits.amax(1) - chosen) < 0.15 * logits.std(1)).all()


def test_the_tower_of_a_quantized_checkpoint_is_counted(tmp_path: Path) -> None:
    whole = make("llava", tmp_path / "plain")
    made = quantize(FORMATS["gptq"], tmp_path / "plain", tmp_path / "packed", other=TOWERS)
    count = sum(
        parameter.numel() for name, parameter in whole.named_parameters() if name.startswith(TOWERS)
    )

    assert model_facts(str(made.folder)).num_tower_parameters == count
    assert model_facts(str(made.reference)).num_tower_parameters == count
