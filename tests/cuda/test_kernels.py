"""FusedAttention on a GPU: prompts compared with plain products, in every dtype and captured,
with memory linear in the prompt length.

Run by `make test-cuda`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hpu.backends.cuda import CudaBackend
from hpu.ops.attention import attend_unfused, causal_mask
from hpu.ops.kernels import PromptOperands
from hpu.ops.torch_kernels import FusedAttention

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("default:::torch"),
]

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    cuda = CudaBackend()
    yield cuda
    cuda.close()


def heads(backend: CudaBackend, count: int, length: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(count)
    return torch.randn(2, count, length, 64, device=backend.device, dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("context", [0, 37], ids=["new", "over context"])
@pytest.mark.parametrize("window", [None, 11], ids=["full", "windowed"])
def test_prompt_attention_equals_plain_products(
    backend: CudaBackend, dtype: torch.dtype, context: int, window: int | None
) -> None:
    query = heads(backend, 8, 50, dtype)
    key, value = (heads(backend, n, context + 50, dtype) for n in (2, 2))
    mask = None
    if context or window:
        whole = causal_mask(context + 50, window, backend.device)
        mask = whole[:, :, context:].to(dtype)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = torch.full((2,), 50, device=query.device)
        return FusedAttention().prompt_attention(
            PromptOperands(query, key, value, lengths, mask), 0.125
        )

    with torch.inference_mode():
        expected, _ = attend_unfused(query, key, value, scale=0.125, mask=mask, causal=mask is None)
        found = attention(query, key, value)
        replayed = backend.capture(attention, (query, key, value)).replay()

    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
    torch.testing.assert_close(replayed, found, rtol=limit, atol=limit)


@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
def test_prompt_attention_uses_memory_linear_in_the_prompt(
    backend: CudaBackend, is_masked: bool
) -> None:
    length, dtype = 8192, backend.default_dtype
    query, key, value = (heads(backend, n, length, dtype)[:1] for n in (16, 4, 4))
    mask = causal_mask(length, None, backend.device).to(dtype) if is_masked else None
    lengths = torch.full((1,), length, device=backend.device)
    backend.reset_peak()
    before = backend.peak_memory()

    with torch.inference_mode():
        FusedAttention().prompt_attention(PromptOperands(query, key, value, lengths, mask), 0.125)

    # The scores of all heads alone would be 4 GiB in float32; a mask may be copied once.
    assert backend.peak_memory() - before < 512 * 1024**2
