"""The tensors of an MLP."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, linear, matrix, row_linear
from config.model.decoder_spec import DecoderSpec


def mlp_weights(
    name: str, parameter: str, inner: Axis, hidden: Axis, spec: DecoderSpec
) -> Iterator[WeightSpec]:
    """The tensors of the MLP `name` in the checkpoint, gated or plain according to `spec`."""
    down, has_bias = "down_proj", spec.mlp_bias
    yield from row_linear(
        f"{name}.{down}", hidden, inner, has_bias=has_bias, parameter=f"{parameter}.{down}"
    )
    if not spec.gated_mlp:
        up = {f"{name}.up_proj": inner}
        yield from linear(f"{parameter}.up_proj", up, hidden, has_bias=has_bias)
        return
    yield from linear(
        f"{parameter}.gate_up_proj",
        {f"{name}.gate_proj": inner, f"{name}.up_proj": inner},
        hidden,
        has_bias=has_bias,
        fused=spec.fused_gate_up,
        fused_fields=f"2 * {inner.fields}",
    )


def merged_mlp_weights(parameter: str, inner: Axis, hidden: Axis) -> Iterator[WeightSpec]:
    """The two tensors of the gated MLP `shared_mlp` in the checkpoint, with gate and up merged."""
    rows = Axis(2 * inner.size, f"2 * {inner.fields}")
    yield matrix("shared_mlp.input_linear.weight", rows, hidden, shard_dim=0)._replace(
        parameter=f"{parameter}.gate_up_proj.weight",
        output_sizes=(inner.size, inner.size),
        outputs=(0, 1),
    )
    down = matrix("shared_mlp.output_linear.weight", hidden, inner, shard_dim=1)
    yield down._replace(parameter=f"{parameter}.down_proj.weight")
