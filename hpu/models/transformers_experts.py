"""Replaces transformers' experts, whose shapes depend on the routing, with our stacked experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpu.distributed.process_groups import ProcessGroup
from hpu.layers.mlp import ACTIVATIONS
from hpu.layers.moe import Experts, ExpertsSpec
from hpu.models.transformers_attention import UnsupportedModelCode

FIELDS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""Attributes of transformers' stacked experts -> values that our experts support."""

PARAMETERS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""transformers' parameter names -> our names, with equal shapes."""


def replace_experts(causal: Any) -> dict[str, str]:
    """Replace the experts of `causal`, a PreTrainedModel on the meta device. Returns old -> new
    parameter paths. Raises UnsupportedModelCode for experts of an unsupported kind."""
    renamed = {}
    for path, module in list(causal.named_modules()):
        if not hasattr(module, "is_concatenated"):
            continue
        parent, _, name = path.rpartition(".")
        setattr(causal.get_submodule(parent), name, _experts(module))
        renamed.update({f"{path}.{old}": f"{path}.{new}" for old, new in PARAMETERS.items()})
    return renamed


def divide_experts(causal: Any, group: ProcessGroup, expert_group: ProcessGroup) -> None:
    """Replace our experts in `causal` by this rank's shard: some whole experts if `expert_group`
    has several ranks, otherwise a part of each expert. Raises UnsupportedModelCode for sizes that
    the ranks do not divide."""
    is_distributed = expert_group.size > 1
    ranks = expert_group if is_distributed else group
    for path, module in list(causal.named_modules()):
        if not isinstance(module, Experts):
            continue
        assert module.w2_weight is not None
        num_experts, hidden, inner = module.w2_weight.shape
        count, what = (num_experts, "experts") if is_distributed else (inner, "inner features")
        if count % ranks.size:
            raise UnsupportedModelCode(
                f"has {count} {what} in {path}, and {ranks.size} (tensor-parallel-size) does not "
                "divide them"
            )
        parent, _, name = path.rpartition(".")
        experts = Experts(
            ExpertsSpec(num_experts, hidden, inner, module.activation_name),
            dtype=module.dtype,
            device=module.device,
            group=ranks,
            is_distributed=is_distributed,
        )
        setattr(causal.get_submodule(parent), name, experts)


def _experts(module: Any) -> nn.Module:
    gate = getattr(type(module), "_apply_gate", None)
    is_plain = all(getattr(module, name, None) is value for name, value in FIELDS.items())
    if (
        not is_plain
        or {name for name, _ in module.named_parameters()} != set(PARAMETERS)
        # The default gate that transformers adds to experts without their own gate.
        or gate.__module__ != "transformers.integrations.moe"
    ):
        raise UnsupportedModelCode(
            f"has experts ({type(module).__name__}) that are not plain gated MLPs"
        )
    num_experts, hidden, inner = module.down_proj.shape
    return Experts(
        ExpertsSpec(num_experts, hidden, inner, _activation(module.act_fn)),
        dtype=module.down_proj.dtype,
        device=module.down_proj.device,
    )


def _activation(function: Callable[[Tensor], Tensor]) -> str:
    """Name of an activation, found by comparing values: configs store the name in different
    fields. Raises UnsupportedModelCode for an unknown activation."""
    x = torch.linspace(-4, 4, 33)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), rtol=1e-6, atol=1e-6):
            return name
    raise UnsupportedModelCode("has experts with an unknown activation")
