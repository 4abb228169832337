"""Small programs that a real card runs differently, and that the emulator once allowed: forms of
4-bit weights, index assignments, limits and dtypes of operators, compiled operators."""

from collections.abc import Callable

import pytest
import torch
from emulated import emulated
from torch import Tensor, nn

BFLOAT16 = torch.bfloat16
BOTH_MODES = pytest.mark.parametrize("lazy", [True, False])


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device="hpu")


def _fallbacks(function: Callable[[], object], *, lazy: bool) -> dict[str, int]:
    with emulated(lazy) as card, torch.inference_mode():
        function()
        return dict(card.counters.fallback_ops)


@pytest.mark.parametrize(
    ("dtype", "groups", "zeros", "text"),
    [
        (BFLOAT16, 4, torch.zeros(4, 1, dtype=torch.int32), ""),
        (torch.float16, 4, torch.zeros(4, 1, dtype=torch.int32), "only bfloat16 output"),
        (BFLOAT16, 3, torch.zeros(3, 1, dtype=torch.int32), "8 rows do not divide evenly into 3"),
        (BFLOAT16, 4, torch.zeros(4, 8, dtype=BFLOAT16), "zero points are torch.bfloat16"),
    ],
)
def test_4_bit_weights_with_an_index_of_groups_have_the_forms_of_the_bridge(
    dtype: torch.dtype, groups: int, zeros: Tensor, text: str
) -> None:
    with emulated(release="1.22.0"):
        scales, words = _ones(groups, 8, dtype=dtype), torch.zeros(8, 1, dtype=torch.int32)
        index = (torch.arange(8, dtype=torch.int32) % groups).to("hpu")
        operands = (words.to("hpu"), scales, zeros.to("hpu"), dtype, index)
        if not text:
            assert torch.ops.hpu.convert_from_uint4(*operands).shape == (8, 8)
            return
        with pytest.raises(RuntimeError, match=text):
            torch.ops.hpu.convert_from_uint4(*operands)


def test_zero_points_of_4_bit_weights_have_the_dtype_of_the_weights_or_the_scales() -> None:
    with emulated():
        words, scales = torch.zeros(8, 1, dtype=torch.int32).to("hpu"), _ones(4, 8, dtype=BFLOAT16)
        operator = torch.ops.hpu.convert_from_uint4
        assert operator(words, scales, scales, BFLOAT16).shape == (8, 8)
        with pytest.raises(RuntimeError, match=r"zero points are torch\.float32"):
            operator(words, scales, scales.float(), BFLOAT16)


@BOTH_MODES
@pytest.mark.parametrize("value", [torch.ones(2, 4), torch.tensor(2.0)])
def test_an_index_assignment_of_lazy_mode_refuses_a_value_on_the_host(
    lazy: bool, value: Tensor
) -> None:
    with emulated(lazy):
        target, rows = torch.zeros(4, 4, device="hpu"), torch.tensor([0, 2]).to("hpu")
        if not lazy:
            target[rows] = value
            assert float(target.sum().cpu()) == 8 * float(value.max())
            return
        with pytest.raises(RuntimeError, match="found a tensor on cpu"):
            target[rows] = value
        target[rows] = value.to("hpu")
        target[rows] = 1.0


def test_a_mask_of_more_dimensions_selects_the_input_in_lazy_mode() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    for lazy, found in ((True, [1.0, 2.0]), (False, [1.0, 1.0, 2.0])):
        with emulated(lazy) as card:
            given = torch.tensor([1.0, 2.0]).to("hpu")
            assert torch.masked_select(given, mask.to("hpu")).tolist() == found
            assert card.counters.counts["mask_dims"] == lazy


def test_a_view_of_bytes_as_bool_is_a_copy_in_lazy_mode() -> None:
    for lazy, found in ((True, [0, 1]), (False, [0, 2])):
        with emulated(lazy):
            given = torch.tensor([0, 2], dtype=torch.uint8).to("hpu")
            as_bool = given.view(torch.bool)
            assert as_bool.view(torch.uint8).tolist() == found
            given.fill_(1)
            assert as_bool.tolist() == [not lazy, True]


def test_operators_of_many_dimensions_fall_back_in_eager_mode() -> None:
    def put() -> None:
        index = torch.zeros(1, dtype=torch.int64).to("hpu")
        _ones(2, 1, 1, 1, 1, 1).index_put_((index,), _ones(1))

    def unique() -> None:
        torch.unique(_ones(2, 1, 1, 1, 2))

    for function, name in ((put, "index_put_"), (unique, "_unique2")):
        assert _fallbacks(function, lazy=False) == {name: 1}
        assert _fallbacks(function, lazy=True) == {}


@BOTH_MODES
def test_convolutions_and_norms_of_other_dtypes_fall_back(lazy: bool) -> None:
    def norm(dtype: torch.dtype) -> Tensor:
        scale = _ones(4, dtype=dtype)
        given = _ones(1, 4, 2, dtype=BFLOAT16)
        return nn.functional.batch_norm(given, scale, scale, scale, scale)

    def convolve(dtype: torch.dtype) -> Tensor:
        return nn.functional.conv1d(_ones(1, 1, 4, dtype=dtype), _ones(1, 1, 2, dtype=dtype))

    def normalize() -> Tensor:
        scale = _ones(4, dtype=BFLOAT16)
        return nn.functional.instance_norm(_ones(1, 4, 2, dtype=BFLOAT16), weight=scale, bias=scale)

    assert _fallbacks(lambda: norm(torch.float32), lazy=lazy) == {}
    assert _fallbacks(lambda: norm(BFLOAT16), lazy=lazy) == {"native_batch_norm": 1}
    assert _fallbacks(lambda: convolve(BFLOAT16), lazy=lazy) == {}
    assert _fallbacks(lambda: convolve(torch.int32), lazy=lazy) == {"convolution": 1}
    assert _fallbacks(normalize, lazy=lazy) == {}


def _add_products(x: Tensor) -> tuple[Tensor, ...]:
    return torch._foreach_addcmul([x], [x], [x])


@pytest.mark.parametrize(
    ("operator", "stays"),
    [
        (_add_products, False),
        (lambda x: torch._foreach_add([x], [x]), True),
        (lambda x: torch.bucketize(0.5, x), False),
        (lambda x: torch.bucketize(x, x), True),
    ],
)
def test_products_of_lists_and_bins_of_a_number_leave_a_compiled_graph(
    operator: Callable[[Tensor], object], stays: bool
) -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        torch.compile(operator, backend="hpu_backend")(_ones())

        assert card.counters.counts["left_out_of_graph"] == (not stays)


@pytest.mark.parametrize("word", ["00", "01", "08"])
def test_a_mode_with_a_leading_zero_is_not_modelled(word: str) -> None:
    with (
        pytest.raises(NotImplementedError, match=f"PT_HPU_LAZY_MODE={word} is not modelled"),
        emulated(variables={"PT_HPU_LAZY_MODE": word}),
    ):
        pass
