"""Small programs that a real card runs differently, and that the emulator once allowed or refused:
forms of variables, and results of another dtype, by release."""

from pathlib import Path

import pytest
import torch
from emulated import emulated
from torch import Tensor

from config.loading.recipe_cache import RECIPE_CACHE_CONFIG

BFLOAT16 = torch.bfloat16
OLD, NEW = "1.21.3.57", "1.24.1.482"


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


@pytest.mark.parametrize(
    ("release", "config", "is_taken"),
    [
        (OLD, "FOLDER", True),
        (OLD, "FOLDER,false,100", True),
        (OLD, "FOLDER,false,100,false", False),
        (NEW, "FOLDER", True),
        (NEW, "FOLDER,false,100", False),
        (NEW, "FOLDER,false", False),
        (NEW, "FOLDER,false,100,false", True),
        (NEW, "FOLDER/a b,false,100,false", False),
    ],
)
def test_a_release_refuses_fields_and_paths_of_other_releases(
    release: str, config: str, is_taken: bool, tmp_path: Path
) -> None:
    variables = {RECIPE_CACHE_CONFIG: config.replace("FOLDER", str(tmp_path))}
    if is_taken:
        with emulated(variables=variables, release=release):
            assert _ones().add(1).tolist() == [2.0] * 4
        return
    with (
        pytest.raises(RuntimeError, match=RECIPE_CACHE_CONFIG),
        emulated(variables=variables, release=release),
    ):
        pass


def test_the_norm_of_a_matrix_is_refused() -> None:
    with emulated():
        norm = torch.ops.hpu.rms_norm
        assert norm(_ones(1, 2, 4), _ones(4), 0.0)[0].shape == (1, 2, 4)
        with pytest.raises(RuntimeError, match="3 dimensions"):
            norm(_ones(2, 4), _ones(4), 0.0)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_product_writes_another_dtype_only_in_later_releases(lazy: bool) -> None:
    for release, is_taken in (("1.23.0.695", False), ("1.24.0.171", True)):
        with emulated(lazy, release=release), torch.inference_mode():
            left, right = _ones(2, 3, dtype=BFLOAT16), _ones(3, 2, dtype=BFLOAT16)
            wide = torch.empty(2, 2, device="hpu")
            if is_taken:
                torch.matmul(left, right, out=wide)
                assert wide.tolist() == [[3.0, 3.0]] * 2
                continue
            with pytest.raises(RuntimeError, match=r"the result is torch\.float32"):
                torch.matmul(left, right, out=wide)


@pytest.mark.parametrize("lazy", [True, False])
def test_unfold_runs_on_the_host_in_lazy_mode(lazy: bool) -> None:
    with emulated(lazy) as card:
        windows = torch.arange(4.0).to("hpu").unfold(0, 2, 2)
        assert windows.tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert card.counters.fallback_ops == ({"unfold": 1} if lazy else {})


@pytest.mark.parametrize("lazy", [True, False])
def test_take_accepts_indices_in_32_bits(lazy: bool) -> None:
    with emulated(lazy) as card:
        indices = torch.tensor([2, 0], dtype=torch.int32).to("hpu")
        assert torch.take(torch.arange(4.0).to("hpu"), indices).tolist() == [2.0, 0.0]
        assert card.counters.fallback_ops == {}
