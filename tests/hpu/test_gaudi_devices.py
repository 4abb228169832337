"""The table of devices, and its entries for kernels and releases."""

import pytest

from config.errors import ConfigError
from hpu.emulator.settings import EmulatorConfig
from hpu.gaudi_devices import (
    GENERATIONS,
    generation,
    has_kernel,
    max_experts,
    release_of,
    torch_of_release,
)


def test_the_generations_differ_in_memory_and_fp8_range() -> None:
    older, newer = generation("gaudi2"), generation("gaudi3")

    assert (older.memory_bytes >> 30, newer.memory_bytes >> 30) == (96, 128)
    assert (older.fp8_max, newer.fp8_max) == (240, 448)
    assert round(older.usable_bytes / 2**30, 2) == 94.62


def test_an_unknown_generation_is_refused_with_the_known_generations() -> None:
    with pytest.raises(ConfigError, match="'gaudi1' is not one of gaudi2, gaudi3"):
        generation("gaudi1")


@pytest.mark.parametrize("name", GENERATIONS)
def test_an_emulated_card_is_as_large_as_the_table_says(name: str) -> None:
    config = EmulatorConfig(generation=name, memory_bytes=None)

    assert config.limit_bytes == GENERATIONS[name].memory_bytes


@pytest.mark.parametrize(
    ("kernel", "device", "release", "expected"),
    [
        ("FusedSDPA", "gaudi2", None, True),
        ("FusedSDPA.sinks", "gaudi2", (1, 24), None),
        ("block_softmax_adjustment", "gaudi2", (1, 24, 0, 1), None),
        ("block_softmax_adjustment", "gaudi3", (1, 22, 0, 493), False),
        ("block_softmax_adjustment", "gaudi3", (1, 22, 0, 494), True),
        ("block_softmax_adjustment", "gaudi3", (1, 22, 1), True),
        ("block_softmax_adjustment", "gaudi3", (1, 22, 0), None),
        ("block_softmax_adjustment", "gaudi3", None, None),
        ("convert_from_uint4.g_idx", "gaudi2", (1, 19, 0), False),
        ("convert_from_uint4.g_idx", "gaudi2", (1, 22, 0), True),
        ("mixture_of_experts.bias_fused_weights", "gaudi2", (1, 22, 2), False),
        ("mixture_of_experts.bias_fused_weights", "gaudi3", (1, 23, 0), True),
    ],
)
def test_a_kernel_exists_since_its_release(
    kernel: str, device: str, release: tuple[int, ...] | None, expected: bool | None
) -> None:
    assert has_kernel(kernel, device, release) is expected


def test_release_1_20_takes_64_experts_in_a_call() -> None:
    releases = ((1, 20), (1, 20, 0, 543), (1, 21, 3), (1, 19, 0), None)

    assert [max_experts(release) for release in releases] == [64, 64, None, None, None]


def test_the_release_is_parsed_from_a_version_string() -> None:
    texts = ("1.22.1-6f0bb5a", "1.22.0.740", "hl-smi", "1")

    releases = [release_of(text) for text in texts]

    assert releases == [(1, 22, 1), (1, 22, 0, 740), None, None]
    assert torch_of_release((1, 24, 1, 482)) == (2, 11)
    assert torch_of_release((1, 23, 0)) == (2, 9)
    assert torch_of_release((1, 21, 3, 57)) == (2, 6)
    assert torch_of_release((1, 25, 0)) is None
