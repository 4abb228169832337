"""The tensors of multi-head latent attention."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import Axis, WeightSpec, linear, matrix, row_linear
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig

_NOPE, _ROPE, _VALUE = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"


def mla_weights(config: ModelConfig, spec: DecoderSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of the down projections to latents and their norms, the up projections to heads, and
    the output projection."""
    mla = spec.mla
    assert mla is not None
    heads, name, attention = config.num_heads, "num_attention_heads", "self_attn"
    query = Axis(heads * mla.qk_head_dim, f"{name} * ({_NOPE} + {_ROPE})")
    both = Axis(heads * (mla.qk_nope_head_dim + mla.v_head_dim), f"{name} * ({_NOPE} + {_VALUE})")
    latent = Axis(mla.latent_size, f"(kv_lora_rank + {_ROPE})")
    rank = Axis(mla.kv_lora_rank, "kv_lora_rank")
    value = Axis(heads * mla.v_head_dim, f"{name} * {_VALUE}")

    def rotated(weight: WeightSpec, start: int) -> WeightSpec:
        """`weight`; with an interleaved rope, the rows of each head after the first `start` rows
        are marked as interleaved."""
        if not spec.interleaved_rope:
            return weight
        size = mla.qk_rope_head_dim
        return weight._replace(interleaved_size=size, interleaved_start=start)

    key = f"{attention}.kv_a_proj_with_mqa"
    if mla.q_lora_rank is None:
        weight = matrix(f"{attention}.q_proj.weight", query, hidden, shard_dim=0)
        yield rotated(weight, mla.qk_nope_head_dim)
        yield rotated(matrix(f"{key}.weight", latent, hidden), mla.kv_lora_rank)
        if spec.qkv_bias:
            bias = WeightSpec(f"{key}.bias", (latent.size,), f"{key}.bias")
            yield rotated(bias, mla.kv_lora_rank)
    else:
        query_rank = Axis(mla.q_lora_rank, "q_lora_rank")
        tensors = {f"{attention}.q_a_proj": query_rank, key: latent}
        fused = f"{attention}.fused_qkv_a_proj"
        # Both outputs have a single head, so they are replicated on every rank.
        for weight in linear(fused, tensors, hidden, has_bias=spec.qkv_bias, num_heads=(1, 1)):
            yield rotated(weight, mla.kv_lora_rank) if weight.name.startswith(key) else weight
        norm = f"{attention}.q_a_layernorm.weight"
        yield WeightSpec(norm, (query_rank.size,), norm, query_rank.fields)
        weight = matrix(f"{attention}.q_b_proj.weight", query, query_rank, shard_dim=0)
        yield rotated(weight, mla.qk_nope_head_dim)
    norm = f"{attention}.kv_a_layernorm.weight"
    yield WeightSpec(norm, (rank.size,), norm, rank.fields)
    yield matrix(f"{attention}.kv_b_proj.weight", both, rank, shard_dim=0)
    yield from row_linear(f"{attention}.o_proj", hidden, value, has_bias=spec.o_bias)
