"""Small programs that a real card refuses, or runs differently, and that the emulator once allowed:
the functions of the vendor's package, and the arguments of its operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ops() -> Any:
    return torch.ops.hpu


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*(shape or (4,)), dtype=dtype, device="hpu")


def _narrow(*shape: int) -> Tensor:
    return _ones(*(shape or (4, 4))).to(E4M3)


def test_autograd_functions_refuse_keyword_arguments() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA, RotaryPosEmbeddingHelperV1
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

        x = _ones(1, 2, 4, 8)
        with pytest.raises(TypeError, match="is_causal"):
            FusedSDPA.apply(x, x, x, is_causal=True)
        with pytest.raises(TypeError, match="eps"):
            FusedRMSNorm.apply(x, _ones(8), eps=1e-6)
        with pytest.raises(TypeError, match="offset"):
            RotaryPosEmbeddingHelperV1.apply(x, _ones(4, 8), _ones(4, 8), offset=0)


def test_synchronize_takes_no_device_argument() -> None:
    with emulated(), pytest.raises(TypeError):
        _hpu().synchronize("hpu")


@pytest.mark.parametrize(
    "use",
    [
        lambda hpu: hpu.memory_allocated(),
        lambda hpu: hpu.max_memory_allocated(),
        lambda hpu: hpu.memory_stats(),
        lambda hpu: hpu.memory_reserved(),
        lambda hpu: hpu.reset_peak_memory_stats(),
        lambda hpu: hpu.reset_accumulated_memory_stats(),
        lambda hpu: hpu.Stream(),
    ],
    ids=["allocated", "largest", "statistics", "reserved", "peak", "numbers", "stream"],
)
def test_memory_queries_and_streams_acquire_the_card(use: Callable[[Any], Any]) -> None:
    with emulated() as card:
        use(_hpu())

        assert card.device.acquisition.is_acquired


@pytest.mark.parametrize(
    "name",
    [
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "memory_reserved",
        "max_memory_reserved",
        "utilization",
    ],
)
def test_device_functions_refuse_missing_and_other_devices(name: str) -> None:
    with emulated(num_devices=2):
        with pytest.raises(AssertionError, match="Invalid device id: 2"):
            getattr(_hpu(), name)(2)
        with pytest.raises(ValueError, match="Expected a hpu device"):
            getattr(_hpu(), name)("cpu")


def test_the_only_card_can_be_selected_and_has_a_single_rng_state() -> None:
    with emulated(variables={"HLS_MODULE_ID": "3"}):
        hpu = _hpu()
        for index in (0, "hpu", "hpu:3"):
            with hpu.device(index):
                assert _ones().sum().item() == 4
        with pytest.raises(AssertionError, match="different from env_device_id=3"):
            hpu.device(1).__enter__()

        (state,) = hpu.get_rng_state_all()
        hpu.seed_all()
        hpu.set_rng_state_all([state])
        assert torch.equal(hpu.get_rng_state(), state)
        with pytest.raises(RuntimeError, match="states len of 1"):
            hpu.set_rng_state_all([])


def test_attention_without_recomputation_keeps_its_probabilities() -> None:
    largest = {}
    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        hpu, q = _hpu(), torch.randn(1, 2, 64, 8).bfloat16().to("hpu")
        for way in ("recomputes", "argument", "switch"):
            hpu.reset_peak_memory_stats()
            before = hpu.memory_allocated()
            with hpu.sdp_kernel(enable_recompute=way != "switch"):
                mode = None if way == "switch" else way == "recomputes"
                out = FusedSDPA.apply(q, q, q, None, 0.0, True, None, "None", mode)
            largest[way] = hpu.max_memory_allocated() - before
            assert torch.allclose(out.cpu().float(), _attended(q), atol=0.05)
            del out
        assert hpu.recompute_sdp_enabled()

    probabilities = 2 * 64 * 64 * 2
    assert largest["recomputes"] < probabilities < largest["argument"]
    assert largest["switch"] > probabilities


def _attended(q: Tensor) -> Tensor:
    own = q.cpu().float()
    return torch.nn.functional.scaled_dot_product_attention(own, own, own, is_causal=True)


def test_attention_reads_its_modes_in_any_case_and_refuses_a_mask_of_one_row() -> None:
    with emulated(release="1.23.0"):
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        q = _ones(1, 2, 4, 8, dtype=torch.bfloat16)
        start = (None, 0.0, True, None, "Fast", None, None, "Right", False, False)
        assert FusedSDPA.apply(q, q, q, *start, (-1, -1), None).shape == q.shape
        with pytest.raises(RuntimeError, match=r"sink.*not modelled"):
            FusedSDPA.apply(q, q, q, *start, (-1, -1), q)
        with pytest.raises(AssertionError, match="unsupported 2D attention mask"):
            FusedSDPA.apply(q, q, q, _ones(1, 4, dtype=torch.bfloat16))


def test_attention_operators_require_a_scale() -> None:
    with emulated():
        q = _ones(1, 2, 4, 8)
        with pytest.raises(RuntimeError, match="'float' for argument 'scale'"):
            _ops().sdpa_recomp_fwd(q, q, q, None, 0.0, None, True, False, "None", None, "left")
        with pytest.raises(RuntimeError, match="'float' for argument 'scale'"):
            _ops().sdpa_fwd(q, q, q, None, 0.0, None, True, "None", None, "left")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda ops: ops.cast_to_fp8_v2(_ones(dtype=torch.float16), dtype=E4M3),
            "input dtype must be one of",
        ),
        (
            lambda ops: ops.cast_to_fp8_v2(_ones(dtype=torch.int32), dtype=E4M3),
            "input dtype must be one of",
        ),
        (lambda ops: ops.cast_to_fp8_v2(_narrow(), None, False, True, E4M3), "have no amax"),
        (lambda ops: ops.cast_to_fp8_v2(_narrow(), None, False, False, E5M2), "the same dtype"),
        (lambda ops: ops.cast_from_fp8(_narrow(), None, torch.float16), "output dtype must be"),
        (
            lambda ops: ops.fp8_gemm_v2(
                *(_narrow(), False, _narrow(), False, None, torch.float32, None, None, None, True)
            ),
            "Accumulation tensor must be provided",
        ),
        (
            lambda ops: ops.fp8_gemm_v2(
                _narrow(), False, _narrow(), False, None, torch.float32, 1.0
            ),
            "failed to match any schema",
        ),
        (lambda ops: ops.softmax_fp8(_ones(2, 4), -1), "must be of torch.bfloat16"),
        (
            lambda ops: ops.softmax_fp8(_ones(2, 4, dtype=torch.bfloat16), -1, _ones(1)),
            "both given or None",
        ),
        (lambda ops: ops.softmax_fp8(_narrow(), -1), "input scale must be given"),
    ],
    ids=[
        *("float16", "int32", "largest of FP8", "another FP8", "to float16", "sum without D"),
        *("one scale of two", "float32", "one scale", "FP8 without scale"),
    ],
)
def test_fp8_operators_refuse_what_the_bridge_refuses(
    call: Callable[[Any], Any], text: str
) -> None:
    with emulated(), pytest.raises(RuntimeError, match=text):
        call(_ops())


def test_operators_accept_the_argument_names_of_the_bridge() -> None:
    with emulated():
        x = _ones(2, 4)
        narrow, _ = _ops().cast_to_fp8_v2(input=x, scale=2.0, dtype=E4M3)
        assert (
            _ops().cast_from_fp8(input=narrow, scale=0.5, out_dtype=x.dtype).tolist()
            == [[1.0] * 4] * 2
        )
        normed, _ = _ops().rms_norm(data_in=x.unsqueeze(0), gamma=_ones(4), epsilon=0.0)
        assert normed.tolist() == [x.tolist()]
        assert _ops().custom_softmax(input=x, flavor=0)[0].tolist() == [0.25] * 4


def test_apply_rotary_pos_emb_accepts_a_cache_of_cosines_and_sines() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import (
            RotaryPosEmbeddingHelperV3,
            apply_rotary_pos_emb,
        )

        p, cache = torch.randn(4, 1, 2, 8).to("hpu"), torch.randn(4, 1, 4, 2).to("hpu")

        found = apply_rotary_pos_emb(p, cache).cpu()

        assert torch.equal(found, RotaryPosEmbeddingHelperV3.apply(p, cache).cpu())


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("nanmedian", lambda: _ones(2, 2).nanmedian(0)),
        ("linalg_lstsq", lambda: torch.linalg.lstsq(_ones(2, 2), _ones(2, 2))),
        ("cholesky_solve", lambda: torch.cholesky_solve(_ones(2, 2), _ones(2, 2))),
        ("special_zeta", lambda: torch.special.zeta(2.0, _ones())),
    ],
)
def test_operators_composed_of_unsupported_operators_fall_back(
    name: str, use: Callable[[], object]
) -> None:
    with emulated() as card:
        use()

        assert card.counters.fallback_ops == {name: 1}


def test_negative_indices_read_zeros() -> None:
    x = torch.arange(1.0, 25).view(2, 3, 4)
    first, second = torch.tensor([0, -1, 1]), torch.tensor([2, 1, 0])
    reads: list[tuple[tuple[Any, ...], Tensor]] = [
        ((first,), x[first]),
        ((slice(None), second, first), x[:, second, first]),
        ((first, slice(None), second), x[first, :, second]),
        ((slice(None), first), x[:, first]),
    ]
    for key, expected in reads:
        with emulated() as card:
            own = tuple(part.to("hpu") if isinstance(part, Tensor) else part for part in key)
            found = x.to("hpu")[own].cpu()

            assert card.counters.counts["negative_index"] == 1
        is_first = isinstance(key[0], Tensor)
        rows = found if is_first else found.transpose(0, 1)
        wanted = expected if is_first else expected.transpose(0, 1)
        assert torch.equal(rows[0::2], wanted[0::2]) and not rows[1].any()
