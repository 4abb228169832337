"""What the emulator installs, and its removal."""

import subprocess
import sys
import threading
import weakref

import pytest
import torch
from emulated import emulated
from waits import WAIT_S

from config.errors import ConfigError
from config.execution import HPU_GRAPHS, ExecutionConfig, ModeChoice
from hpu.backends.gaudi import GaudiBackend
from hpu.emulator.install import install
from hpu.emulator.settings import EmulatorConfig


def test_removing_the_emulator_restores_everything() -> None:
    before = (torch.Tensor.to, torch.tensor, torch.as_tensor, torch.compile)

    with emulated():
        assert torch.ones(1, device="hpu").device == torch.device("hpu", 0)

    assert (torch.Tensor.to, torch.tensor, torch.as_tensor, torch.compile) == before
    assert not hasattr(torch, "hpu")
    assert not any(name.partition(".")[0] == "habana_frameworks" for name in sys.modules)
    with pytest.raises((NotImplementedError, RuntimeError, ModuleNotFoundError)):
        torch.ones(1, device="hpu")


def test_the_emulator_is_removed_after_torch_has_destroyed_its_operators() -> None:
    with emulated() as card:
        # The order at process exit: torch is finalized first.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # private
            if (alive := finalizer.peek()) and alive[0] in card._libraries:
                finalizer()

    assert not hasattr(torch, "hpu")


def test_an_unclosed_back_end_leaves_the_tracer_of_torch_enabled() -> None:
    assert not torch._dynamo.config.disable

    with emulated():
        GaudiBackend(ExecutionConfig(), ModeChoice(HPU_GRAPHS, ""))
        assert torch._dynamo.config.disable

    assert not torch._dynamo.config.disable


def test_the_emulator_is_not_loaded_unless_asked_for() -> None:
    code = (
        "import sys, hpu.worker; "
        "print([name for name in sys.modules if 'emulator' in name or 'habana' in name])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "[]", done.stderr


def test_a_second_emulator_is_refused() -> None:
    with emulated(), pytest.raises(ConfigError, match="already"):
        install(EmulatorConfig(), {})


def test_every_thread_sees_the_card() -> None:
    seen = []

    with emulated():
        thread = threading.Thread(target=lambda: seen.append(torch.ones(2, device="hpu").tolist()))
        thread.start()
        thread.join(WAIT_S)

    assert seen == [[1.0, 1.0]]


def test_lazy_mode_needs_the_vendors_torch() -> None:
    with (
        pytest.raises(AssertionError, match="PT_HPU_LAZY_MODE=0"),
        emulated(vendor_torch=False),
    ):
        pass

    assert not hasattr(torch, "hpu")


def test_a_region_compiled_for_the_card_is_a_single_recipe() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).relu() * 2

    with emulated(lazy=False) as card:
        compiled = torch.compile(step, backend="hpu_backend", dynamic=False)
        x = torch.ones(3, device="hpu")
        before = card.counters.counts["compilations"]

        compiled(x)
        out = compiled(x)

        assert card.counters.counts["compilations"] == before + 1
        assert out.tolist() == [4.0, 4.0, 4.0]


def test_indexing_reads_and_writes_as_on_the_host() -> None:
    host = torch.arange(24).view(2, 3, 4)
    mask = host % 5 == 0
    places = torch.tensor([2, 0])
    keys = [1, (0, slice(1)), (..., -1), (None, 1), (slice(None), places), mask, (1, ..., places)]

    with emulated():
        device = host.to("hpu")
        for key in keys:
            moved = tuple(
                part.to("hpu") if isinstance(part, torch.Tensor) else part
                for part in (key if isinstance(key, tuple) else (key,))
            )
            assert torch.equal(device[moved].cpu(), host[key])
            written, expected = device.clone(), host.clone()
            written[moved] = 7
            expected[key] = 7
            assert torch.equal(written.cpu(), expected)


def test_memory_follows_live_tensors_and_keeps_the_peak() -> None:
    with emulated(lazy=False, workspace_ratio=0.0):
        hpu = torch.hpu  # type: ignore[attr-defined]
        x = torch.zeros(1 << 18, device="hpu")
        view = x[:10]
        del x

        held = hpu.memory_allocated()
        del view

        assert (held, hpu.memory_allocated(), hpu.max_memory_allocated()) == (1 << 20, 0, 1 << 20)
        free, limit = hpu.mem_get_info()
        assert free == limit == hpu.memory_stats()["Limit"]


def test_operators_refuse_tensors_of_different_devices() -> None:
    with emulated(), pytest.raises(RuntimeError, match=r"same device.*hpu:0 and cpu"):
        torch.ones(2, device="hpu") + torch.ones(2)


def test_copies_from_the_host_need_no_recipe() -> None:
    with emulated() as card:
        from habana_frameworks.torch.core import mark_step

        torch.ones(3).to("hpu").copy_(torch.zeros(3))
        mark_step()

        assert card.counters.counts["compilations"] == 0
