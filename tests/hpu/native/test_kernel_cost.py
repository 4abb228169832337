"""What the compiled products cost, as ratios of the least times of many: other work on the machine
slows both."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from hpu.native.library import Library, PackedLinear
from hpu.quantization.int4 import quantize_int4

OUT, SIZE, ROUNDS = 8192, 1024, 40


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
    # Without AVX-512, one core takes longer to unpack four bits than to read sixteen.
    assert four_s < (1.4 if lone.instruction_set == "AVX2" else 0.9) * wide_s
