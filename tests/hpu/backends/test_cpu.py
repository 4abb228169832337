"""The CPU back end."""

import ctypes
import resource

import psutil
import pytest
import torch

from hpu.backends.cpu import CpuBackend
from hpu.native.library import Library


def test_zeros_that_nobody_writes_take_no_memory() -> None:
    backend = CpuBackend(num_threads=1)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    cache = backend.zeros((1024, 1024, 512), torch.bfloat16)
    cache[0, 0, 0] = 1.0

    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert cache.numel() * cache.element_size() == 1024**3
    assert grown_kb < 64 * 1024


def test_zeros_have_the_type_and_shape_asked_for() -> None:
    backend = CpuBackend(num_threads=1)

    made = backend.zeros((2, 0, 3), torch.float32), backend.zeros((2, 3), torch.int64)

    assert [(t.shape, t.dtype) for t in made] == [
        ((2, 0, 3), torch.float32),
        ((2, 3), torch.int64),
    ]
    assert not made[1].any()
    assert made[1].data_ptr() % 64 == 0


def test_a_copy_to_the_host_keeps_its_values_when_the_source_changes() -> None:
    backend = CpuBackend(num_threads=1)
    source = torch.ones(3)

    copy = backend.to_host(source)
    source.fill_(2.0)

    assert copy.tolist() == [1.0, 1.0, 1.0]


def test_as_many_threads_compute_as_were_asked_for() -> None:
    before = torch.get_num_threads()

    CpuBackend(num_threads=before + 1)

    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before + 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_a_server_that_is_warm_keeps_its_freed_memory_and_gives_it_back_at_rest() -> None:
    backend, process = CpuBackend(num_threads=1), psutil.Process()

    def pages(times: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(times):
            held = [torch.ones(2 << 20) for _ in range(3)]
            del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    backend.settled()
    pages(2)
    taken_anew = pages(20)
    warm = process.memory_info().rss
    backend.unsettled()
    at_rest = process.memory_info().rss

    # 24 MiB at a time, which are 6,144 pages.
    assert taken_anew < 6_144
    assert warm - at_rest > 16 << 20


@pytest.mark.parametrize(
    ("by_token", "by_row", "num_tokens", "threads"),
    [(10**5, 10**6, 40, 1), (10**5, 10**6, 4000, 2), (10**8, 10**7, 1, 2)],
)
def test_a_quick_launch_is_not_split_among_threads(
    by_token: int, by_row: int, num_tokens: int, threads: int
) -> None:
    before = torch.get_num_threads()
    backend = CpuBackend(num_threads=2)
    backend.prepare(_Model(by_token, by_row))

    for _ in range(2):
        backend.expect(num_tokens, 1)
        backend.expect(10**6, 1)
    backend.expect(num_tokens, 1)

    used = torch.get_num_threads()
    torch.set_num_threads(before)
    assert used == threads


class _Model(torch.nn.Module):
    """As large as it says."""

    def __init__(self, by_token: int, by_row: int) -> None:
        super().__init__()
        self.multiplications = by_token, by_row

    def pack_weights(self, library: Library | None) -> bool:
        return False
