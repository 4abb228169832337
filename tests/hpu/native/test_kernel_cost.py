"""What the compiled products cost, as ratios of the least times of many: other work on the machine
slows both."""

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
    """Seconds of this thread, which are taken in turns."""
    times = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for index, call in enumerate(calls):
            start = time.thread_time()
            call(given)
            times[index] = min(times[index], time.thread_time() - start)
    return times


@torch.inference_mode()
def test_one_row_costs_less_in_fewer_bits_and_no_more_than_torchs_product(lone: Library) -> None:
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
def test_many_rows_cost_no_more_in_fewer_bits(rows: int, lone: Library) -> None:
    if lone.instruction_set == "AVX512-BF16":
        pytest.skip("weights are rounded to bfloat16 first, which takes longer")
    weights = [torch.randn(2048, SIZE).bfloat16() for _ in range(LAYERS)]
    wide, four, eight = (
        in_turn([PackedLinear(lone, change(weight), None) for weight in weights])
        for change in (torch.clone, quantize_int4, quantize_int8)
    )

    wide_s, four_s, eight_s = least(wide, four, eight, given=torch.randn(rows, SIZE).bfloat16())

    # Products of many rows are bound by the same instructions: 5 % is noise.
    assert max(four_s, eight_s) < 1.05 * wide_s


def in_turn(layers: list[PackedLinear]) -> Callable[[Tensor], Tensor]:
    """Each call is one of the next layer, whose weights are no longer in the caches."""
    left = cycle(layers)
    return lambda x: next(left)(x)
