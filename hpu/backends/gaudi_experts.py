"""Compares the vendor's kernels for experts that have biases to plain operations, on the model's
weights. A public report describes wrong text of gpt-oss by `bias_fused_weights` of release 1.24.0
(gpt-oss on Gaudi 3 with vllm-gaudi 0.19)."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hpu.layers.moe import Experts

logger = logging.getLogger(__name__)

NUM_CHOSEN = 4
"""Experts per token in the comparison."""
MIN_TOKENS = 16
MAX_DIFFERENCE = 0.1
"""Largest accepted root mean square of the difference, as a fraction of the plain result's.
Rounding to bfloat16 gives about 0.01, operands in the wrong order more than 1."""

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states, expert ids, weights) -> output."""
Compiled = Callable[[Run], Run]


def check_experts(
    layers: Iterable[nn.Module], compiled: Compiled, refuses: Callable[[Exception], bool]
) -> None:
    """Compare the kernel with plain operations in the first layer whose experts have biases and run
    on a kernel. If the results differ or the kernel cannot be compiled, experts with biases run on
    plain operations.

    `compiled` is Backend.compiled; `refuses`: whether an error means that the kernel cannot be
    compiled.
    """
    experts = [
        module
        for layer in layers
        for module in layer.modules()
        if isinstance(module, Experts)
        and isinstance(module.moe_op, nn.Module)
        and isinstance(module.w13_bias, Tensor)
    ]
    if not experts:
        return
    try:
        difference = _difference(experts[0], compiled)
    except RuntimeError as error:
        if not refuses(error):
            raise
        why = f"the kernel cannot be compiled ({error})"
    else:
        if difference <= MAX_DIFFERENCE:
            return
        why = (
            f"the relative error of the kernel is {difference:.2f}, it must be at most "
            f"{MAX_DIFFERENCE}"
        )
    logger.warning(
        "Experts: %s in the first layer with experts: all %d layers use plain operations, which "
        "is slow, since every expert computes every token",
        why,
        len(experts),
    )
    for layer in experts:
        layer.moe_op = None


def _difference(experts: Experts, compiled: Compiled) -> float:
    """Root mean square of (kernel - plain operations) on random tokens, relative to the root mean
    square of the plain result; infinite if the kernel's result is not finite."""
    kernel, bias = experts.moe_op, experts.w2_bias
    assert isinstance(kernel, nn.Module) and isinstance(bias, Tensor)
    device = bias.device
    count, hidden_size = bias.shape
    num_tokens = max(MIN_TOKENS, -(-count // NUM_CHOSEN))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    # Each expert has a token. No token has an expert twice if there are at least NUM_CHOSEN.
    order = torch.arange(num_tokens * NUM_CHOSEN).view(num_tokens, NUM_CHOSEN) % count
    weights = torch.rand(num_tokens, NUM_CHOSEN, generator=generator)
    name = experts.activation_name
    given = (
        hidden.to(experts.dtype).to(device),
        order.to(device),
        weights.to(experts.dtype).to(device),
    )

    def fused(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = kernel(hidden, ids + experts.first_expert, weights, True, name)
        return out

    def plain(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts.method.apply(experts, hidden, ids, weights)

    found, expected = (compiled(run)(*given).float().cpu() for run in (fused, plain))
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
