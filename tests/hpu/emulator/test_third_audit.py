"""Small programs that a real card refuses, or runs differently, and that the emulator once
allowed."""

import importlib
from collections import UserDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor, nn
from torch import distributed as dist


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*(shape or (4,)), dtype=dtype, device="hpu")


def test_a_userdict_argument_is_captured_at_each_call() -> None:
    with emulated() as card:
        graph = _hpu().wrap_in_hpu_graph_func(lambda given: given["x"] + 1)

        graph(UserDict(x=_ones()))
        out = graph(UserDict(x=_ones() * 5))

        assert out.tolist() == [6.0] * 4
        assert card.counters.counts["captures"] == 2
        assert card.counters.counts["scalar_in_key"] == 1


def test_a_number_in_a_userdict_is_a_type_error() -> None:
    with emulated(), pytest.raises(TypeError, match="not iterable"):
        _hpu().wrap_in_hpu_graph_func(lambda given: given)(UserDict(x=1))


def test_a_graph_without_tensor_cache_keeps_tensors_inside_a_returned_object() -> None:
    with emulated(strict=True):
        graph = _hpu().wrap_in_hpu_graph_func(
            lambda x: SimpleNamespace(sum=x + 1), disable_tensor_cache=True
        )

        assert graph(_ones()).sum.tolist() == [2.0] * 4


@pytest.mark.parametrize("is_given", [True, False])
def test_a_graph_context_captures_on_its_own_stream(is_given: bool) -> None:
    with emulated() as card:
        hpu = _hpu()
        stream = hpu.Stream() if is_given else None
        x = _ones()
        with hpu.graph(hpu.HPUGraph(), stream):
            inside = hpu.current_stream()
            y = x + 1

        y + 1

        assert inside is not hpu.default_stream()
        assert stream is None or inside is stream
        assert hpu.current_stream() is hpu.default_stream()
        assert card.counters.counts["stream_order"] == 1


def test_graph_contexts_share_a_capture_stream() -> None:
    with emulated():
        hpu = _hpu()
        streams = []
        for _ in range(2):
            with hpu.graph(hpu.HPUGraph()):
                streams.append(hpu.current_stream())

        assert streams[0] is streams[1]


def test_the_card_has_its_own_generator() -> None:
    torch.manual_seed(4)
    with emulated():
        hpu = _hpu()
        assert torch.equal(torch.get_rng_state(), hpu.get_rng_state())

        torch.manual_seed(5)
        both = torch.get_rng_state()
        assert torch.equal(both, hpu.get_rng_state())

        hpu.manual_seed(6)
        assert torch.equal(both, torch.get_rng_state())
        assert not torch.equal(both, hpu.get_rng_state())

        hpu.set_rng_state(both)
        drawn = torch.rand(4, device="hpu").tolist()
        assert torch.equal(both, torch.get_rng_state())
        assert torch.rand(4).tolist() != drawn

        torch.manual_seed(5)
        assert torch.rand(4, device="hpu").tolist() == drawn

        hpu.seed()
        assert torch.initial_seed() == 5
        torch.seed()
        assert torch.initial_seed() == hpu.initial_seed()


def test_a_given_generator_leaves_the_rng_state_of_the_card_unchanged() -> None:
    with emulated():
        state = _hpu().get_rng_state()

        first, second = (
            torch.rand(4, device="hpu", generator=torch.Generator().manual_seed(3)).tolist()
            for _ in range(2)
        )

        assert first == second
        assert torch.equal(state, _hpu().get_rng_state())


@pytest.mark.parametrize("name", ["get_rng_state", "set_rng_state"])
def test_rng_functions_refuse_another_device(name: str) -> None:
    arguments = (torch.get_rng_state(),) if name == "set_rng_state" else ()
    with emulated(), pytest.raises(RuntimeError, match="supports only device 0"):
        getattr(_hpu(), name)(*arguments, 1)


@pytest.mark.parametrize("name", ["memory_allocated", "mem_get_info", "get_device_name"])
def test_a_missing_device_is_refused(name: str) -> None:
    with emulated(num_devices=2), pytest.raises(AssertionError, match="Invalid device id: hpu:2"):
        getattr(_hpu(), name)("hpu:2")


def test_memory_usage_returns_bytes_and_device_properties_return_text() -> None:
    with emulated(generation="gaudi2"):
        x = _ones(1 << 16)

        assert _hpu().memory_usage() == x.numel() * 4
        assert "dramSize=" in _hpu().get_device_properties()


def _with_mask(*shape: int) -> Tensor:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    out: Tensor = FusedSDPA.apply(_ones(1, 4, 3, 8), *(_ones(1, 2, 3, 8),) * 2, _ones(*shape))
    return out


@pytest.mark.parametrize("shape", [(1, 3, 3), (1, 1, 1, 3, 3)])
def test_grouped_attention_refuses_a_mask_without_heads(shape: tuple[int, ...]) -> None:
    with emulated(), pytest.raises(ValueError, match="4 are needed"):
        _with_mask(*shape)


def test_a_scale_of_zero_is_not_treated_as_missing() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import FusedSDPA

        values = torch.randn(1, 1, 3, 8)
        q = torch.randn(1, 1, 3, 8).to("hpu")
        out = FusedSDPA.apply(q, q, values.to("hpu"), None, 0.0, False, 0.0)

        assert torch.allclose(out.cpu(), values.mean(-2, keepdim=True).expand_as(values))


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_the_inverse_of_a_norm_has_the_dtype_of_the_norm(weight: torch.dtype) -> None:
    with emulated():
        normed, inverse = torch.ops.hpu.rms_norm(
            _ones(1, 2, 8, dtype=torch.bfloat16), _ones(8, dtype=weight), 1e-6
        )

        assert (normed.dtype, inverse.dtype) == (weight, weight)


def test_rope_with_a_cache_keeps_the_dtype_and_unrotated_entries() -> None:
    with emulated():
        from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingHelperV3

        p = torch.randn(6, 2, 3, 8).bfloat16()
        angles = torch.randn(10, 1, 2)
        cache = torch.stack((angles.cos(), angles.sin()), -1).bfloat16().float()
        cache = cache.expand(10, 2, 2, 2)

        out = RotaryPosEmbeddingHelperV3.apply(p.to("hpu"), cache.to("hpu"))

        assert out.dtype == torch.bfloat16
        pairs = torch.view_as_complex(p[..., :4].float().reshape(6, 2, 3, 2, 2))
        turned = pairs * torch.view_as_complex(cache[:6].contiguous()).unsqueeze(2)
        expected = torch.view_as_real(turned).flatten(-2)
        assert torch.allclose(out.cpu()[..., :4].float(), expected, atol=0.05)
        assert torch.equal(out.cpu()[..., 4:], p[..., 4:])


def test_a_dry_run_leaves_the_rng_state_unchanged() -> None:
    with emulated():
        before = _hpu().get_rng_state()

        _hpu().wrap_in_hpu_graph_func(torch.rand_like, disable_tensor_cache=True)(_ones())

        assert torch.equal(before, _hpu().get_rng_state())


@pytest.mark.parametrize("lazy", [True, False])
def test_a_saved_tensor_is_loaded_to_the_host_in_lazy_mode(lazy: bool) -> None:
    with emulated(lazy=lazy):
        file = BytesIO()
        torch.save({"x": [_ones()]}, file)
        file.seek(0)

        loaded = torch.load(file, weights_only=False)["x"][0]

        assert (loaded.device.type, loaded.tolist()) == ("cpu" if lazy else "hpu", [1.0] * 4)


@pytest.mark.parametrize("name", ["mul", "full"])
def test_an_operator_with_a_bool_scalar_leaves_a_compiled_graph(name: str) -> None:
    programs: dict[str, Callable[[Tensor], Tensor]] = {
        "mul": lambda x: x * True,
        "full": lambda x: torch.full((4,), True, device="hpu") * x,
    }
    with emulated(lazy=False) as card, torch.inference_mode():
        torch.compile(programs[name], backend="hpu_backend", dynamic=False)(_ones())

        found = [
            misuse.op for misuse in card.counters.misuses if misuse.kind == "left_out_of_graph"
        ]
        assert found == [name]


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "scatter": ("lazy", lambda: dist.scatter(_ones(2), [_ones(2)], 0)),
    "allgather_coalesced": (
        "eager",
        lambda: dist.all_gather_coalesced([[_ones(2)]], [_ones(2)]),
    ),
    "recv": ("both", lambda: dist.recv(_ones(2))),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("collectives", ["lazy", "eager"])
@pytest.mark.parametrize("name", REFUSED)
def test_collectives_that_the_bridge_lacks_are_refused(
    name: str, collectives: str, tmp_path: Path
) -> None:
    refused_with, run = REFUSED[name]
    flag = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "1" if collectives == "lazy" else "0"}
    with emulated(variables=flag):
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
        dist.init_process_group("hccl", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
        try:
            if refused_with in (collectives, "both"):
                with pytest.raises(RuntimeError, match=name):
                    run()
            else:
                run()
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("lazy", [True, False])
def test_a_step_closure_is_called_once_by_mark_step_in_lazy_mode(lazy: bool) -> None:
    with emulated(lazy=lazy):
        core: Any = importlib.import_module("habana_frameworks.torch.core")
        called: list[int] = []
        core.add_step_closure(called.append, (1,))
        assert called == []

        core.mark_step()
        core.mark_step()

        assert called == ([1] if lazy else [])


@pytest.mark.parametrize("lazy", [True, False])
def test_an_upload_into_a_view_needs_a_recipe_in_lazy_mode(lazy: bool) -> None:
    with emulated(lazy=lazy) as card:
        x = torch.zeros(4, 4).to("hpu")
        row = x[1]
        torch.hpu.synchronize()  # type: ignore[attr-defined]  # the emulator's
        before = card.counters.counts["launches"]

        row.copy_(torch.ones(4))
        torch.hpu.synchronize()  # type: ignore[attr-defined]  # the emulator's

        assert card.counters.counts["launches"] - before == lazy
        assert x.tolist()[:2] == [[0.0] * 4, [1.0] * 4]


def _row() -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device="hpu")


def _put(target: Tensor) -> None:
    target[_row()] = 2.0


BEYOND: dict[str, Callable[[], object]] = {
    "index": lambda: _ones(1, 1, 1, 1, 1, 2)[_row()],
    "index_put": lambda: _put(_ones(1, 1, 1, 1, 1, 1, 1, 1, 2)),
}


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", BEYOND)
def test_an_index_into_too_many_dimensions_is_refused(name: str, lazy: bool) -> None:
    with emulated(lazy=lazy), pytest.raises(RuntimeError, match=f"{name}.* op doesn't support"):
        BEYOND[name]()


@pytest.mark.parametrize("lazy", [True, False])
def test_an_index_of_fewer_dimensions_runs_on_the_card(lazy: bool) -> None:
    with emulated(lazy=lazy, strict=True):
        assert _ones(1, 1, 1, 1, 2)[_row()].shape == (1, 1, 1, 1, 2)
        # In eager mode, a later release runs a write beyond 5 dimensions on the host.
        _put(_ones(*[1] * (7 if lazy else 4), 2))


@pytest.mark.parametrize("lazy", [True, False])
def test_an_index_on_the_host_moves_an_eager_operator_to_the_host(lazy: bool) -> None:
    with emulated(lazy=lazy) as card:
        x = _ones(4, 2)

        assert x[torch.tensor([0, 1])].shape == x[[0, 1]].shape == (2, 2)

        assert card.counters.fallback_ops == ({} if lazy else {"index": 1})


def test_a_graphed_callable_uses_a_single_graph_for_all_layouts() -> None:
    with emulated(variables={"PT_HPUGRAPH_DISABLE_TENSOR_CACHE": "1"}) as card:
        sample = _ones(2, 2)
        graphed = _hpu().make_graphed_callables(nn.Linear(2, 2).to("hpu"), (sample,))

        graphed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to("hpu").t())

        assert card.counters.counts["captures"] == 1
        # The tensor cache is used: the variable does not switch it off here.
        assert card.counters.counts["input_copies"] == 1


def test_a_graphed_module_is_the_module_itself() -> None:
    with emulated() as card:
        module = nn.Linear(4, 4).to("hpu").eval()
        assert _hpu().make_graphed_callables(module, (_ones(1, 4),)) is module

        module(_ones(1, 4))
        module.train()(_ones(1, 4))

        assert card.counters.counts["replays"] == 1


def test_a_graphed_module_has_no_trainable_buffers() -> None:
    with emulated(), pytest.raises(AssertionError, match="only parameters may be trainable"):
        module = nn.ReLU()
        module.register_buffer("factor", torch.ones(1, requires_grad=True))
        _hpu().make_graphed_callables(module, (_ones(),))
