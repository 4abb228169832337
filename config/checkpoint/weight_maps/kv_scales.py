"""The scales of FP8 KV caches that a checkpoint may contain."""

from collections.abc import Iterator
from dataclasses import replace

from config.checkpoint.weight_maps.base import WeightMap, WeightSpec

_PROJECTION = "self_attn.qkv_proj.weight"
"""The parameter of the query, key and value projections of an attention layer."""


def with_kv_scales(weight_map: WeightMap) -> WeightMap:
    """`weight_map` with optional KV-cache scales for each layer with a qkv_proj."""
    return replace(weight_map, optional=tuple(_scales(weight_map)))


def _scales(weight_map: WeightMap) -> Iterator[WeightSpec]:
    for index, layer in enumerate(weight_map.layers):
        names = [spec.name for spec in layer if spec.parameter == _PROJECTION]
        if not names:
            continue
        # self_attn of a projection such as self_attn.k_proj.weight.
        attention = names[0].rsplit(".", 2)[0]
        for kind in ("k", "v"):
            scale = f"{kind}_scale"
            # Names written by llmcompressor, by vLLM's own models, and by AutoFP8 and ModelOpt.
            for module in ("", "attn.", f"{kind}_proj.", "qkv_proj."):
                yield WeightSpec(
                    f"{weight_map.layer_prefix}{index}.{attention}.{module}{scale}",
                    (1,),
                    f"{weight_map.parameter_prefix}{index}.self_attn.attn.{scale}",
                    is_kv_scale=True,
                )
