"""The tensors of a gated MLP."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, linear, row_linear
from config.model.decoder_spec import DecoderSpec


def mlp_weights(
    name: str, parameter: str, inner: Axis, hidden: Axis, spec: DecoderSpec
) -> Iterator[WeightSpec]:
    """A gated MLP that the checkpoint calls `name`."""
    down, has_bias = "down_proj", spec.mlp_bias
    yield from row_linear(
        f"{name}.{down}", hidden, inner, has_bias=has_bias, parameter=f"{parameter}.{down}"
    )
    yield from linear(
        f"{parameter}.gate_up_proj",
        {f"{name}.gate_proj": inner, f"{name}.up_proj": inner},
        hidden,
        has_bias=has_bias,
        fused=spec.fused_weights,
        fused_fields=f"2 * {inner.fields}",
    )
