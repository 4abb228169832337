"""Videos through a worker compared with transformers' multimodal models, on a CPU and on the
emulated card: positions with three axes, and greedy tokens in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_traffic import ImageRig, Prompt, text, write
from strict_card import COUNTERS, STRICT
from tiny_vision_models import (
    END,
    IMAGE,
    START,
    VIDEO,
    WITH_STATES,
    Picture,
    make_tiny_vision,
    prepare,
)
from two_prompts import SLICE, TABLE, working
from worker_rig import WorkerRig

from hpu.multimodal.image_inputs import _axes
from hpu.protocol import ImagePlacement

NEW_TOKENS = 6
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
FAMILIES += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
]
SECONDS = 0.75
"""Seconds per temporal grid step."""


def make_video(whole: Any, time: int, height: int, width: int) -> Picture:
    """Video of noise patches, in the form that a server sends."""
    vision = whole.config.vision_config
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    noise = torch.Generator().manual_seed(7)
    count = time * height * width
    pixels = torch.randn(count, patch, generator=noise)
    grid = torch.tensor([[time, height, width]])
    rows = count // 4
    tokens = [START, *[VIDEO] * rows, END]
    if is_timed(whole):
        frame = [START, *[VIDEO] * (rows // time), END]
        tokens = [token for index in range(time) for token in (20 + index, 19, *frame)]
    return Picture(
        {"pixel_values": pixels, "image_grid_thw": grid},
        tokens,
        rows,
        (time, height // 2, width // 2),
    )


def is_timed(whole: Any) -> bool:
    """Whether the prompt has the times of a video as text."""
    return str(whole.config.model_type).startswith(("qwen3_vl", "qwen3_5"))


def time_step(whole: Any) -> float:
    return SECONDS * float(getattr(whole.config.vision_config, "tokens_per_second", 1 / SECONDS))


def prompt_of(whole: Any, video: Picture, image: Picture) -> Prompt:
    made = write(text(1, 4), (b"image", image), text(2, 3), (b"video", video), text(3, 5))
    first, second = made.placements
    placed = ImagePlacement(
        second.content, second.offset, second.length, second.grid, time_step(whole)
    )
    return replace(made, placements=(first, placed))


@torch.inference_mode()
def expected(name: str, whole: Any, prompt: Prompt, video: Picture, image: Picture) -> list[int]:
    ids = torch.tensor([prompt.tokens])
    seconds = {"second_per_grid_ts": torch.tensor([SECONDS])} if name == "qwen2_5_vl" else {}
    output = whole.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == IMAGE).long() + 2 * (ids == VIDEO).long(),
        **image.tensors,
        pixel_values_videos=video.tensors["pixel_values"],
        video_grid_thw=video.tensors["image_grid_thw"],
        **seconds,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        eos_token_id=None,
    )
    return output[0, len(prompt.tokens) :].tolist()  # type: ignore[no-any-return]


def tokens_of(rig: WorkerRig, prompt: Prompt, chunk: int | None = None) -> list[int]:
    images = ImageRig(rig)
    images.admit(0, prompt)
    while (left := len(prompt.tokens) - rig.requests[0].computed) > 0:
        rig.prefill({0: left if chunk is None else min(chunk, left)})
        rig.step()
    rig.run([0], NEW_TOKENS - 1)
    images.free_all()
    return rig.free(0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_video_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    whole = make_tiny_vision(name, tmp_path)
    (image,) = prepare(name, whole, [0])
    # Three positions per temporal grid step, and more than three rows.
    video = make_video(whole, 3, 16, 4)
    prompt = prompt_of(whole, video, image)
    with working(tmp_path) as rig:
        found = tokens_of(rig, prompt)
        in_chunks = tokens_of(rig, prompt, chunk=7)

    assert found == expected(name, whole, prompt, video, image)
    assert in_chunks == found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_video_is_encoded_in_the_graphs_of_images_on_a_card(name: str, tmp_path: Path) -> None:
    whole = make_tiny_vision(name, tmp_path)
    (image,) = prepare(name, whole, [0])
    # 48 patches in total, with launches of 16 patches only.
    prompt = prompt_of(whole, make_video(whole, 3, 4, 4), image)
    with working(tmp_path) as on_cpu:
        expected = tokens_of(on_cpu, prompt)

    table = replace(TABLE, images="16")
    card = {"device": "hpu-emulator", "emulator": STRICT, "buckets": table}
    with working(tmp_path, **card, **(SLICE if name in WITH_STATES else {})) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        found = tokens_of(rig, prompt, chunk=23)
        after = [counts[name] for name in COUNTERS]

    assert found == expected
    assert after == before


def positions(placed: list[ImagePlacement], tokens: list[int]) -> np.ndarray:
    known = np.array(tokens)
    places = [
        item.offset + np.flatnonzero(np.isin(known[item.offset : item.offset + item.length],
                                            (IMAGE, VIDEO)))
        for item in placed
    ]  # fmt: skip
    return _axes(placed, places, len(tokens))


@pytest.mark.parametrize("seconds", [0.08, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("grid", [(2, 4, 6), (4, 8, 2), (6, 12, 12)])
def test_positions_equal_transformers_if_time_is_not_the_longest_axis(
    grid: tuple[int, int, int], seconds: float, tmp_path: Path
) -> None:
    whole = make_tiny_vision("qwen2_5_vl", tmp_path, vision={"tokens_per_second": 2})
    video = make_video(whole, *grid)
    tokens = [5, 6, 7, *video.tokens, 8, 9]
    step = float(np.float32(2) * np.float32(seconds))
    placed = ImagePlacement(b"v", 3, len(video.tokens), video.grid, step)
    ids = torch.tensor([tokens])
    theirs, _ = whole.model.get_rope_index(
        ids,
        mm_token_type_ids=2 * (ids == VIDEO).long(),
        video_grid_thw=video.tensors["image_grid_thw"],
        second_per_grid_ts=torch.tensor([seconds]),
    )
    ours = positions([placed], tokens)
    last = len(tokens) - 2
    longest = max(grid[1:]) // 2 - 1

    assert np.array_equal(ours[:, : last - 1], theirs[:, 0, : last - 1])
    if (grid[0] - 1) * step < longest + 1:
        assert np.array_equal(ours, theirs[:, 0])


def test_text_positions_after_a_long_video_continue_from_its_last_time(tmp_path: Path) -> None:
    tokens = [5, START, *[VIDEO] * 4, END, 9]
    placed = ImagePlacement(b"v", 1, 6, (4, 1, 1), 2.5)

    found = positions([placed], tokens)

    assert found[0].tolist() == [0, 1, 2, 4, 7, 9, 10, 11]
    assert found[1].tolist() == [0, 1, 2, 2, 2, 2, 10, 11]


def test_text_positions_between_the_times_of_a_video_continue(tmp_path: Path) -> None:
    whole = make_tiny_vision("qwen3_vl", tmp_path)
    video = make_video(whole, 3, 4, 8)
    tokens = [5, 6, 7, *video.tokens, 8, 9]
    # From the first time to the last, like the placement of a server.
    placed = ImagePlacement(b"v", 6, len(video.tokens) - 4, video.grid)
    ids = torch.tensor([tokens])
    theirs, _ = whole.model.get_rope_index(
        ids,
        mm_token_type_ids=2 * (ids == VIDEO).long(),
        video_grid_thw=video.tensors["image_grid_thw"],
    )

    assert np.array_equal(positions([placed], tokens), theirs[:, 0])


def test_a_video_whose_times_are_cut_is_refused() -> None:
    tokens = [VIDEO, 5, VIDEO, VIDEO, VIDEO]

    with pytest.raises(RuntimeError, match=r"in 2 parts of \[1, 3\]"):
        positions([ImagePlacement(b"v", 0, 5, (2, 1, 2))], tokens)
