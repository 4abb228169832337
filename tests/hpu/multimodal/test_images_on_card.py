"""Requests with images on the strict emulated card: tokens equal the CPU's, and nothing compiles
after the warm-up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_traffic import random_images
from strict_card import COUNTERS, STRICT
from tiny_vision_models import VISION_FAMILIES, WITH_STATES, make_tiny_vision, prepare
from two_prompts import SLICE, TABLE, working

from config.model.multimodal.vision import VISION_FAMILIES as SERVED
from config.model.read_config import read_model_config
from hpu.multimodal.towers.tower import VisionTower

SLOW = pytest.mark.slow
FAMILIES = ["llava_next", *(pytest.param(name, marks=SLOW) for name in ("llava", "gemma3"))]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("granite_vision", "idefics3", "internvl")]
FAMILIES += ["qwen2_5_vl", pytest.param("qwen2_vl", marks=SLOW)]
FAMILIES += ["qwen3_vl", *(pytest.param(name, marks=SLOW) for name in ("qwen3_vl_moe", "mistral3"))]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("aya_vision", "deepseek_vl", "vipllava")]
FAMILIES += ["mllama", pytest.param("phi4_multimodal", marks=SLOW), "llama4"]
FAMILIES += [pytest.param("pixtral", marks=SLOW), "qwen3_5"]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("qwen3_5_moe", "lfm2_vl", "minimax_m3")]


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_compiles_for_images_after_the_warm_up(name: str, tmp_path: Path) -> None:
    whole = make_tiny_vision(name, tmp_path)
    pictures = prepare(name, whole, [0, 1, 2, 3])
    # Gemma 3 computes the rest of an image in one chunk.
    max_chunk = 23 if name != "gemma3" else 64
    with working(tmp_path) as on_cpu:
        expected = random_images(on_cpu, pictures, max_chunk=max_chunk)

    others = ("mistral3", "pixtral", "lfm2_vl", "minimax_m3")
    has_patches = name.startswith("qwen") or name in others
    sizes = "16,48" if has_patches else "auto"
    table = replace(TABLE, images=sizes)
    card = {"device": "hpu-emulator", "emulator": STRICT, "buckets": table}
    with working(tmp_path, **card, **(SLICE if name in WITH_STATES else {})) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        found = random_images(rig, pictures, max_chunk=max_chunk)
        after = [counts[name] for name in COUNTERS]

    assert found == expected
    assert after == before
    assert before[0] > 0 and before[2] == 0
    # 8 tiles: 4 for an image of each of two requests.
    assert rig.ready.encoder_cache_tokens == (8 if name == "mllama" else 128)


def test_each_tower_that_is_served_has_fixed_shapes(tmp_path: Path) -> None:
    seen = set()
    for name in VISION_FAMILIES:
        folder = tmp_path / name
        make_tiny_vision(name, folder)
        config = read_model_config(str(folder))
        assert config.vision is not None
        seen.add(config.vision.architecture)
        tower = VisionTower(config, dtype=torch.float32, device=torch.device("meta"))
        forms = (tower.tiles(), tower.patches(), tower.whole_images())
        assert sum(form is not None for form in forms) == 1, name
    assert seen == set(SERVED)
