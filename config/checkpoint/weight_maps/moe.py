"""The tensors of a mixture of experts."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, matrix
from config.checkpoint.weight_maps.mlp import mlp_weights
from config.model.decoder_spec import DecoderSpec, MoESpec
from config.model.model_config import ModelConfig


def moe_weights(config: ModelConfig, spec: DecoderSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Router, routed experts and shared expert."""
    moe, names = config.moe, spec.moe
    assert moe is not None and names is not None
    experts = Axis(moe.num_experts, moe.fields.num_experts)
    gate = matrix(f"{names.block}.{names.gate}.weight", experts, hidden)
    yield gate._replace(parameter="mlp.gate.weight")
    if names.correction_bias:
        yield WeightSpec(
            f"{names.block}.{names.correction_bias}",
            (*names.correction_rows, experts.size),
            "mlp.e_score_correction_bias",
        )
    inner = Axis(moe.inner_size, moe.fields.inner_size)
    shared = Axis(moe.shared_size, moe.shared_fields)
    if names.merged:
        yield from _merged_experts(names.block, experts, shared, hidden, inner)
        return
    for expert in range(moe.num_experts):
        yield from _expert(expert, names, hidden, inner)
    if shared.size:
        name = f"{names.block}.{names.shared}"
        yield from mlp_weights(name, "mlp.shared_experts", shared, hidden, spec)
    if shared.size and names.shared_gate:
        weight = matrix(f"{names.block}.{names.shared_gate}.weight", Axis(1, "1"), hidden)
        yield weight._replace(parameter="mlp.shared_expert_gate.weight")


def _expert(expert: int, names: MoESpec, hidden: Axis, inner: Axis) -> Iterator[WeightSpec]:
    """The tensors of one routed expert."""
    gate, up, down = names.projections
    prefix = f"{names.block}.experts.{expert}"
    for output, name in enumerate((gate, up)):
        yield matrix(f"{prefix}.{name}.weight", inner, hidden)._replace(
            parameter="mlp.experts.w13_weight",
            output_sizes=(inner.size, inner.size),
            outputs=(output,),
            shard_dim=0,
            expert=expert,
        )
    yield matrix(f"{prefix}.{down}.weight", hidden, inner)._replace(
        parameter="mlp.experts.w2_weight", shard_dim=1, expert=expert
    )


def _merged_experts(
    block: str, experts: Axis, shared: Axis, hidden: Axis, inner: Axis
) -> Iterator[WeightSpec]:
    """Two tensors for all routed experts, and two for the shared one if it has a size."""
    up, down = "input_linear.weight", "output_linear.weight"
    merged = _merged(f"{block}.{up}", "mlp.experts.w13_weight", inner, hidden)
    plain = matrix(f"{block}.{down}", hidden, inner, shard_dim=1)
    for spec in (merged, plain._replace(parameter="mlp.experts.w2_weight")):
        yield spec._replace(
            shape=(experts.size, *spec.shape),
            fields=f"{experts.fields} x {spec.fields}",
            num_experts=experts.size,
        )
    if shared.size:
        yield _merged(f"shared_mlp.{up}", "mlp.shared_experts.gate_up_proj.weight", shared, hidden)
        plain = matrix(f"shared_mlp.{down}", hidden, shared, shard_dim=1)
        yield plain._replace(parameter="mlp.shared_experts.down_proj.weight")


def _merged(name: str, parameter: str, inner: Axis, hidden: Axis) -> WeightSpec:
    """Gate and up of an MLP in one tensor."""
    rows = Axis(2 * inner.size, f"2 * {inner.fields}")
    return matrix(name, rows, hidden, shard_dim=0)._replace(
        parameter=parameter, output_sizes=(inner.size, inner.size), outputs=(0, 1)
    )
