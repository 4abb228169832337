"""CUDA back end without a GPU: refusals, results of its kernels, and launches that never read a
value from the device. tests/cuda/ has the tests that need a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from card_memory import CardMemory
from paged_harness import PagedHarness, load_decoder
from tiny_models import make_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from hpu.backends.cuda import missing_cuda
from hpu.backends.select import select_backend
from hpu.layers.metadata import AttentionInputs, DecodeAttentionInputs, PrefillAttentionInputs
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model
from hpu.ops.torch_kernels import TorchKernels
from hpu.protocol import RequestSampling
from hpu.sampling.logprobs import top_logprobs
from hpu.sampling.sampler import Sampler

META = torch.device("meta")
"""A device whose values cannot be read: operations that depend on a value raise."""

WINDOWED = ModelConfig(
    "none", "MistralForCausalLM", 320, 64, 128, 2, 4, 2, 16, 512, sliding_window=8
)
BLOCK_SIZE = 4
EVERYTHING = [
    RequestSampling(temperature=0.0, num_logprobs=2),
    RequestSampling(temperature=0.7, top_k=5, top_p=0.5, min_p=0.1),
    RequestSampling(repetition_penalty=1.2, bad_words=((1, 2), (3,)), logit_bias=((3, 1.0),)),
    RequestSampling(min_tokens=2, end_token_ids=(1,), allowed_token_ids=(1, 2, 3)),
]


class MetaBackend(CardMemory):
    """The CPU back end with tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__(1)
        self.device = META

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=META)

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class StaysOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # theirs
    """Raises at an operator that mixes host and device, or copies between them and waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # theirs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, made)) if isinstance(leaf, Tensor)]
        returns_at_once = kwargs.get("non_blocking") or (
            func is torch.ops.aten.copy_.default and args[2:] == (True,)
        )
        if len({tensor.device for tensor in tensors}) > 1 and not returns_at_once:
            raise AssertionError(f"{func} works on host and device, and the host may have to wait")
        return made


def prefill(batch: int, query: int, blocks: int) -> AttentionInputs:
    wide = integers(batch, query)
    return PrefillAttentionInputs(
        wide, wide.view(-1), integers(batch), integers(batch), integers(batch * blocks)
    )


REQUIRED = [
    name
    for name in DecodeAttentionInputs._fields
    if name not in DecodeAttentionInputs._field_defaults
]


def decode(batch: int, blocks: int) -> AttentionInputs:
    return DecodeAttentionInputs(
        integers(batch, 1),
        integers(batch),
        *(integers(blocks) for name in REQUIRED[2:]),
    )


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=META)


@pytest.mark.parametrize(
    ("tokens", "context"),
    [
        (integers(2, 16), prefill(2, 16, 0)),
        (integers(2, 16), prefill(2, 16, 3)),
        (integers(1, 1), decode(1, 9)),
        (integers(4, 1), decode(4, 9)),
    ],
    ids=["prompt", "prompt over context", "one row", "several rows"],
)
def test_a_forward_pass_reads_no_value_from_the_device(
    tokens: Tensor, context: AttentionInputs
) -> None:
    model = build_model(WINDOWED, ModelBuild(dtype=torch.bfloat16, device=META))
    caches = [
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device=META) for shape in pair)
        for pair in model.cache_shapes(17, BLOCK_SIZE)
    ]
    model.bind_caches(caches, BLOCK_SIZE)  # type: ignore[arg-type]  # pairs
    model.use_kernels(TorchKernels())

    with StaysOnDevice():
        hidden = model(tokens, context)

    assert hidden.shape == (*tokens.shape, WINDOWED.hidden_size)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("mistral", {"sliding_window": 6}), ("qwen3", {}), ("phi3", {})],
)
def test_cuda_kernels_equal_plain_operations(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    found = []
    for is_fused in (False, True):
        model = load_decoder(folder)
        if is_fused:
            model.use_kernels(TorchKernels())
        harness = PagedHarness(model)

        with torch.inference_mode():
            logits = [
                *harness.prefill(
                    {0: list(range(20, 33)), 1: [40]}, pad_rows=1, pad_query=3
                ).values(),
                *harness.prefill({0: [50, 51], 1: list(range(60, 70))}, pad_blocks=2).values(),
                *harness.decode({0: 52, 1: 70}, pad_rows=1, pad_blocks=2).values(),
                *harness.decode({0: 53}).values(),
            ]
        found.append(torch.cat([part.view(-1, model.config.vocab_size) for part in logits]))

    assert found[0].std() > 0.1
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("static_shapes", [False, True])
def test_sampling_reads_no_value_from_the_device(static_shapes: bool) -> None:
    sampler = Sampler(8, 320, MetaBackend(), static_shapes=static_shapes)
    logits = torch.zeros(4, 320, dtype=torch.bfloat16, device=META)

    with StaysOnDevice():
        for row, sampling in enumerate(EVERYTHING):
            sampler.add_request(row, sampling, np.zeros(3, np.uint32), 2)
        sampled = sampler.sample(logits, [0, 1, 2, 3])
        scored = top_logprobs(logits, sampled.tokens, 3)

    assert sampled.tokens.shape == (4,) and sampled.tokens.device == META
    assert scored.ids.shape == (4, 4)


def test_device_reads_and_waiting_copies_are_detected() -> None:
    values = torch.zeros(3, device=META)
    host = torch.zeros(3)

    with pytest.raises((RuntimeError, NotImplementedError)), StaysOnDevice():
        values.max().item()
    with pytest.raises((RuntimeError, NotImplementedError)), StaysOnDevice():
        values[values > 0]
    with pytest.raises(AssertionError, match="host and device"), StaysOnDevice():
        host.to(META)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_working_setting() -> None:
    with pytest.raises(ConfigError, match=r"'cuda'.*--device cpu"):
        select_backend(EngineConfig("m", device="cuda"))


def test_a_refusal_distinguishes_torch_without_cuda_from_a_missing_gpu() -> None:
    found = [
        missing_cuda("2.13.0+cpu", None, has_device=False),
        missing_cuda("2.13.0+cu130", "13.0", has_device=False),
        missing_cuda("2.13.0+cu130", "13.0", has_device=True),
    ]

    assert found[0] is not None and "torch 2.13.0+cpu is not" in found[0]
    assert found[1] is not None and "CUDA 13.0 and sees 0 GPUs" in found[1]
    assert found[2] is None
