"""Requests with images on the strict emulated card: the tokens of the CPU, and nothing compiles
after the warm-up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_traffic import random_images
from strict_card import COUNTERS, STRICT
from tiny_vision_models import make_tiny_vision, prepare
from two_prompts import TABLE, working

SLOW = pytest.mark.slow
FAMILIES = ["llava_next", *(pytest.param(name, marks=SLOW) for name in ("llava", "gemma3"))]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("granite_vision", "idefics3", "internvl")]
FAMILIES += ["qwen2_5_vl", pytest.param("qwen2_vl", marks=SLOW)]
FAMILIES += ["qwen3_vl", *(pytest.param(name, marks=SLOW) for name in ("qwen3_vl_moe", "mistral3"))]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("aya_vision", "deepseek_vl", "vipllava")]
FAMILIES += ["mllama", pytest.param("phi4_multimodal", marks=SLOW)]


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_compiles_for_images_after_the_warm_up(name: str, tmp_path: Path) -> None:
    whole = make_tiny_vision(name, tmp_path)
    pictures = prepare(name, whole, [0, 1, 2, 3])
    # Gemma 3 computes the rest of an image at once.
    max_chunk = 23 if name != "gemma3" else 64
    with working(tmp_path) as on_cpu:
        expected = random_images(on_cpu, pictures, max_chunk=max_chunk)

    sizes = "16,48" if name.startswith("qwen") or name == "mistral3" else "auto"
    table = replace(TABLE, images=sizes)
    with working(tmp_path, device="hpu-emulator", emulator=STRICT, buckets=table) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        found = random_images(rig, pictures, max_chunk=max_chunk)
        after = [counts[name] for name in COUNTERS]

    assert found == expected
    assert after == before
    assert before[0] > 0 and before[2] == 0
    # Of 4 tiles: one image for each of two requests.
    assert rig.ready.encoder_cache_tokens == (8 if name == "mllama" else 128)


def test_a_tower_without_fixed_shapes_is_not_served_on_a_card_and_text_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_vision("llama4", tmp_path)

    with working(tmp_path, device="hpu-emulator", emulator=STRICT) as rig:
        rig.admit(0, [5, 6, 7])
        rig.prefill({0: None})
        rig.step()

        assert rig.ready.encoder_cache_tokens == 0
        assert len(rig.free(0)) == 1
    assert "Images are not served" in caplog.text and "has no fixed shapes" in caplog.text
