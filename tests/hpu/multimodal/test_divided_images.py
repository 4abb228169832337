"""Images divided among two ranks: each image is encoded on a single rank, and both ranks give the
tokens of a rank that encodes all images."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from image_traffic import ImageRig, random_images, text, write
from rank_pool import RankPool
from strict_card import COUNTERS, STRICT
from tiny_vision_models import Picture, make_tiny_vision, prepare
from two_prompts import TABLE, working
from worker_rig import WorkerRig

from config.errors import ConfigError
from config.parallel import ParallelConfig
from hpu.distributed.process_groups import ProcessGroup
from hpu.multimodal.device_launches import DeviceLaunches
from hpu.multimodal.own_shapes import divided
from hpu.protocol import Ranks

SIZES = {"qwen2_5_vl": "16,48", "mistral3": "16,48", "llava_next": "1,2"}
"""Values of --multimodal-buckets."""


class Encoded(NamedTuple):
    """Results and counts of a single rank."""

    tokens: list[list[int]]
    count: int
    """Number of images, or on a card of tiles or patches without padding."""
    sizes: list[int]
    """Padded sizes of all launches."""


def test_images_are_divided_largest_first_to_the_smallest_part() -> None:
    assert divided([5, 9, 4, 4, 1], 2) == [1, 0, 1, 0, 1]
    assert divided([3], 4) == [0]
    assert divided([], 2) == []


def test_dividing_the_weights_of_a_tower_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights of vision towers are not divided among devices"):
        ParallelConfig(tensor_parallel_size=2, mm_encoder_tp_mode="weights")


def settings_of(group: ProcessGroup, store: Path) -> dict[str, Any]:
    return {
        "ranks": Ranks(group.size, group.rank, f"file://{store}", timeout_s=60),
        "parallel": ParallelConfig(tensor_parallel_size=group.size, mm_encoder_tp_mode="data"),
    }


def several(rig: WorkerRig, pictures: list[Picture]) -> list[list[int]]:
    """Tokens of all images in one plan, then of a single image, with decodes of both requests."""
    images = ImageRig(rig)
    named = [(b"picture %d" % index, item) for index, item in enumerate(pictures)]
    images.admit(0, write(text(1, 3), *named[:-1], text(2, 4)))
    images.admit(1, write(text(3, 5)))
    rig.prefill({0: None, 1: None})
    rig.step()
    images.admit(2, write(named[-1], text(4, 2)))
    rig.prefill({2: None})
    rig.step()
    rig.run([0, 1, 2], 4)
    return [rig.free(index) for index in range(3)]


def traffic(rig: WorkerRig, pictures: list[Picture]) -> list[list[int]]:
    """Tokens of two images in one plan, then of random requests."""
    images = ImageRig(rig)
    for index in range(2):
        images.admit(index, write(text(index, 3), (b"new %d" % index, pictures[index])))
    while left := {
        i: request.known - request.computed
        for i, request in rig.requests.items()
        if not request.sampled
    }:
        rig.prefill({index: min(count, 23) for index, count in left.items()})
        rig.step()
    images.free_all()
    return [rig.free(0), rig.free(1), *random_images(rig, pictures, max_chunk=23)]


def on_cpu(group: ProcessGroup, folder: Path, store: Path, pictures: list[Picture]) -> Encoded:
    settings = settings_of(group, store)
    rig = WorkerRig(folder, max_num_batched_tokens=1024, images_per_request=4, **settings)
    try:
        assert rig.worker.loaded.tower is not None
        tower: Any = rig.worker.loaded.tower
        counted, forward = [], tower.forward

        def counting(tensors: Any) -> Any:
            counted.append(1)
            return forward(tensors)

        tower.forward = counting
        return Encoded(several(rig, pictures), len(counted), [])
    finally:
        rig.worker.close()


def on_card(
    group: ProcessGroup, folder: Path, store: Path, pictures: list[Picture], sizes: str
) -> Encoded:
    launched: list[int] = []
    own: list[int] = []
    launch = DeviceLaunches.launch

    def counting(self: DeviceLaunches, size: int, given: Any, rows: Any) -> None:
        launched.append(size)
        own.append(sum(bool(name.any()) for name in given[0]) if given else 0)
        launch(self, size, given, rows)

    DeviceLaunches.launch = counting  # type: ignore[method-assign]
    try:
        with working(
            folder,
            device="hpu-emulator",
            emulator=STRICT,
            buckets=replace(TABLE, images=sizes),
            **settings_of(group, store),
        ) as rig:
            counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
            before = [counts[name] for name in COUNTERS]
            launched.clear(), own.clear()
            tokens = traffic(rig, pictures)
            after = [counts[name] for name in COUNTERS]
    finally:
        DeviceLaunches.launch = launch  # type: ignore[method-assign]
    assert after == before and before[0] > 0 and before[2] == 0
    return Encoded(tokens, sum(own), launched)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), joins=False) as pool:
        yield pool


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_vl",
        *(pytest.param(item, marks=pytest.mark.slow) for item in ("mllama", "phi4_multimodal")),
    ],
)
def test_two_ranks_on_a_cpu_encode_each_image_once(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    whole = make_tiny_vision(name, tmp_path)
    pictures = prepare(name, whole, [0, 1, 2, 3])
    rig = WorkerRig(tmp_path, max_num_batched_tokens=1024, images_per_request=4)
    try:
        expected = several(rig, pictures)
    finally:
        rig.worker.close()

    found = pool.run(2, on_cpu, tmp_path, tmp_path / "store", pictures)

    assert [entry.tokens for entry in found] == [expected, expected]
    # Three images in a plan, and then a single image, which goes to the first rank.
    assert sum(entry.count for entry in found) == 4
    assert all(entry.count for entry in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "mistral3", "llava_next", "mllama"])
def test_two_emulated_cards_run_the_same_launches_and_compile_nothing(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    whole = make_tiny_vision(name, tmp_path)
    pictures = prepare(name, whole, [0, 1, 2, 3])
    with working(tmp_path) as rig:
        expected = traffic(rig, pictures)
    sizes = SIZES.get(name, "auto")

    (alone,) = pool.run(1, on_card, tmp_path, tmp_path / "store", pictures, sizes)
    found = pool.run(2, on_card, tmp_path, tmp_path / "stores", pictures, sizes)

    assert [item.tokens for item in (alone, *found)] == [expected] * 3
    assert found[0].sizes == found[1].sizes
    assert sum(entry.count for entry in found) == alone.count
    assert all(entry.count for entry in found) and len(found[0].sizes) < len(alone.sizes)
