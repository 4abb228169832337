"""The tensors of decoders: embedding, attention, MLP, head."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import (
    Axis,
    WeightMap,
    WeightSpec,
    linear,
    matrix,
    row_linear,
)
from config.checkpoint.weight_maps.mlp import mlp_weights
from config.checkpoint.weight_maps.moe import moe_weights
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig

VALUES = 2
"""Index of the values among the outputs of queries, keys and values."""


def decoder_weight_map(
    config: ModelConfig, spec: DecoderSpec, *, has_head: bool = True
) -> WeightMap:
    """The tensors of a decoder, under the names of Llama, which are also the model's own."""
    hidden, vocab = Axis(config.hidden_size, "hidden_size"), Axis(config.vocab_size, "vocab_size")
    has_own_head = has_head and not config.tie_word_embeddings
    outer = [
        matrix("model.embed_tokens.weight", vocab, hidden, shard_dim=0),
        WeightSpec("model.norm.weight", (hidden.size,), "model.norm.weight"),
    ]
    if has_own_head:
        outer.append(matrix("lm_head.weight", vocab, hidden, shard_dim=0))
    ignored = ["model.mtp_"]
    ignored += [f"model.layers.{config.num_layers + i}." for i in range(config.num_mtp_layers)]
    if not has_own_head:
        ignored.append("lm_head.weight")
    if not has_head:
        ignored.append("score.")
    return WeightMap(
        tuple(outer),
        _decoder_layers(config, spec, hidden),
        layer_prefix="model.layers.",
        parameter_prefix="model.layers.",
        # Checkpoints without a head leave the prefix out.
        default_prefix="model.",
        known_prefixes=("model.", "lm_head.", "score."),
        ignored_prefixes=tuple(ignored),
        ignored_suffixes=(".rotary_emb.inv_freq",),
    )


def _decoder_layers(
    config: ModelConfig, spec: DecoderSpec, hidden: Axis
) -> tuple[tuple[WeightSpec, ...], ...]:
    moe = config.moe
    size_field = "intermediate_size" if moe is None else moe.fields.dense_size
    inner = Axis(config.intermediate_size, size_field)
    attention = tuple(attention_weights(config, spec, hidden))
    by_kind = {"mlp": tuple(mlp_weights(spec.mlp, spec.mlp, inner, hidden, spec))}
    if spec.moe is not None:
        by_kind["moe"] = tuple(moe_weights(config, spec, hidden))
    heads = config.num_heads
    sinks = WeightSpec("self_attn.sinks", (heads,), "self_attn.sinks", shard_dim=0)
    return tuple(
        (
            *(one for one in attention if layer.qk_norm or ".qk_norm." not in one.parameter),
            *((sinks,) if layer.sinks else ()),
            *by_kind[layer.feed_forward],
        )
        for layer in spec.layers
    )


def attention_weights(config: ModelConfig, spec: DecoderSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Attention, and the norms of the layer."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    query = Axis(heads * head_dim, "num_attention_heads * head_dim")
    key = Axis(kv_heads * head_dim, "num_key_value_heads * head_dim")
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield WeightSpec(name, (hidden.size,), name)
    attention = "self_attn"
    yield from row_linear(f"{attention}.o_proj", hidden, query, has_bias=spec.o_bias)
    for weight in linear(
        f"{attention}.qkv_proj",
        {f"{attention}.{n}_proj": axis for n, axis in (("q", query), ("k", key), ("v", key))},
        hidden,
        has_bias=spec.qkv_bias,
        num_heads=(heads, kv_heads, kv_heads),
        fused=spec.fused_weights,
        fused_fields=f"({query.fields} + 2 * {key.fields})",
    ):
        is_rotated = spec.interleaved_rope and VALUES not in weight.outputs
        yield weight._replace(interleaved_size=head_dim if is_rotated else None)
    if spec.qk_norm in ("none", "unweighted"):
        return
    # Queries and keys are normed at once. A norm of heads has one weight for all of them, which a
    # row of the parameter repeats for each.
    of_heads = spec.qk_norm == "heads"
    for index, (name, count, axis) in enumerate(
        (("q_norm", heads, query), ("k_norm", kv_heads, key))
    ):
        yield WeightSpec(
            f"{attention}.{name}.weight",
            (head_dim if of_heads else axis.size,),
            f"{attention}.qk_norm.weight",
            output_sizes=(heads, kv_heads) if of_heads else (query.size, key.size),
            outputs=(index,),
            num_heads=(heads, kv_heads),
            shard_dim=0,
            repeats=count if of_heads else None,
        )
