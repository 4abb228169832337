"""CudaBackend on a GPU: asynchronous copies, events, memory, and captured graphs.

Run by `make test-cuda`.
"""

from collections.abc import Iterator

import pytest
import torch

from config.engine import EngineConfig
from hpu.backends.cuda import WARM_RUNS, CudaBackend
from hpu.backends.select import select_backend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    # Ignore warnings of a driver or an allocator.
    pytest.mark.filterwarnings("default:::torch"),
]

LONG = 200_000_000
"""GPU cycles, about a tenth of a second."""


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    cuda = CudaBackend()
    yield cuda
    cuda.close()


def test_a_gpu_is_used_only_with_an_explicit_device() -> None:
    named = select_backend(EngineConfig("m", device="cuda"))
    chosen = select_backend(EngineConfig("m", num_threads=1))

    assert (named.name, named.device.type) == ("cuda", "cuda")
    assert chosen.name != "cuda"


def test_a_copy_to_the_host_keeps_its_values_when_the_source_changes(backend: CudaBackend) -> None:
    source = torch.ones(1000, device=backend.device)
    # Pinned memory is reused, and only its first allocation may wait for the device.
    backend.to_host(source)
    backend.synchronize()

    torch.cuda._sleep(LONG)
    copy = backend.to_host(source)
    source.fill_(2.0)
    event = backend.event()
    was_done = event.done()
    event.wait()

    assert not was_done and event.done()
    assert copy.is_pinned() and copy.tolist() == [1.0] * 1000


def test_side_stream_copies_precede_later_work_without_waiting_for_running_work(
    backend: CudaBackend,
) -> None:
    source = backend.host_tensor(1000, torch.float32)
    source.fill_(3.0)
    target = backend.zeros((1000,), torch.float32)
    backend.synchronize()

    before = backend.event()
    torch.cuda._sleep(LONG)
    backend.upload_beside([(target, source)], before)
    copied = torch.cuda.Event()
    copied.record(backend._uploads)
    copied.synchronize()
    # The sleep, which was submitted before the copy, is still running.
    end = backend.event()
    was_done = end.done()
    doubled = target * 2

    assert not was_done
    assert doubled.tolist() == [6.0] * 1000


def test_a_transposed_tensor_reaches_the_host_in_order(backend: CudaBackend) -> None:
    source = torch.arange(6, device=backend.device).view(2, 3).t()

    copy = backend.to_host(source)
    backend.synchronize()

    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_an_upload_is_ordered_on_the_device_and_does_not_block_the_host(
    backend: CudaBackend,
) -> None:
    target = backend.zeros((4,), torch.int64)
    source = backend.host_tensor(4, torch.int64)
    source.copy_(torch.arange(4))

    torch.cuda._sleep(LONG)
    backend.upload(target, source)
    event = backend.event()
    was_done = event.done()
    event.wait()

    assert not was_done
    assert target.tolist() == [0, 1, 2, 3]


def test_events_measure_the_device_time_between_them(backend: CudaBackend) -> None:
    start = backend.event()
    torch.cuda._sleep(LONG)
    end = backend.event()
    end.wait()

    assert 0.01 < end.seconds_since(start) < 10


def test_free_memory_follows_allocations_and_frees(backend: CudaBackend) -> None:
    size = 512 * 1024**2
    before, total = backend.memory()

    taken = backend.zeros((size,), torch.uint8)
    during, _ = backend.memory()
    del taken
    after, _ = backend.memory()

    assert total > before >= during + size
    assert after >= during + size


def test_a_replay_reads_new_inputs_into_the_same_outputs_without_python(
    backend: CudaBackend,
) -> None:
    inputs = torch.ones(4, device=backend.device)
    calls = []

    def double(values: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return values * 2

    graph = backend.capture(double, (inputs,))
    first = graph.replay()
    inputs.fill_(5.0)
    second = graph.replay()

    assert second is first
    assert first.tolist() == [10.0] * 4
    assert len(calls) == WARM_RUNS + 1


def test_graphs_of_one_pool_may_run_in_any_order(backend: CudaBackend) -> None:
    inputs = [torch.full((n, 64), float(n), device=backend.device) for n in (300, 20, 100)]
    weight = torch.eye(64, device=backend.device)

    def work(values: torch.Tensor) -> torch.Tensor:
        return ((values @ weight) + 1) @ weight

    graphs = [backend.capture(work, (given,)) for given in inputs]
    orders = [(0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 1, 2)]

    # An output is only valid until the next replay.
    found = [[float(graphs[i].replay().mean()) for i in order] for order in orders]

    expected = (301.0, 21.0, 101.0)
    assert found == [[expected[i] for i in order] for order in orders]


def test_a_graph_captured_in_inference_mode_sees_writes_of_inference_mode(
    backend: CudaBackend,
) -> None:
    with torch.inference_mode():
        cache = backend.zeros((8, 2), torch.float32)
        slots = backend.zeros((2,), backend.index_dtype)
        values = torch.ones(2, 2, device=backend.device)

        def write(slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, slots, values)
            return cache.index_select(0, slots)

        graph = backend.capture(write, (slots, values))
        slots.copy_(torch.tensor([3, 5], device=backend.device))
        out = graph.replay()

    assert out.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert cache.sum(1).tolist() == [2.0, 0.0, 0.0, 2.0, 0.0, 2.0, 0.0, 0.0]


def test_out_of_memory_is_recognized_and_leaves_the_device_usable(backend: CudaBackend) -> None:
    _, total = backend.memory()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        backend.zeros((2 * total,), torch.uint8)
    with pytest.raises(IndexError) as other:
        backend.zeros((2,), torch.uint8)[5]
    after = backend.zeros((2,), torch.uint8)

    assert backend.is_out_of_memory(caught.value)
    assert not backend.is_out_of_memory(other.value)
    assert after.tolist() == [0, 0]


@pytest.mark.parametrize("failing_call", [1, WARM_RUNS + 1], ids=["warm run", "capture"])
def test_a_failed_capture_restores_the_current_stream(
    backend: CudaBackend, failing_call: int
) -> None:
    inputs = torch.ones(4, device=backend.device)
    before = torch.cuda.current_stream()
    calls = []

    def fails(values: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        result = values + 1
        if len(calls) == failing_call:
            raise torch.OutOfMemoryError("as if")
        return result

    with pytest.raises(torch.OutOfMemoryError) as caught:
        backend.capture(fails, (inputs,))
    graph = backend.capture(lambda values: values + 2, (inputs,))

    assert backend.is_out_of_memory(caught.value)
    assert torch.cuda.current_stream() == before
    assert graph.replay().tolist() == [3.0] * 4
