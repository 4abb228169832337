"""The tensors of layers with a recurrent state: Mamba 2, gated DeltaNet and gated short
convolutions."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, matrix, row_linear
from config.model.state_space import GatedDeltaSpec, Mamba2Spec, ShortConvSpec

LAYER = "self_attn"
"""The layer's name in the model."""


def mamba2_weights(spec: Mamba2Spec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of a Mamba 2 layer (mamba in the checkpoint)."""
    name = "mamba"
    inner = Axis(spec.inner_size, "mamba_n_heads * mamba_d_head")
    state = "2 * mamba_n_groups * mamba_d_state"
    conv = Axis(spec.conv_size, f"{inner.fields} + {state}")
    heads = Axis(spec.num_heads, "mamba_n_heads")
    sizes = (inner.size, inner.size, spec.group_size, spec.group_size, heads.size)
    counts = (heads.size, heads.size, spec.num_groups, spec.num_groups, heads.size)
    rows = Axis(sum(sizes), f"2 * {inner.fields} + {state} + {heads.fields}")
    weight = matrix(f"{name}.in_proj.weight", rows, hidden)
    projections = [weight._replace(parameter=f"{LAYER}.in_proj.weight")]
    if spec.proj_bias:
        projections.append(
            WeightSpec(f"{name}.in_proj.bias", (rows.size,), f"{LAYER}.in_proj.bias")
        )
    for weight in projections:
        yield _divided(weight, sizes, counts)
    yield from row_linear(
        f"{name}.out_proj", hidden, inner, has_bias=spec.proj_bias, parameter=f"{LAYER}.out_proj"
    )
    # Channels of the convolution: x, B and C.
    channels = sizes[1:4], counts[1:4]
    yield from _recurrence(name, conv, heads, spec.conv_kernel, *channels)
    yield WeightSpec(f"{name}.D", (heads.size,), f"{LAYER}.D", heads.fields, shard_dim=0)
    norm = WeightSpec(f"{name}.norm.weight", (inner.size,), f"{LAYER}.norm.weight", inner.fields)
    yield norm._replace(shard_dim=0)
    if spec.conv_bias:
        bias = WeightSpec(f"{name}.conv1d.bias", (conv.size,), f"{LAYER}.conv_bias", conv.fields)
        yield _divided(bias, *channels)


def gated_delta_weights(spec: GatedDeltaSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of a gated DeltaNet layer (linear_attn in the checkpoint)."""
    name = "linear_attn"
    key = Axis(spec.key_size, "linear_num_key_heads * linear_key_head_dim")
    value = Axis(spec.value_size, "linear_num_value_heads * linear_value_head_dim")
    heads = Axis(spec.num_value_heads, "linear_num_value_heads")
    conv = Axis(spec.conv_size, f"2 * {key.fields} + {value.fields}")
    sizes = (key.size, key.size, value.size, value.size, heads.size, heads.size)
    counts = (spec.num_key_heads,) * 2 + (heads.size,) * 4
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
            num_heads=counts,
            row_groups=spec.num_key_heads if spec.fused_weights else None,
        )
    yield from row_linear(
        f"{name}.out_proj", hidden, value, has_bias=False, parameter=f"{LAYER}.out_proj"
    )
    yield from _recurrence(name, conv, heads, spec.conv_kernel, sizes[:3], counts[:3])
    yield WeightSpec(
        f"{name}.norm.weight",
        (spec.value_dim,),
        f"{LAYER}.norm.weight",
        "linear_value_head_dim",
    )


def short_conv_weights(spec: ShortConvSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of a gated short convolution (conv in the checkpoint)."""
    name = "conv"
    size = spec.conv_size
    sizes = (size,) * 3
    rows = Axis(sum(sizes), f"3 * {hidden.fields}")
    in_proj = matrix(f"{name}.in_proj.weight", rows, hidden)
    yield _divided(in_proj._replace(parameter=f"{LAYER}.in_proj.weight"), sizes, sizes)
    yield from row_linear(
        f"{name}.out_proj", hidden, hidden, has_bias=spec.bias, parameter=f"{LAYER}.out_proj"
    )
    shape, parameter = (size, 1, spec.conv_kernel), f"{LAYER}.conv_weight"
    weight = WeightSpec(f"{name}.conv.weight", shape, parameter, hidden.fields)
    yield weight._replace(shard_dim=0)
    if not spec.bias:
        return
    bias = WeightSpec(f"{name}.in_proj.bias", (rows.size,), f"{LAYER}.in_proj.bias", rows.fields)
    yield _divided(bias, sizes, sizes)
    bias = WeightSpec(f"{name}.conv.bias", (size,), f"{LAYER}.conv_bias", hidden.fields)
    yield bias._replace(shard_dim=0)


def _recurrence(
    name: str,
    conv: Axis,
    heads: Axis,
    conv_kernel: int,
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
) -> Iterator[WeightSpec]:
    """The convolution weight, A_log and dt_bias. `sizes` and `counts`: arguments of _divided for
    the convolution's channels."""
    shape = (conv.size, 1, conv_kernel)
    weight = WeightSpec(f"{name}.conv1d.weight", shape, f"{LAYER}.conv_weight", conv.fields)
    yield _divided(weight, sizes, counts)
    for parameter in ("A_log", "dt_bias"):
        weight = WeightSpec(
            f"{name}.{parameter}", (heads.size,), f"{LAYER}.{parameter}", heads.fields
        )
        yield weight._replace(shard_dim=0)


def _divided(weight: WeightSpec, sizes: tuple[int, ...], counts: tuple[int, ...]) -> WeightSpec:
    """`weight` with concatenated outputs of `sizes`, which consist of `counts` heads or groups."""
    outputs = tuple(range(len(sizes)))
    return weight._replace(output_sizes=sizes, outputs=outputs, num_heads=counts, shard_dim=0)
