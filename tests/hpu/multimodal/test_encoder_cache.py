"""Cache of embeddings by content hash."""

import pytest
import torch

from hpu.backends.cpu import CpuBackend
from hpu.multimodal.encoder_cache import EncoderCache


@pytest.fixture
def cache() -> EncoderCache:
    return EncoderCache(10, 4, torch.float32, CpuBackend(num_threads=1))


def test_rows_of_freed_images_are_reused(cache: EncoderCache) -> None:
    cache.allocate(b"one", 4)
    two = cache.allocate(b"two", 4)
    cache.free(b"one")

    three = cache.allocate(b"three", 6)

    assert cache.num_free == 0
    assert sorted([*two, *three]) == list(range(10))
    assert cache.pad_row not in three


def test_embeddings_are_written_to_the_rows_of_the_image(cache: EncoderCache) -> None:
    rows = cache.allocate(b"one", 3)
    cache.write(torch.from_numpy(rows), torch.arange(12.0).view(3, 4))

    found = cache.embeddings[torch.from_numpy(cache.rows(b"one"))]

    assert found.tolist() == torch.arange(12.0).view(3, 4).tolist()


def test_an_image_over_the_budget_is_refused_with_both_numbers(cache: EncoderCache) -> None:
    cache.allocate(b"one", 4)

    with pytest.raises(RuntimeError, match="has 7 embeddings, 6 of 10 rows are free"):
        cache.allocate(b"two", 7)


def test_reading_a_missing_image_or_encoding_twice_raises(cache: EncoderCache) -> None:
    with pytest.raises(RuntimeError, match="is not encoded, or was freed"):
        cache.rows(b"one")
    cache.allocate(b"one", 4)
    with pytest.raises(RuntimeError, match="is encoded a second time"):
        cache.allocate(b"one", 4)
