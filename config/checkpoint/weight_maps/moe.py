"""The tensors of a mixture of experts."""

from collections.abc import Iterator
from dataclasses import replace

from config.checkpoint.weight_maps.base import Axis, WeightSpec, matrix
from config.checkpoint.weight_maps.mlp import merged_mlp_weights, mlp_weights
from config.model.decoder_spec import MXFP4_BLOCK, DecoderSpec, MoESpec
from config.model.model_config import ModelConfig


def moe_weights(config: ModelConfig, spec: DecoderSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of the router, the routed experts, and the shared expert with its gate."""
    moe, names = config.moe, spec.moe
    assert moe is not None and names is not None
    experts = Axis(moe.num_experts, moe.fields.num_experts)
    inner = Axis(moe.inner_size, moe.fields.inner_size)
    shared = Axis(moe.shared_size, moe.shared_fields)
    yield from _router(names, experts, hidden)
    if names.layout == "separate":
        yield from _separate_experts(names, experts, hidden, inner)
    elif names.layout == "merged":
        yield from _merged_experts(names.block, experts, hidden, inner)
    else:
        yield from _stacked_experts(names, experts, hidden, inner)
    if names.expert_bias:
        yield from _biases(names, experts, hidden, inner)
    if not shared.size:
        return
    parameter = f"{names.block}.shared_experts"
    if names.layout == "merged":
        yield from merged_mlp_weights("shared_mlp", parameter, shared, hidden)
    else:
        yield from mlp_weights(f"{names.block}.{names.shared}", parameter, shared, hidden, spec)
    if names.shared_gate:
        weight = matrix(f"{names.block}.{names.shared_gate}.weight", Axis(1, "1"), hidden)
        yield weight._replace(parameter=f"{names.block}.shared_expert_gate.weight")


def other_expert_weights(
    config: ModelConfig, spec: DecoderSpec, hidden: Axis
) -> Iterator[tuple[WeightSpec, ...]]:
    """Alternative groups of tensors for the routed experts of a layer, besides the family's layout:
    transformers 5 stacks experts as (experts, out, in), and saves some families in this layout."""
    moe, names = config.moe, spec.moe
    if moe is None or names is None or config.quantization is not None or names.expert_bias:
        return
    experts = Axis(moe.num_experts, moe.fields.num_experts)
    inner = Axis(moe.inner_size, moe.fields.inner_size)
    if names.layout in ("separate", "transposed"):
        plain = replace(names, layout="separate")
        yield tuple(_stacked_experts(plain, experts, hidden, inner))
    if names.layout == "transposed":
        yield tuple(_separate_experts(names, experts, hidden, inner))


def _router(names: MoESpec, experts: Axis, hidden: Axis) -> Iterator[WeightSpec]:
    name, parameter = f"{names.block}.{names.gate}", f"{names.block}.gate"
    rows, columns = (hidden, experts) if names.transposed_router else (experts, hidden)
    weight = matrix(f"{name}.weight", rows, columns)
    yield weight._replace(parameter=f"{parameter}.weight", transposed=names.transposed_router)
    if names.router_bias:
        yield WeightSpec(f"{name}.bias", (experts.size,), f"{parameter}.bias")
    if names.correction_bias:
        yield WeightSpec(
            f"{names.block}.{names.correction_bias}",
            (*names.correction_rows, experts.size),
            f"{names.block}.e_score_correction_bias",
            leading_rows=1 if names.correction_rows > (1,) else None,
        )


def _separate_experts(
    names: MoESpec, experts: Axis, hidden: Axis, inner: Axis
) -> Iterator[WeightSpec]:
    for expert in range(experts.size):
        yield from _expert(expert, experts, names, hidden, inner)


def _expert(
    expert: int, experts: Axis, names: MoESpec, hidden: Axis, inner: Axis
) -> Iterator[WeightSpec]:
    gate, up, down = names.projections
    path = f"{names.block}.experts"
    for output, name in enumerate((gate, up)):
        yield matrix(f"{path}.{expert}.{name}.weight", inner, hidden)._replace(
            parameter=f"{path}.w13_weight",
            output_sizes=(inner.size, inner.size),
            outputs=(output,),
            shard_dim=0,
            expert=expert,
            total_experts=experts.size,
        )
    yield matrix(f"{path}.{expert}.{down}.weight", hidden, inner)._replace(
        parameter=f"{path}.w2_weight", shard_dim=1, expert=expert, total_experts=experts.size
    )


def _merged_experts(block: str, experts: Axis, hidden: Axis, inner: Axis) -> Iterator[WeightSpec]:
    merged = _merged(f"{block}.input_linear.weight", f"{block}.experts.w13_weight", inner, hidden)
    plain = matrix(f"{block}.output_linear.weight", hidden, inner, shard_dim=1)
    for spec in (merged, plain._replace(parameter=f"{block}.experts.w2_weight")):
        yield _of_all(spec, experts)


def _merged(name: str, parameter: str, inner: Axis, hidden: Axis) -> WeightSpec:
    rows = Axis(2 * inner.size, f"2 * {inner.fields}")
    return matrix(name, rows, hidden, shard_dim=0)._replace(
        parameter=parameter, output_sizes=(inner.size, inner.size), outputs=(0, 1)
    )


def _of_all(spec: WeightSpec, experts: Axis) -> WeightSpec:
    """The spec of a stacked tensor of all experts, from the `spec` of a single expert."""
    return spec._replace(
        shape=(experts.size, *spec.shape),
        fields=spec.fields and f"{experts.fields} x {spec.fields}",
        num_experts=experts.size,
    )


def _stacked_experts(
    names: MoESpec, experts: Axis, hidden: Axis, inner: Axis
) -> Iterator[WeightSpec]:
    """Stacked tensors of all routed experts, gate_up and down: (experts, out, in), transposed, or
    MXFP4."""
    prefix = f"{names.block}.experts"
    first, second = names.stacked
    gate_up = _merged(f"{prefix}.{first}", f"{prefix}.w13_weight", inner, hidden)
    if names.clamped_swiglu and names.clamped_swiglu.interleaved:
        # Gate and up rows alternate, both in the tensor and in the parameter.
        gate_up = gate_up._replace(output_sizes=(), outputs=())
    down = matrix(f"{prefix}.{second}", hidden, inner, shard_dim=1)
    for spec in (gate_up, down._replace(parameter=f"{prefix}.w2_weight")):
        rows, columns = spec.shape
        row_fields, column_fields = spec.fields.split(" x ")
        if names.layout == "mxfp4":
            groups = (rows, columns // MXFP4_BLOCK)
            fields = f"{row_fields} x {column_fields} / {MXFP4_BLOCK}"
            scales = spec._replace(name=f"{spec.name}_scales", shape=groups, fields=fields)
            yield _of_all(scales._replace(mxfp4="scales"), experts)
            num_bytes = MXFP4_BLOCK // 2
            blocks = spec._replace(
                name=f"{spec.name}_blocks",
                shape=(*groups, num_bytes),
                fields=f"{fields} x {num_bytes}",
            )
            yield _of_all(blocks._replace(mxfp4="blocks"), experts)
        elif names.layout == "separate":
            yield _of_all(spec, experts)
        else:
            fields = f"{column_fields} x {row_fields}"
            spec = spec._replace(shape=(columns, rows), fields=fields, transposed=True)
            yield _of_all(spec, experts)


def _biases(names: MoESpec, experts: Axis, hidden: Axis, inner: Axis) -> Iterator[WeightSpec]:
    prefix = f"{names.block}.experts"
    gate_up = WeightSpec(
        f"{prefix}.gate_up_proj_bias", (2 * inner.size,), f"{prefix}.w13_bias", shard_dim=0
    )
    down = WeightSpec(f"{prefix}.down_proj_bias", (hidden.size,), f"{prefix}.w2_bias")
    for spec in (gate_up, down):
        yield _of_all(spec, experts)
