"""Replaces weights in a weight map by the tensors that store them quantized."""

from collections.abc import Iterable, Iterator

from config.checkpoint.weight_maps.base import WeightSpec
from config.model.quantization.base import QuantizationConfig, WeightScheme

_WEIGHT = ".weight"
_HEAD = "lm_head.weight"


def quantized_weights(
    weights: Iterable[WeightSpec], quantization: QuantizationConfig | None, prefix: str = ""
) -> Iterator[WeightSpec]:
    """`weights`, with each weight that `quantization` covers replaced by the tensors of its scheme.
    `prefix`: prefix of module names in the checkpoint."""
    for weight in weights:
        scheme = None
        if quantization is not None and quantization.stacked and weight.is_stacked:
            if quantization.scheme_of(prefix + weight.name) is None:
                yield weight
            else:
                yield from _stacked(weight, quantization.stacked)
            continue
        if quantization is not None and _is_linear(weight, has_head=quantization.has_head):
            scheme = quantization.scheme_of(prefix + weight.name.removesuffix(_WEIGHT))
        if scheme is None:
            yield weight
            continue
        if weight.transposed:
            # The parts of a scheme describe a weight of shape (out, in).
            fields = " x ".join(reversed(weight.fields.split(" x ")))
            weight = weight._replace(shape=weight.shape[::-1], fields=fields, transposed=False)
        module = weight.name.removesuffix(_WEIGHT)
        for part in scheme.parts:
            yield weight._replace(name=f"{module}.{part.suffix}", scheme=scheme, part=part)


def _stacked(weight: WeightSpec, scheme: WeightScheme) -> Iterator[WeightSpec]:
    if weight.transposed:
        experts, rows, columns = weight.shape
        fields = weight.fields.split(" x ")
        weight = weight._replace(
            shape=(experts, columns, rows),
            fields=" x ".join((fields[0], fields[2], fields[1])),
            transposed=False,
        )
    for part in scheme.parts:
        yield weight._replace(name=weight.name + part.suffix, scheme=scheme, part=part)


def _is_linear(weight: WeightSpec, *, has_head: bool) -> bool:
    """Whether `weight` is a matrix that a quantization may cover: a projection, a matrix of an
    expert or, with `has_head`, the output head."""
    if not weight.name.endswith(_WEIGHT) or len(weight.shape) != 2:
        return False
    if weight.parameter == _HEAD:
        return has_head
    layer, _, name = weight.parameter.rpartition(".")
    is_expert = weight.expert is not None and name in ("w13_weight", "w2_weight")
    return is_expert or (name == "weight" and "_proj" in layer.rpartition(".")[2])
