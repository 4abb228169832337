"""The tensors of cross-attention layers."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, linear, row_linear
from config.model.model_config import ModelConfig

GATES = ("cross_attn_attn_gate", "cross_attn_mlp_gate")
"""Parameter names of the attention gate and the MLP gate, which belong to the layer itself."""


def cross_weights(config: ModelConfig, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of cross-attention (cross_attn in the checkpoint), with per-head norms and gates."""
    name, layer = "cross_attn", "self_attn"
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    query = Axis(heads * head_dim, "num_attention_heads * head_dim")
    key = Axis(kv_heads * head_dim, "num_key_value_heads * head_dim")
    yield from row_linear(
        f"{name}.o_proj", hidden, query, has_bias=False, parameter=f"{layer}.o_proj"
    )
    yield from linear(
        f"{layer}.q_proj",
        {f"{name}.q_proj": query},
        hidden,
        has_bias=False,
        num_heads=(heads,),
    )
    yield from linear(
        f"{layer}.kv_proj",
        {f"{name}.k_proj": key, f"{name}.v_proj": key},
        hidden,
        has_bias=False,
        num_heads=(kv_heads, kv_heads),
    )
    for norm in ("q_norm", "k_norm"):
        yield WeightSpec(f"{name}.{norm}.weight", (head_dim,), f"{layer}.{norm}.weight", "head_dim")
    for gate in GATES:
        yield WeightSpec(gate, (1,), gate)
