"""choose_mode: the vendor's table, the choices of auto, and contradictory settings."""

from typing import Any

import pytest

from config.errors import ConfigError
from config.execution import ExecutionConfig, WarmupConfig, choose_mode, is_vendor_torch


@pytest.mark.parametrize(
    ("variable", "enforce_eager", "mode"),
    [
        ("0", False, "torch-compile"),
        ("0", True, "eager"),
        ("1", False, "hpu-graphs"),
        ("1", True, "lazy"),
    ],
)
def test_the_variable_and_eager_select_one_of_four_modes(
    variable: str, enforce_eager: bool, mode: str
) -> None:
    choice = choose_mode(
        "auto",
        enforce_eager=enforce_eager,
        lazy_variable=variable,
        has_vendor_torch=True,
        release="1.24.1.482",
    )

    assert choice.mode == mode
    assert choice.is_lazy == (variable != "0")


@pytest.mark.parametrize("variable", ["false", "2", ""])
def test_a_variable_that_the_runtime_does_not_read_as_0_or_1_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"PT_HPU_LAZY_MODE is '{variable}', it must be 0 or 1"):
        choose_mode(
            "auto",
            enforce_eager=False,
            lazy_variable=variable,
            has_vendor_torch=True,
            release="1.24.1.482",
        )


@pytest.mark.parametrize(
    ("has_vendor_torch", "release", "mode", "why"),
    [
        (True, "1.20.0.543", "hpu-graphs", "vendor's build, of release 1.20.0.543"),
        (True, "1.23.1.25", "hpu-graphs", "vendor's build"),
        (False, "1.23.1.25", "torch-compile", "vendor's build"),
        (True, "1.24.0", "torch-compile", "release is 1.24.0, HPU graphs are the default up to"),
        (True, "2.0.0", "torch-compile", "release is 2.0.0"),
        (True, "", "torch-compile", "release is unknown"),
    ],
)
def test_auto_selects_the_mode_by_torch_and_release_with_a_reason(
    has_vendor_torch: bool, release: str, mode: str, why: str
) -> None:
    choice = choose_mode(
        "auto",
        enforce_eager=False,
        lazy_variable=None,
        has_vendor_torch=has_vendor_torch,
        release=release,
    )

    assert choice.mode == mode
    assert why in choice.reason


@pytest.mark.parametrize(
    ("asked", "enforce_eager", "variable", "has_vendor_torch", "words"),
    [
        ("hpu-graphs", False, None, False, "needs the vendor's build of torch"),
        ("auto", False, "1", False, "PT_HPU_LAZY_MODE is 1"),
        ("torch-compile", False, "1", True, "needs 0"),
        ("hpu-graphs", False, "0", True, "needs 1"),
        ("torch-compile", True, None, True, "enforce-eager"),
    ],
)
def test_contradictory_modes_are_refused_with_both_settings(
    asked: str, enforce_eager: bool, variable: str | None, has_vendor_torch: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_mode(
            asked,
            enforce_eager=enforce_eager,
            lazy_variable=variable,
            has_vendor_torch=has_vendor_torch,
            release="1.22.1",
        )


def test_invalid_graph_memory_fractions_and_mode_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"graph_memory_fraction is 1\.5"):
        WarmupConfig(graph_memory_fraction=1.5)
    with pytest.raises(ConfigError, match="mode is 'fast'"):
        ExecutionConfig(mode="fast")


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (8192, 4096)),
        ({"sdpa_slice_threshold": 3000}, (3000, 2048)),
        ({"sdpa_slice_size": 1500}, (8192, 2048)),
        ({"sdpa_slicing": False}, None),
        ({"fused_sdpa": False}, None),
    ],
)
def test_slice_sizes_are_half_of_the_threshold_in_multiples_of_1024(
    settings: dict[str, Any], sizes: tuple[int, int] | None
) -> None:
    assert ExecutionConfig(**settings).slice_sizes == sizes


def test_a_slice_above_the_threshold_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--fsdpa-slice-size is 9216, .* 8192"):
        ExecutionConfig(sdpa_slice_size=8193)


@pytest.mark.parametrize(("text", "found"), [("2,128", (2, 128, 0)), ("1, 256, 3", (1, 256, 3))])
def test_profile_prompt_is_read_with_and_without_cached_context(
    text: str, found: tuple[int, int, int]
) -> None:
    assert ExecutionConfig(profile_prompt=text).profiled_prompt == found


def test_a_profiled_decode_has_one_token_per_sequence() -> None:
    assert ExecutionConfig(profile_decode="4,64").profiled_decode == (4, 1, 64)
    assert ExecutionConfig().profiled_decode is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profile_prompt": "128"}, "'128', it must be BATCH,TOKENS or BATCH,TOKENS,BLOCKS"),
        ({"profile_prompt": "1,2,3,4"}, "'1,2,3,4', it must be BATCH,TOKENS"),
        ({"profile_decode": "4,64,1"}, "profile_decode is '4,64,1', it must be BATCH,BLOCKS"),
        ({"profile_decode": "decode_4_64_t"}, "must be BATCH,BLOCKS"),
    ],
)
def test_an_invalid_profile_setting_is_refused_with_the_allowed_form(
    settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ExecutionConfig(**settings)


@pytest.mark.parametrize(
    ("version", "is_vendor"),
    [
        ("2.6.0+hpu_1.20.0-543.git4952fce", True),
        ("2.6.0+hpu_1.21.3-57.gitabf798b", True),
        ("2.7.1+hpu.1.22.2.32.git6dbe0a4", True),
        ("2.9.0+hpu.1.23.0.695", True),
        ("2.9.0+hpu_1.23.1-25.git8598e6d", True),
        ("2.10.0a0+gitc1e5ed4", True),
        ("2.13.0+cpu", False),
        ("2.11.0+cu128", False),
        ("2.7.1", False),
    ],
)
def test_torch_builds_by_habana_are_recognized(version: str, is_vendor: bool) -> None:
    assert is_vendor_torch(version) == is_vendor
