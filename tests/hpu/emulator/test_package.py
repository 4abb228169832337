"""Effects of importing the vendor's package, and the functions of torch that it replaces."""

import importlib
import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from torch import Tensor, nn
from torch import distributed as dist

from hpu.emulator.install import install
from hpu.emulator.settings import EmulatorConfig

HCCL = "habana_frameworks.torch.distributed.hccl"
Pair = namedtuple("Pair", "first second")


def _hpu() -> Any:
    return torch.hpu  # type: ignore[attr-defined]  # the emulator's


def _ones(*shape: int) -> Tensor:
    return torch.ones(*(shape or (4,)), device="hpu")


def test_importing_the_package_sets_the_module_id_of_a_rank_once() -> None:
    rank = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    with emulated(variables={**rank, "HABANA_VISIBLE_MODULES": "6,7"}) as card:
        environment = card.device.variables.environment
        assert (environment["HLS_MODULE_ID"], environment["ID"]) == ("7", "1")

        del environment["HLS_MODULE_ID"]
        importlib.import_module(HCCL)

        assert "HLS_MODULE_ID" not in environment


def test_an_empty_list_of_modules_is_an_error_at_set_device() -> None:
    with (
        emulated(variables={"HABANA_VISIBLE_MODULES": ""}),
        pytest.raises(ValueError, match="invalid literal"),
    ):
        _hpu().set_device(0)


@pytest.mark.parametrize(
    ("variables", "loads"),
    [
        ({}, True),
        ({"PT_HPU_AUTOLOAD": "0"}, False),
        ({"PT_HPU_LAZY_MODE": "1"}, False),
        ({"PT_HPU_LAZY_MODE": "1", "PT_HPU_AUTOLOAD": "1"}, True),
    ],
)
def test_torch_loads_the_package_outside_of_lazy_mode_or_as_pt_hpu_autoload_says(
    variables: dict[str, str], loads: bool
) -> None:
    with emulated(lazy=False) as card:
        environment = card.device.variables.environment
        del environment["PT_HPU_LAZY_MODE"]
        environment.update(variables)

        found = importlib.import_module("habana_frameworks.autoload").is_autoload_enabled()

    assert found is loads


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_autoload_fixes_the_mode_before_the_program_can(autoload: str) -> None:
    environment = {"PT_HPU_AUTOLOAD": autoload}
    with install(EmulatorConfig(), environment) as card:
        environment["PT_HPU_LAZY_MODE"] = "1"

        importlib.import_module("habana_frameworks.torch")

        assert card.device.is_lazy() is (autoload == "0")


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.empty(2, device="hpu:1"),
        lambda: torch.ones(2).to("hpu:1"),
        lambda: torch.ones(2).to(torch.device("hpu", 1)),
        lambda: torch.tensor([1.0], device="hpu:1"),
        lambda: _ones().to(device="hpu:1"),
    ],
    ids=["empty", "to", "to a device", "tensor", "by name"],
)
def test_a_process_cannot_use_a_second_card(use: Callable[[], Tensor]) -> None:
    with emulated(), pytest.raises(RuntimeError, match="habana active device: 1 != 0"):
        use()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: [_ones()], lambda: (_ones(),)),
        (lambda: {"x": _ones()}, lambda: OrderedDict(x=_ones())),
        (lambda: Pair(_ones(), 1), lambda: (_ones(), 1)),
        (lambda: _ones(), lambda: nn.Parameter(_ones(), requires_grad=False)),
        (lambda: [_ones(), 1], lambda: [_ones(), True]),
    ],
    ids=["list", "dict", "namedtuple", "parameter", "number"],
)
def test_a_replay_with_tensor_cache_refuses_arguments_of_other_types(
    first: Callable[[], object], second: Callable[[], object]
) -> None:
    def add(given: Any) -> Tensor:
        values = given.values() if isinstance(given, dict) else given
        x: Tensor = given if isinstance(given, Tensor) else next(iter(values))
        return x + 1

    with emulated():
        graph = _hpu().wrap_in_hpu_graph_func(add)
        graph(first())
        with pytest.raises(AssertionError, match="other types"):
            graph(second())

        graph = _hpu().wrap_in_hpu_graph_func(add, disable_tensor_cache=True)
        graph(first())
        assert graph(second()).tolist() == [2.0] * 4


def test_graph_functions_exist_only_in_lazy_mode() -> None:
    names = ("HPUGraph", "graph", "wrap_in_hpu_graph_func", "make_graphed_callables")
    for lazy in (True, False):
        with emulated(lazy=lazy):
            assert [hasattr(_hpu(), name) for name in names] == [lazy] * len(names)


def test_iter_mark_step_has_no_sync_argument() -> None:
    with emulated():
        core = importlib.import_module("habana_frameworks.torch.core")
        core.iter_mark_step()
        with pytest.raises(TypeError, match="sync"):
            core.iter_mark_step(sync=True)


def test_fork_rng_restores_the_rng_state_of_the_only_card() -> None:
    with emulated(num_devices=1):
        before = _hpu().get_rng_state()
        with torch.random.fork_rng():
            torch.rand(4, device="hpu")
        assert torch.equal(before, _hpu().get_rng_state())
    with (
        emulated(num_devices=2),
        pytest.warns(UserWarning, match="fork_rng"),
        pytest.raises(RuntimeError, match="supports only device 0"),
        torch.random.fork_rng(),
    ):
        pass


def test_record_stream_is_supported() -> None:
    with emulated():
        _ones().record_stream(_hpu().Stream())


def test_init_process_group_accepts_only_the_vendors_arguments() -> None:
    with emulated():
        store = dist.HashStore()  # type: ignore[attr-defined]  # not in its __all__
        with pytest.raises(TypeError, match="backend"):
            dist.init_process_group(store=store, rank=0, world_size=1)
        with pytest.raises(TypeError, match="device_id"):
            dist.init_process_group("hccl", store=store, rank=0, world_size=1, device_id=None)
        dist.init_process_group("hccl", store=store, rank=0, world_size=1)
        try:
            with pytest.raises(TypeError, match="group_desc"):
                dist.new_group([0], group_desc="own")
            assert dist.get_world_size(dist.new_group([0], backend="gloo")) == 1
            with pytest.raises(RuntimeError, match="No backend type associated with device type"):
                dist.all_reduce(torch.ones(2))
            with pytest.raises(RuntimeError, match="No backend type associated with device type"):
                dist.broadcast(torch.ones(2), 0)
            x = _ones()
            dist.all_reduce(x)
            assert x.tolist() == [1.0] * 4
            found = [None]
            dist.all_gather_object(found, "an object travels as a tensor of the card")
            assert found[0] == "an object travels as a tensor of the card"
        finally:
            dist.destroy_process_group()


def test_pt_hpu_place_on_cpu_limits_the_operators_that_run_on_the_host() -> None:
    names = {"none": False, "aten::_linalg_svd": True, "aten::cummax": False, "": True}
    for names_on_host, runs in names.items():
        with emulated(variables={"PT_HPU_PLACE_ON_CPU": names_on_host}):
            x = _ones(2, 2)
            if runs:
                assert torch.linalg.svdvals(x).shape == (2,)
            else:
                with pytest.raises(RuntimeError, match="not yet supported on HPU"):
                    torch.linalg.svdvals(x)


def test_the_compiler_refuses_options_that_it_lacks() -> None:
    with emulated(lazy=False):
        wrong = torch.compile(
            lambda x: x + 1, backend="hpu_backend", options={"force_static": True}
        )
        with pytest.raises(Exception, match="force_static does not exist"):
            wrong(_ones())


def _loaded(value: object, **options: Any) -> Any:
    file = BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_torch_load_in_lazy_mode_separates_shared_tensors_and_rebuilds_containers() -> None:
    with emulated():
        x = torch.ones(4)
        found = _loaded({"a": x, "b": x, "sizes": x.shape})
        found["a"][0] = 5
        assert found["b"].tolist() == [1.0] * 4 and found["sizes"] == (4,)
        assert type(_loaded(nn.Parameter(x))) is Tensor
        assert type(_loaded(OrderedDict(a=x))) is dict
        assert type(_loaded(Pair(x, [x]))) is tuple
        assert isinstance(_loaded(nn.Linear(2, 2)), nn.Linear)
        with pytest.raises(Exception, match="Weights only load failed"):
            _loaded(nn.Linear(2, 2), weights_only=True)


@pytest.mark.parametrize("lazy", [True, False])
def test_torch_load_maps_tensors_to_the_card(lazy: bool) -> None:
    with emulated(lazy=lazy):
        x = _ones()
        for place in ("hpu", torch.device("hpu", 0)):
            found = _loaded([{"x": torch.ones(2)}, (x,)], map_location=place)
            assert found[0]["x"].device.type == found[1][0].device.type == "hpu"
        assert _loaded(x).device.type == ("cpu" if lazy else "hpu")
        if lazy:
            assert _loaded(x, map_location={"cpu": "hpu"}).device.type == "hpu"
            assert _loaded(x, map_location={"hpu": "cuda"}).device.type == "cpu"
            assert _loaded(x, map_location=lambda value, own: own).type == "cpu"


def test_torch_load_outside_of_lazy_mode_keeps_shared_tensors_shared() -> None:
    with emulated(lazy=False):
        x = torch.ones(4)
        found = _loaded({"a": x, "b": x}, map_location="hpu")
        found["a"].fill_(3)
        assert found["b"].tolist() == [3.0] * 4
        model = _loaded(nn.Linear(2, 2), map_location="hpu", weights_only=False)
        assert model.weight.device.type == "hpu"


def test_a_metric_counts_until_its_context_ends_or_it_is_stopped() -> None:
    with emulated(variables={"PT_HPU_METRICS_GC_DETAILS": "1"}):
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
        overall = metrics.metric_global("graph_compilation")

        def compile(size: int) -> None:
            _ones(size).mul(2).cpu()

        compile(1)
        with metrics.metric_localcontext("graph_compilation") as local:
            compile(2)
        compile(3)
        first = dict(local.stats())
        assert (first["TotalNumber"], len(first["recipe"])) == (1, 1)
        overall.stop()
        overall.stop()
        compile(4)
        assert dict(overall.stats())["TotalNumber"] == 3
        overall.start()
        overall.start()
        compile(5)
        assert dict(overall.stats())["TotalNumber"] == 4
        overall.reset()
        compile(6)
        assert dict(overall.stats())["TotalNumber"] == 1


def test_metrics_are_written_as_a_list_and_no_file_is_overwritten(tmp_path: Path) -> None:
    with emulated():
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
        for _ in range(2):
            metrics.metrics_dump(tmp_path / "found.json")

    for name in ("found.json", "found.json.1"):
        first, *_ = json.loads((tmp_path / name).read_text())
        assert (first["metric_name"], first["statistics"]["TotalNumber"]) == (
            "graph_compilation",
            0,
        )
