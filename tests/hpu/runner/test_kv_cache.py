"""Tensors of the KV cache, addressed by block number."""

import torch
from emulated import emulated
from torch import Tensor

from config.execution import HPU_GRAPHS, ExecutionConfig, ModeChoice
from hpu.backends.cpu import CpuBackend
from hpu.backends.gaudi import GaudiBackend
from hpu.layers.attention_base import KVCacheSpec, Shape
from hpu.layers.non_finite import NonFiniteGuard
from hpu.runner.kv_cache import KVCache, block_bytes, cache_sizes

NAN = float("nan")


class _Layers:
    """Two fake layers with two heads of three numbers."""

    dtype = torch.float32
    non_finite_guard: NonFiniteGuard | None = None

    def __init__(self, *windows: int | None) -> None:
        self.windows = list(windows) or [None, None]
        self.caches: list[tuple[Tensor, Tensor]] = []
        """Key and value tensors of each layer."""

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        specs = [KVCacheSpec(2, 3, torch.float32, window) for window in self.windows]
        return [spec.shapes(num_blocks, block_size, num_rings) for spec in specs]

    def cache_windows(self) -> list[int | None]:
        return self.windows

    def bind_caches(
        self, caches: list[tuple[Tensor, Tensor]], block_size: int, num_rings: int = 0
    ) -> None:
        shape = (-1, block_size, 2, 3)
        self.caches = [(keys.view(shape), values.view(shape)) for keys, values in caches]


def _cache(model: _Layers) -> KVCache:
    return KVCache(model, CpuBackend(1), num_blocks=3, block_size=4, dtype=torch.float32)


def test_the_pad_block_follows_the_usable_blocks_and_is_counted() -> None:
    model = _Layers()

    cache = _cache(model)

    assert [keys.shape[0] for keys, _ in model.caches] == [4, 4]
    assert block_bytes(model, 4, torch.float32) == 2 * 2 * 4 * 2 * 3 * 4
    assert cache.bytes == 4 * block_bytes(model, 4, torch.float32)


def test_blocks_include_the_flags_of_the_non_finite_guard() -> None:
    model = _Layers()
    plain = block_bytes(model, 4, torch.float32)
    model.non_finite_guard = NonFiniteGuard(torch.tensor(float("nan")))

    cache = _cache(model)

    assert block_bytes(model, 4, torch.float32) == plain + 4 * 4
    assert cache.bytes == sum(tensor.nbytes for tensor in cache.paged)
    assert cache.bytes == 4 * block_bytes(model, 4, torch.float32)


def test_a_model_without_full_attention_has_no_full_blocks() -> None:
    model = _Layers(8, 8)
    model.non_finite_guard = NonFiniteGuard(torch.tensor(float("nan")))

    sizes = cache_sizes(model, 4, torch.float32, num_rings=2)

    assert (sizes.block, sizes.full_block) == (block_bytes(model, 4, torch.float32), 0)


def test_scrubbing_replaces_nan_only_in_the_given_blocks() -> None:
    model = _Layers()
    cache = _cache(model)
    keys, values = model.caches[1]
    keys[1, 2, 0, 1] = NAN
    keys[1, 2, 0, 2] = 5.0
    values[2, 0, 0, 0] = float("inf")
    values[0, 0, 0, 0] = NAN

    cache.scrub([1, 2])

    assert keys[1, 2, 0].tolist() == [0.0, 0.0, 5.0]
    assert values[2].isfinite().all()
    assert values[0, 0, 0, 0].isnan()


def test_scrubbing_any_number_of_blocks_compiles_nothing_and_waits_for_nothing() -> None:
    model, mode = _Layers(), ModeChoice(HPU_GRAPHS, "the test's")
    with torch.inference_mode(), emulated(strict=True) as card:
        backend = GaudiBackend(ExecutionConfig(), mode)
        cache = KVCache(model, backend, num_blocks=40, block_size=4, dtype=torch.float32)
        cache.warm_scrub()
        keys = model.caches[1][0]
        backend.upload(keys, torch.full((41, 4, 2, 3), NAN))
        backend.event()
        card.end_warmup()

        with card.step():
            for blocks in ([3], [7, 9], [*range(10, 38)]):
                cache.scrub(blocks)

        is_broken = [bool(block.isnan().any()) for block in keys.cpu()]
        backend.close()

    scrubbed = {3, 7, 9, *range(10, 38), 40}
    assert is_broken == [block not in scrubbed for block in range(41)]
    assert card.counters.misuses == []


def test_blocks_are_moved_with_their_contents_and_the_old_places_are_zeroed() -> None:
    model = _Layers()
    cache = KVCache(model, CpuBackend(1), num_blocks=20, block_size=4, dtype=torch.float32)
    cache.warm_moves()
    for number, (keys, values) in enumerate(model.caches):
        for block in range(20):
            keys[block], values[block] = block + 100 * number, -block
    sources = [*range(19, 9, -1)]
    targets = [*range(10)]
    model.caches[0][0][19, 0, 0, 0] = NAN

    cache.move_blocks(sources, targets)

    for number, (keys, values) in enumerate(model.caches):
        assert keys[1:10, 3, 1, 2].tolist() == [block + 100 * number for block in range(18, 9, -1)]
        assert values[:10, 0, 0, 0].tolist() == [-block for block in sources]
        assert not keys[10:].any() and not values[10:].any()


class _Narrow(CpuBackend):
    """Fails to allocate more than eight pairs of numbers."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        if source.numel() > 16:
            raise MemoryError
        super().upload(target, source)


def test_large_moves_are_split_if_memory_is_short() -> None:
    model = _Layers()
    cache = KVCache(model, _Narrow(1), num_blocks=40, block_size=4, dtype=torch.float32)
    cache.warm_moves()
    keys = model.caches[0][0]
    for block in range(40):
        keys[block] = block

    cache.move_blocks([*range(39, 27, -1)], [*range(12)])

    assert keys[:12, 0, 0, 0].tolist() == [*range(39, 27, -1)]
    assert keys[12:28, 0, 0, 0].tolist() == [*range(12, 28)]
    assert not keys[28:].any()


def test_flags_of_the_non_finite_guard_move_with_their_block_and_survive_scrubbing() -> None:
    model = _Layers()
    model.non_finite_guard = NonFiniteGuard(torch.tensor(torch.nan))
    cache = _cache(model)
    flags = cache.paged[-1]
    flags[9] = 1.0
    cache.warm_moves()

    cache.scrub([2])
    cache.move_blocks([2], [0])

    assert flags.tolist() == [0.0] + [1.0] + [0.0] * 14
