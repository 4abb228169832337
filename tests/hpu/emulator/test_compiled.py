"""hpu_backend on the emulated card: what torch's tracer refuses, and which code is a single
recipe."""

from collections.abc import Callable

import pytest
import torch
from emulated import emulated
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from hpu.emulator.settings import Misuse


def _reads(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 2 else x


def test_a_read_by_the_host_breaks_the_graph() -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        x = torch.ones(3, device="hpu")
        clear_compilation_metrics()

        out = torch.compile(_reads, backend="hpu_backend", dynamic=False)(x)

        assert out.tolist() == [2.0] * 3
        assert card.counters.counts["traces"] == 2
        names = [metrics.co_name for metrics in get_compilation_metrics()]
        assert names[0] == "_reads" and names[1].startswith("torch_dynamo_resume_in__reads")


def test_a_read_by_the_host_is_refused_where_the_graph_must_be_full() -> None:
    with emulated(lazy=False), torch.inference_mode():
        compiled = torch.compile(_reads, backend="hpu_backend", dynamic=False, fullgraph=True)

        with pytest.raises(Unsupported):
            compiled(torch.ones(3, device="hpu"))


def test_a_region_writes_a_cache_in_place() -> None:
    def step(cache: Tensor, slots: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x * 2)
        return cache[:2] + 1

    with emulated(lazy=False, strict=True, workspace_ratio=0.0) as card, torch.inference_mode():
        compiled = torch.compile(step, backend="hpu_backend", dynamic=False, fullgraph=True)
        cache = torch.zeros(1 << 16, 4, device="hpu")
        slots, x = torch.tensor([1, 70], device="hpu"), torch.ones(2, 4, device="hpu")
        card.memory.reset_peak()
        before = card.memory.in_use

        out = compiled(cache, slots, x)

        assert out.tolist() == [[1.0] * 4, [3.0] * 4]
        assert cache[70].tolist() == [2.0] * 4
        assert card.memory.peak - before < cache.numel()


def _sums(x: Tensor) -> Tensor:
    return (x + 1).view(2, -1).sum(0)


def test_each_shape_of_a_region_is_traced_and_compiled_once() -> None:
    with emulated(lazy=False, strict=True) as card, torch.inference_mode():
        compiled = torch.compile(_sums, backend="hpu_backend", dynamic=False)
        inputs = [torch.ones(2 * size).to("hpu") for size in (3, 4, 5, 6)]

        for x in inputs:
            compiled(x)

        assert card.counters.counts["compilations"] == card.counters.counts["traces"] == 4
        card.end_warmup()
        for x in inputs:
            compiled(x)
        with pytest.raises(BackendCompilerFailed, match="trace_after_warmup"):
            compiled(torch.ones(14).to("hpu"))


def test_symbolic_shapes_share_a_trace_and_each_is_compiled() -> None:
    """The first shape is traced with constants. When it is repeated, the newer graph with symbolic
    shapes is used, which needs another recipe."""
    with emulated(lazy=False, strict=True) as card, torch.inference_mode():
        compiled = torch.compile(
            _sums, backend="hpu_backend", options={"force_static_compile": True}
        )
        inputs = [torch.ones(2 * size).to("hpu") for size in (3, 4, 5, 6)]

        for x in (*inputs, *inputs):
            compiled(x)

        assert card.counters.counts["traces"] == 2
        assert card.counters.counts["compilations"] == 5
        card.end_warmup()
        with pytest.raises(Misuse, match="compile_after_warmup"):
            compiled(torch.ones(14).to("hpu"))


def test_symbolic_shapes_must_be_compiled_statically() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1

    with emulated(lazy=False, strict=True), torch.inference_mode():
        compiled = torch.compile(step, backend="hpu_backend")
        compiled(torch.ones(3, device="hpu"))

        with pytest.raises(BackendCompilerFailed, match="Misuse: dynamic_compile"):
            compiled(torch.ones(4, device="hpu"))


def test_hpu_backend_is_refused_in_lazy_mode() -> None:
    with emulated(lazy=True), pytest.raises(RuntimeError, match="PT_HPU_LAZY_MODE=0"):
        torch.compile(lambda x: x + 1, backend="hpu_backend")(torch.ones(3, device="hpu"))


def test_operators_outside_of_regions_are_counted() -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        compiled = torch.compile(lambda x: (x + 1) * 2, backend="hpu_backend", dynamic=False)
        x = torch.ones(3, device="hpu")
        compiled(x)
        before = card.counters.counts["eager_ops"]

        (compiled(x).view(3, 1) * 2).abs()

        assert card.counters.counts["eager_ops"] == before + 2


def _put(x: Tensor, rows: Tensor) -> Tensor:
    return torch.ops.aten.index_put.default(x, [None, rows], x + 1)


LEFT_OUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addcmul": lambda x, rows: torch.addcmul(x, x, x),
    "index": lambda x, rows: x.view(2, 2, 1)[:, rows],
    "index_put": _put,
    "masked_fill": lambda x, rows: x.masked_fill(x > 1, torch.nan),
    "permute": lambda x, rows: rows.view(1, 2).permute(1, 0) + 1,
}
STAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum of products": lambda x, rows: x + x * x,
    "index_select": lambda x, rows: x.index_select(1, rows),
    "leading index": lambda x, rows: x[rows],
    "infinity": lambda x, rows: x.masked_fill(x > 1, torch.inf),
    "permute": lambda x, rows: x.permute(1, 0) + 1,
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_operators_that_the_partitioner_leaves_out_of_a_graph_are_counted(name: str) -> None:
    with emulated(lazy=False) as card, torch.inference_mode():
        compiled = torch.compile(LEFT_OUT[name], backend="hpu_backend", dynamic=False)

        compiled(torch.ones(2, 2, device="hpu"), torch.tensor([1, 0], device="hpu"))

        found = [
            misuse.op for misuse in card.counters.misuses if misuse.kind == "left_out_of_graph"
        ]
        assert found == [name]


@pytest.mark.parametrize("name", STAYS)
def test_supported_operators_stay_in_the_compiled_graph(name: str) -> None:
    with emulated(lazy=False, strict=True), torch.inference_mode():
        compiled = torch.compile(STAYS[name], backend="hpu_backend", dynamic=False)

        compiled(torch.ones(2, 2, device="hpu"), torch.tensor([1, 0], device="hpu"))


def test_fused_attention_leaves_a_graph_with_symbolic_shapes() -> None:
    def attend(q: Tensor) -> Tensor:
        given = (q, q, q, None, 0.0, 1.0, False, False, "fast", None, "right")
        out: Tensor = torch.ops.hpu.sdpa_recomp_fwd(*given)[0]
        return out

    for options, expected in ((None, 1), ({"force_static_compile": True}, 0)):
        with emulated(lazy=False) as card, torch.inference_mode():
            compiled = torch.compile(attend, backend="hpu_backend", dynamic=True, options=options)
            compiled(torch.ones(1, 2, 3, 4, device="hpu"))

            assert card.counters.counts["left_out_of_graph"] == expected
