"""The tensors of layers with a state: Mamba 2 and gated DeltaNet."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, linear, matrix, row_linear
from config.model.state_space import GatedDeltaSpec, Mamba2Spec

LAYER = "self_attn"
"""The layer's name in the model."""


def mamba2_weights(spec: Mamba2Spec, hidden: Axis) -> Iterator[WeightSpec]:
    """A Mamba 2 layer, which the checkpoint calls mamba."""
    name = "mamba"
    inner = Axis(spec.inner_size, "mamba_n_heads * mamba_d_head")
    state = "2 * mamba_n_groups * mamba_d_state"
    conv = Axis(spec.conv_size, f"{inner.fields} + {state}")
    sizes = (inner.size, conv.size, spec.num_heads)
    rows = Axis(sum(sizes), f"2 * {inner.fields} + {state} + mamba_n_heads")
    for weight in linear(f"{name}.in_proj", {f"{name}.in_proj": rows}, hidden, has_bias=False):
        yield weight._replace(
            parameter=f"{LAYER}.in_proj.weight", output_sizes=sizes, outputs=(0, 1, 2)
        )
    if spec.proj_bias:
        yield WeightSpec(
            f"{name}.in_proj.bias",
            (rows.size,),
            f"{LAYER}.in_proj.bias",
            output_sizes=sizes,
            outputs=(0, 1, 2),
            shard_dim=0,
        )
    yield from row_linear(
        f"{name}.out_proj", hidden, inner, has_bias=spec.proj_bias, parameter=f"{LAYER}.out_proj"
    )
    yield from _recurrence(name, conv, Axis(spec.num_heads, "mamba_n_heads"), spec.conv_kernel)
    yield WeightSpec(f"{name}.D", (spec.num_heads,), f"{LAYER}.D", "mamba_n_heads")
    yield WeightSpec(f"{name}.norm.weight", (inner.size,), f"{LAYER}.norm.weight", inner.fields)
    if spec.conv_bias:
        yield WeightSpec(f"{name}.conv1d.bias", (conv.size,), f"{LAYER}.conv_bias", conv.fields)


def gated_delta_weights(spec: GatedDeltaSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """A gated DeltaNet layer, which the checkpoint calls linear_attn."""
    name = "linear_attn"
    key = Axis(spec.key_size, "linear_num_key_heads * linear_key_head_dim")
    value = Axis(spec.value_size, "linear_num_value_heads * linear_value_head_dim")
    heads = Axis(spec.num_value_heads, "linear_num_value_heads")
    conv = Axis(spec.conv_size, f"2 * {key.fields} + {value.fields}")
    sizes = (key.size, key.size, value.size, value.size, heads.size, heads.size)
    tensors: tuple[tuple[str, Axis, tuple[int, ...]], ...]
    if spec.fused_weights:
        qkvz = Axis(2 * key.size + 2 * value.size, f"2 * {key.fields} + 2 * {value.fields}")
        tensors = (
            ("in_proj_qkvz", qkvz, (0, 1, 2, 3)),
            ("in_proj_ba", Axis(2 * heads.size, f"2 * {heads.fields}"), (4, 5)),
        )
    else:
        tensors = (
            ("in_proj_qkv", conv, (0, 1, 2)),
            ("in_proj_z", value, (3,)),
            ("in_proj_b", heads, (4,)),
            ("in_proj_a", heads, (5,)),
        )
    for tensor, rows, outputs in tensors:
        yield matrix(f"{name}.{tensor}.weight", rows, hidden, shard_dim=0)._replace(
            parameter=f"{LAYER}.in_proj.weight",
            output_sizes=sizes,
            outputs=outputs,
            row_groups=spec.num_key_heads if spec.fused_weights else None,
        )
    yield from row_linear(
        f"{name}.out_proj", hidden, value, has_bias=False, parameter=f"{LAYER}.out_proj"
    )
    yield from _recurrence(name, conv, heads, spec.conv_kernel)
    yield WeightSpec(
        f"{name}.norm.weight",
        (spec.value_dim,),
        f"{LAYER}.norm.weight",
        "linear_value_head_dim",
    )


def _recurrence(name: str, conv: Axis, heads: Axis, conv_kernel: int) -> Iterator[WeightSpec]:
    yield WeightSpec(
        f"{name}.conv1d.weight", (conv.size, 1, conv_kernel), f"{LAYER}.conv_weight", conv.fields
    )
    for parameter in ("A_log", "dt_bias"):
        yield WeightSpec(f"{name}.{parameter}", (heads.size,), f"{LAYER}.{parameter}", heads.fields)
