"""Calculates the scales of an FP8 KV cache from the keys and values of a prompt, after the weights
are loaded and before graphs are captured or blocks are cached."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from hpu.layers.attention import PagedAttention
from hpu.layers.mla import PagedLatentAttention
from hpu.models.decoder import Decoder
from hpu.protocol import PREFILL, Launch, NewRequest, RequestSampling, StepPlan
from hpu.quantization.kv_cache import fp8_errors
from hpu.runner.counters import Counters
from hpu.worker.build import Components, make_runner, make_sampler
from hpu.worker.load import LoadedModel

logger = logging.getLogger(__name__)

NUM_TOKENS = 512
"""Maximum number of prompt tokens."""
SEED = 17
RANGES = (200.0, 100.0)
"""Largest scaled magnitude, for keys and for values: vLLM's K_SCALE_CONSTANT and V_SCALE_CONSTANT.
Values of other prompts may reach 448."""
STEPS = 16
"""Number of candidate scales, from the smallest scale to just below twice this scale. FP8 is a
float: doubling a scale changes the relative errors of only the smallest values. Candidates in
between differ in the errors of the largest values, which dominate."""


def calculate_kv_scales(loaded: LoadedModel) -> None:
    """Set the KV cache scales of all layers that have scales, minimizing the square error.
    Collective: all ranks of the model call it together. The prompt has fixed random tokens, so that
    all ranks and restarts get the same scales."""
    model, format = loaded.model, loaded.kv_cache_format
    assert isinstance(model, nn.Module) and format is not None and format.has_layer_scales
    layers = [module for module in model.modules() if isinstance(module, PagedAttention)]
    start = time.perf_counter()
    num_tokens = min(NUM_TOKENS, loaded.max_model_len - 1, loaded.token_budget)
    with _unquantized_cache(model):
        components = _run_prompt(replace(loaded, kv_cache_format=None), num_tokens)
        group = loaded.groups.stage_host
        largest = -group.minimum(-_of_each(layers, lambda x, _: x.abs().amax().reshape(1)))
        # If all values are zero, any scale is valid.
        smallest = torch.where(largest > 0, largest / torch.tensor(RANGES).unsqueeze(-1), 1.0)
        scales = smallest * 2 ** (torch.arange(STEPS) / STEPS)
        errors = group.all_reduce(_of_each(layers, fp8_errors, scales * format.unit))
        components.close()
        del components
    gc.collect()
    best = scales.gather(-1, errors.argmin(-1, keepdim=True))
    for layer, pair in zip(layers, best, strict=True):
        for parameter, scale in zip(layer.kv_scales, pair, strict=True):
            assert parameter is not None
            # Scales are read when caches are bound.
            parameter.copy_(scale)
    logger.info(
        "KV cache: scales of %d layers from %d tokens in %.1f s",
        len(layers),
        num_tokens,
        time.perf_counter() - start,
    )


@contextmanager
def _unquantized_cache(model: nn.Module) -> Iterator[None]:
    kept: list[tuple[nn.Module, str, object]] = []

    def change(module: nn.Module, name: str, value: object) -> None:
        kept.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    for module in model.modules():
        if isinstance(module, Decoder):
            change(module, "kv_cache_format", None)
        elif isinstance(module, PagedAttention | PagedLatentAttention):
            if module.kv_cache_spec is not None:
                change(module, "kv_cache_spec", module.kv_cache_spec._replace(format=None))
            if isinstance(module, PagedAttention):
                change(module, "format", None)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def _run_prompt(loaded: LoadedModel, num_tokens: int) -> Components:
    """Run a prompt of `num_tokens` tokens. Returns the components, whose caches contain its keys
    and values."""
    num_blocks = -(-num_tokens // loaded.block_size)
    components = make_runner(
        loaded,
        make_sampler(loaded),
        Counters(),
        num_blocks=num_blocks,
        captures=False,
        graph_bytes=0,
    )
    tokens = np.random.default_rng(SEED).integers(loaded.model_config.vocab_size, size=num_tokens)
    raw = memoryview(tokens.astype("<u4").tobytes())
    request = NewRequest(0, raw, num_tokens, 0, list(range(num_blocks)), RequestSampling())
    launch = Launch(PREFILL, (1, num_tokens, 0), [0], [num_tokens], [False])
    output = components.runner.submit(StepPlan(0, [launch], [request]))
    output.wait()
    components.runner.collect(output)
    return components


def _of_each(
    layers: list[PagedAttention],
    measure: Callable[[Tensor, Tensor], Tensor],
    scales: Tensor | None = None,
) -> Tensor:
    """(layers, 2, n) on the host: result (n,) of `measure` for each layer's cached keys and values
    in float32, and its `scales` (layers, 2, n)."""
    if not layers:
        # Latents have no scales; other pipeline stages may have layers with scales.
        return torch.zeros(0, 2, 1)
    found = []
    for index, layer in enumerate(layers):
        for kind, numbers in enumerate(layer.caches):
            own = torch.empty(0) if scales is None else scales[index, kind]
            found.append(measure(numbers.cpu().float(), own))
    return torch.stack(found).view(len(layers), 2, -1)
