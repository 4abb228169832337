"""Requests with images on the strict emulated card: the tokens of the CPU, and nothing compiles
after the warm-up."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_traffic import ImageRig, text, write
from strict_card import COUNTERS, STRICT
from tiny_vision_models import Picture, make_tiny_vision, prepare
from two_prompts import TABLE, working
from worker_rig import WorkerRig

SLOW = pytest.mark.slow
FAMILIES = ["llava_next", *(pytest.param(name, marks=SLOW) for name in ("llava", "gemma3"))]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("granite_vision", "idefics3", "internvl")]
FAMILIES += ["qwen2_5_vl", pytest.param("qwen2_vl", marks=SLOW)]
FAMILIES += ["qwen3_vl", *(pytest.param(name, marks=SLOW) for name in ("qwen3_vl_moe", "mistral3"))]
FAMILIES += [pytest.param(name, marks=SLOW) for name in ("aya_vision", "deepseek_vl", "vipllava")]
FAMILIES += ["mllama"]


def random_images(
    rig: WorkerRig, pictures: list[Picture], *, max_chunk: int, rounds: int = 5
) -> list[list[int]]:
    """Two requests at a time, one of which may be text alone: prefills in chunks, then decodes."""
    luck = random.Random(3)
    images = ImageRig(rig)
    found = []
    for number in range(rounds):
        for req_index in range(2):
            parts: list[Any] = [text(luck.randrange(99), luck.randint(1, 9))]
            if req_index == 0 or number % 2:
                index = luck.randrange(len(pictures))
                parts += [(b"picture %d" % index, pictures[index]), text(1, luck.randint(1, 9))]
            images.admit(req_index, write(*parts))
        while any(one.computed < one.known - len(one.sampled) for one in rig.requests.values()):
            left = {
                index: one.known - one.computed
                for index, one in rig.requests.items()
                if not one.sampled and one.computed < one.known
            }
            rig.prefill({index: min(count, max_chunk) for index, count in left.items()})
            rig.step()
        rig.run([0, 1], luck.randint(1, 4))
        found += [rig.free(0), rig.free(1)]
        if number % 2:
            images.free_all()
    return found


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
