"""Cost of the compiled products, as ratios of minimum times over many runs: other work on the
machine slows both sides."""

import time
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpu.native.library import Library, PackedLinear
from hpu.quantization.weight_only import quantize_int4, quantize_int8

OUT, SIZE, ROUNDS, LAYERS = 8192, 1024, 40, 16


def least(*calls: Callable[[Tensor], Tensor], given: Tensor) -> list[float]:
    """Minimum CPU seconds of this thread for each of `calls`, which alternate."""
    times = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for index, call in enumerate(calls):
            start = time.thread_time()
            call(given)
            times[index] = min(times[index], time.thread_time() - start)
    return times


@torch.inference_mode()
def test_a_single_row_is_faster_in_fewer_bits_and_as_fast_as_torch(lone: Library) -> None:
    weight = torch.randn(OUT, SIZE).bfloat16()
    wide = PackedLinear(lone, weight, None)
    four = PackedLinear(lone, quantize_int4(weight), None)

    plain_s, wide_s, four_s = least(
        lambda x: functional.linear(x, weight), wide, four, given=torch.randn(1, SIZE).bfloat16()
    )

    assert wide_s < 1.2 * plain_s
    assert four_s < 0.9 * wide_s


@torch.inference_mode()
@pytest.mark.parametrize("rows", [8, 48])
def test_many_rows_are_as_fast_in_fewer_bits(rows: int, lone: Library) -> None:
    if lone.instruction_set == "AVX512-BF16":
        pytest.skip("weights are rounded to bfloat16 first, which takes longer")
    weights = [torch.randn(2048, SIZE).bfloat16() for _ in range(LAYERS)]
    wide, four, eight = (
        in_turn([PackedLinear(lone, change(weight), None) for weight in weights])
        for change in (torch.clone, quantize_int4, quantize_int8)
    )

    wide_s, four_s, eight_s = least(wide, four, eight, given=torch.randn(rows, SIZE).bfloat16())

    # Products of many rows are limited by the same instructions: 5 % is noise.
    assert max(four_s, eight_s) < 1.05 * wide_s


def in_turn(layers: list[PackedLinear]) -> Callable[[Tensor], Tensor]:
    """A function that calls the layers in turn, so that the weights are not in the CPU caches."""
    left = cycle(layers)
    return lambda x: next(left)(x)
