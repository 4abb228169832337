"""Suffix drafts by tensor operations equal the drafts of the host's search, including outputs of
earlier requests."""

import random

import numpy as np
import pytest
import torch

from config.speculation.base import SpeculationMethod
from config.speculation.suffix import SuffixLimits
from hpu.backends.cpu import CpuBackend
from hpu.runner.batch_state import BatchState
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.spec_decode.device import DeviceSpeculation
from hpu.spec_decode.drafters.suffix import SuffixProposer, SuffixSearch

LENGTH, REQUESTS, DRAFTS = 24, 6, 5


class Device:
    """Known tokens of REQUESTS requests, and the device search over them."""

    def __init__(self, limits: SuffixLimits) -> None:
        method = SpeculationMethod("suffix", DRAFTS, limits)
        backend = CpuBackend(1)
        self.dtype = backend.index_dtype
        self.search = SuffixSearch(method, backend, max_num_reqs=REQUESTS, max_model_len=LENGTH)
        self._history = torch.zeros((REQUESTS + 1, LENGTH), dtype=self.dtype)
        self._num_tokens = torch.zeros(REQUESTS + 1, dtype=self.dtype)

    def set(self, index: int, tokens: list[int]) -> None:
        # Tokens after the known tokens belong to another request.
        self._history[index] = 1
        self._history[index, : len(tokens)] = torch.tensor(tokens, dtype=self.dtype)
        self._num_tokens[index] = len(tokens)

    def add(self, index: int, tokens: list[int]) -> None:
        self.set(index, tokens)
        self.search.add_request(self._at(index), self._num_tokens[index : index + 1])

    def remove(self, index: int) -> None:
        self.search.remove_request(self._at(index), self._history.view(-1), self._num_tokens)

    def draft(self) -> list[list[int]]:
        indices = torch.arange(REQUESTS, dtype=self.dtype)
        last = self._num_tokens[:REQUESTS] - 1
        drafts, counts = self.search(self._history[:REQUESTS], last, indices, *self.search.tensors)
        return [row[:count] for row, count in zip(drafts.tolist(), counts.tolist(), strict=True)]

    def keep(self, index: int, drafts: list[int]) -> None:
        padded = torch.tensor([[*drafts, *[NO_TOKEN] * (DRAFTS - len(drafts))]], dtype=self.dtype)
        self.search.keep(self._at(index), padded, self._num_tokens[index : index + 1])

    def _at(self, index: int) -> torch.Tensor:
        return torch.tensor([index], dtype=self.dtype)


LIMITS = {
    "usual": SuffixLimits(max_cached_requests=3),
    "bold": SuffixLimits(max_depth=9, max_cached_requests=2, max_spec_factor=3.0),
    "sure": SuffixLimits(max_cached_requests=3, max_spec_factor=4.0, min_token_prob=0.6),
    "alone": SuffixLimits(max_cached_requests=0, max_spec_factor=2.0),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("vocab_size", [2, 3, 6])
def test_device_drafts_equal_host_drafts(name: str, vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    host, device = SuffixProposer(LIMITS[name]), Device(LIMITS[name])
    texts: list[list[int]] = [[]] * REQUESTS

    def add(index: int) -> None:
        texts[index] = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 12))]
        host.add_request(index, np.array(texts[index], np.uint32))
        device.add(index, texts[index])

    for index in range(REQUESTS):
        add(index)
    num_drafts = 0
    for _ in range(40):
        histories = [np.array(text, np.uint32) for text in texts]
        found = device.draft()
        expected = host.propose(range(REQUESTS), histories, [DRAFTS] * REQUESTS)
        assert found == [entry.tokens for entry in expected]
        num_drafts += sum(map(len, found))
        for index in range(REQUESTS):
            texts[index] += [rng.randrange(vocab_size) for _ in range(rng.randint(1, 4))]
            text = texts[index] = texts[index][:LENGTH]
            device.set(index, text)
            if len(text) == LENGTH:
                # The host also indexes the tokens before the request is removed.
                host.propose([index], [np.array(text, np.uint32)], [0])
                host.remove_request(index)
                device.remove(index)
                add(index)

    assert num_drafts > 100


def test_announced_drafts_stay_until_the_request_has_more_tokens() -> None:
    device = Device(SuffixLimits(max_cached_requests=4, max_spec_factor=4.0))
    for index in range(REQUESTS):
        device.add(index, [20 + index])
    device.set(0, [20, 5, 6, 7, 8, 5, 6])
    next_drafts = device.draft()[0]
    device.keep(0, next_drafts)
    # The output that ends now contains a longer match.
    device.set(1, [21, 7, 8, 5, 6, 9, 9])
    device.remove(1)

    kept = device.draft()[0]
    device.set(0, [20, 5, 6, 7, 8, 5, 6, 9])
    later = device.draft()[0]

    assert next_drafts == kept == [7, 8, 5, 6]
    assert later == [9]


@pytest.mark.parametrize("is_private", [True, False])
def test_outputs_of_private_requests_are_not_kept(is_private: bool) -> None:
    method = SpeculationMethod("suffix", DRAFTS, LIMITS["usual"])
    backend = CpuBackend(1)
    search = SuffixSearch(method, backend, max_num_reqs=REQUESTS, max_model_len=LENGTH)
    speculation = DeviceSpeculation(
        method,
        backend,
        BatchState(REQUESTS, LENGTH, block_size=4, pad_block=0),
        max_model_len=LENGTH,
        search=search,
    )

    writers = search.tensors[1]
    before = writers[:-1].clone()

    speculation.add_request(0, np.array([1, 2], np.uint32), is_private=is_private)
    speculation.append(torch.tensor([0]), torch.tensor([3]))
    speculation.remove_request(0)

    assert torch.equal(writers[:-1], before) is is_private
