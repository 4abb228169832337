"""Faster variants of the parts of vision towers, on a CPU in bfloat16: matmuls with packed
weights, patch embeddings as matmuls, RMS norms, gated MLPs, and attention in fewer passes.

Without bfloat16 instructions torch's own matmuls take about six times as long as packed
matmuls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hpu.ops.cpu import can_pack, packed_linear

Forward = Callable[..., Tensor]
ATTENTIONS = (
    *("VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention"),
    *("Qwen3VLMoeVisionAttention", "Qwen3_5VisionAttention", "Qwen3_5MoeVisionAttention"),
)
"""Classes of transformers that split the patches at `cu_seqlens` and attend within each part."""
GATED_MLPS = ("Qwen2_5_VLMLP", "PixtralMLP")
"""Classes of transformers that compute down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
SILU = ("SiLU", "SiLUActivation")


class TowerKernels:
    """Kernels from torch's own operators."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """Matmul with a packed weight; None: the module keeps its own matmul."""
        return packed_linear(weight, bias) if can_pack(weight.dtype, weight.device) else None

    def gated_mlp(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear
    ) -> Callable[[Tensor], Tensor] | None:
        """down(silu(gate(x)) * up(x)); None: the separate modules run."""
        return None

    def rms_norm(self, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
        """RMS norm as in transformers: computed in float32, rounded before the multiplication by
        the weight."""

        def forward(hidden: Tensor) -> Tensor:
            norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
            scales = torch.rsqrt(norms.square() / hidden.shape[-1] + eps)
            return (hidden * scales).to(hidden.dtype) * weight

        return forward

    def attend(
        self, qkv: Tensor, cosines: Tensor, sines: Tensor, ends: Tensor, scale: float
    ) -> Tensor:
        """Attention (n, 3, heads, size) -> (n, heads, size) within each part between two
        consecutive `ends`. Queries and keys are rotated by the angles (n, size / 2) float32, in
        float32."""
        rotated = _rotated(qkv[:, :2], cosines, sines)
        return _attend_within(rotated[:, 0], rotated[:, 1], qkv[:, 2], ends, scale)


def use_cpu_kernels_in_tower(tower: nn.Module, kernels: TowerKernels | None = None) -> int:
    """Replace modules of a loaded bfloat16 tower by `kernels`. Returns the number of replaced
    modules. A packed kernel holds its own copy of the weight; the weight of the module is emptied,
    except the weight of a patch embedding.
    """
    count = 0
    for module in tower.modules():
        forward = _forward(module, kernels or TowerKernels())
        if forward is not None:
            replaced: Any = module
            replaced.forward = forward
            count += 1
    return count


def _forward(module: Any, kernels: TowerKernels) -> Forward | None:
    kind = type(module).__name__
    if kind in ATTENTIONS and module.qkv.weight.dtype == torch.bfloat16:
        return _attention(module, kernels)
    if kind in GATED_MLPS and module.gate_proj.weight.dtype == torch.bfloat16:
        return _gated_mlp(module, kernels)
    weight = getattr(module, "weight", None)
    # A module with an empty weight is packed already.
    if not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16 or not weight.numel():
        return None
    if type(module) is nn.Linear:
        forward = kernels.pack(weight.detach(), module.bias)
        if forward is not None:
            _empty(module)
        return forward
    if isinstance(module, nn.Conv3d) and _is_whole(module):
        return _patch_product(module, kernels)
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return kernels.rms_norm(weight.detach(), float(module.variance_epsilon))
    return None


def _empty(linear: nn.Linear) -> None:
    """Free the weight. An empty tensor stays, because callers read its dtype."""
    linear.weight.data = linear.weight.new_empty(0)


def _is_whole(module: nn.Conv3d) -> bool:
    return (
        module.stride == module.kernel_size
        and module.groups == 1
        and module.padding in ("valid", (0, 0, 0))
        and set(module.dilation) == {1}
    )


def _patch_product(module: nn.Conv3d, kernels: TowerKernels) -> Forward | None:
    """Patch embedding as a matmul instead of a convolution: patches (n, channels, time, height,
    width) of kernel size -> (n, out, 1, 1, 1). torch's convolution takes many times as long."""
    original, size = module.forward, tuple(module.kernel_size)
    multiply = kernels.pack(module.weight.detach().flatten(1), module.bias)
    if multiply is None:
        return None

    def forward(patches: Tensor) -> Tensor:
        if tuple(patches.shape[2:]) != size:
            return original(patches)
        return multiply(patches.flatten(1))[:, :, None, None, None]

    return forward


def _gated_mlp(module: Any, kernels: TowerKernels) -> Forward | None:
    if type(module.act_fn).__name__ not in SILU:
        return None
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    forward = kernels.gated_mlp(*linears)
    if forward is not None:
        for linear in linears:
            _empty(linear)
    return forward


def _attention(module: Any, kernels: TowerKernels) -> Forward:
    num_heads, scale = int(module.num_heads), float(module.scaling)

    def forward(
        hidden: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        length = len(hidden)
        qkv = module.qkv(hidden).view(length, 3, num_heads, -1)
        half = qkv.shape[-1] // 2
        # Both halves of the angles are equal.
        cosines, sines = (tensor[:, :half].float().contiguous() for tensor in position_embeddings)
        found = kernels.attend(qkv, cosines, sines, cu_seqlens, scale)
        output: Tensor = module.proj(found.reshape(length, -1))
        return output

    return forward


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate x (n, parts, heads, size) by the angles (n, size / 2), in float32."""
    half = x.shape[-1] // 2
    cos, sin = cosines[:, None, None], sines[:, None, None]
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out


def _attend_within(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Attention of (n, heads, size) tensors within each part between two consecutive `ends`.
    Parts of equal length run as a batch."""
    starts, lengths = ends[:-1].long(), ends.diff()
    sizes = sorted(set(lengths.tolist()))
    if len(sizes) == 1:
        shape = (-1, sizes[0], *q.shape[1:])
        return _attend(q.reshape(shape), k.reshape(shape), v.reshape(shape), scale).flatten(0, 1)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for size in sizes:
        if size:
            rows = starts[lengths == size].unsqueeze(1) + torch.arange(size)
            out[rows] = _attend(q[rows], k[rows], v[rows], scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of (parts, length, heads, size) tensors."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
