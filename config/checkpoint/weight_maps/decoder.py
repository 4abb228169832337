"""The tensors of decoders."""

from collections.abc import Iterator

from config.checkpoint.weight_maps.base import (
    Axis,
    WeightMap,
    WeightSpec,
    linear,
    matrix,
    row_linear,
)
from config.checkpoint.weight_maps.cross import cross_weights
from config.checkpoint.weight_maps.mla import mla_weights
from config.checkpoint.weight_maps.mlp import merged_mlp_weights, mlp_weights
from config.checkpoint.weight_maps.moe import moe_weights, other_expert_weights
from config.checkpoint.weight_maps.quantized import quantized_weights
from config.checkpoint.weight_maps.state import (
    gated_delta_weights,
    mamba2_weights,
    short_conv_weights,
)
from config.model.decoder_spec import NORMS, DecoderSpec, IndexerSpec
from config.model.model_config import ModelConfig

INDEXER = "self_attn.indexer"
"""Module path of the indexer in a layer."""
VALUES = 2
"""Index of v among the outputs q, k, v."""


def decoder_weight_map(
    config: ModelConfig, spec: DecoderSpec, *, has_head: bool = True
) -> WeightMap:
    """The weight map of a decoder. The model uses Llama's names; `spec.names` maps the names that
    differ in the checkpoint."""
    hidden, vocab = Axis(config.hidden_size, "hidden_size"), Axis(config.vocab_size, "vocab_size")
    has_own_head = has_head and not config.tie_word_embeddings
    rows = vocab
    if spec.num_further_embeddings:
        count = spec.num_further_embeddings
        rows = Axis(vocab.size + count, f"({vocab.fields} + {count})")
    embedding = matrix("model.embed_tokens.weight", rows, hidden, shard_dim=0)
    outer = [
        embedding._replace(rounds_up=True),
        *_norm_weights("model.norm", hidden, spec),
    ]
    if spec.learned_positions:
        positions = Axis(config.max_position, "max_position_embeddings")
        outer.append(matrix("model.embed_positions.weight", positions, hidden))
    if has_own_head:
        weight = matrix("lm_head.weight", vocab, hidden, shard_dim=0)
        outer.append(weight._replace(normalized=spec.normalized_head, rounds_up=True))
    if has_head and spec.head_bias:
        bias = WeightSpec("lm_head.bias", (vocab.size,), "lm_head.bias", shard_dim=0)
        outer.append(bias._replace(rounds_up=True))
    layers = f"{spec.names.get('model.layers', 'model.layers')}."
    root, head = f"{layers.partition('.')[0]}.", f"{spec.names.get('lm_head', 'lm_head')}."
    ignored = [f"{root}mtp_", f"{root}mtp."]
    ignored += [f"{layers}{config.num_layers + i}." for i in range(config.num_mtp_layers)]
    if not has_own_head:
        ignored.append(f"{head}weight")
    if not has_head:
        ignored.append("score.")
    quantization = config.quantization
    return WeightMap(
        tuple(quantized_weights((_named(weight, spec) for weight in outer), quantization)),
        tuple(
            tuple(
                quantized_weights(
                    (_named(weight, spec) for weight in layer), quantization, f"{layers}{index}."
                )
            )
            for index, layer in enumerate(_decoder_layers(config, spec, hidden))
        ),
        layer_prefix=layers,
        parameter_prefix="model.layers.",
        # Checkpoints without a head may omit the prefix.
        default_prefix=root,
        known_prefixes=(root, head, "score."),
        ignored_prefixes=tuple(ignored),
        ignored_suffixes=(
            ".rotary_emb.inv_freq",
            *spec.unused,
            *(() if quantization is None else quantization.ignored_suffixes),
        ),
        # transformers 5 saves the text model of Qwen3.5 with the multimodal model's prefix.
        renamed=(("model.language_model.", "model."),),
        alternatives=tuple(
            tuple(_named(weight, spec) for weight in group)
            for group in other_expert_weights(config, spec, hidden)
        ),
        is_text_part=config.is_text_part,
        has_tower=config.vision is not None,
    )


def _named(weight: WeightSpec, spec: DecoderSpec) -> WeightSpec:
    module, dot, kind = weight.name.rpartition(".")
    return weight._replace(name=f"{spec.names.get(module, module)}{dot}{kind}")


def _norm_weights(name: str, size: Axis, spec: DecoderSpec) -> Iterator[WeightSpec]:
    weight = WeightSpec(f"{name}.weight", (size.size,), f"{name}.weight")
    yield weight._replace(offset=1.0 if spec.norm_offset else 0.0)
    if spec.norm_bias:
        yield WeightSpec(f"{name}.bias", (size.size,), f"{name}.bias")


def _decoder_layers(
    config: ModelConfig, spec: DecoderSpec, hidden: Axis
) -> Iterator[tuple[WeightSpec, ...]]:
    moe = config.moe
    if spec.merged_mlp:
        assert spec.mlp_size is not None
        inner = Axis(spec.mlp_size, "shared_intermediate_size")
        mlp = merged_mlp_weights(spec.mlp, inner, hidden)
    else:
        size_field = "intermediate_size" if moe is None else moe.fields.dense_size
        inner = Axis(config.intermediate_size, size_field)
        mlp = mlp_weights(spec.mlp, spec.mlp, inner, hidden, spec)
    by_kind = {"mlp": tuple(mlp)}
    if spec.mla is None:
        by_kind["dense"] = tuple(attention_weights(config, spec, hidden))
    else:
        by_kind["mla"] = tuple(mla_weights(config, spec, hidden))
    if spec.moe is not None:
        by_kind["moe"] = tuple(moe_weights(config, spec, hidden))
    if spec.num_cross_layers:
        by_kind["cross"] = tuple(cross_weights(config, hidden))
    if spec.mamba2 is not None:
        by_kind["mamba2"] = tuple(mamba2_weights(spec.mamba2, hidden))
    if spec.gated_delta is not None:
        by_kind["gated_delta"] = tuple(gated_delta_weights(spec.gated_delta, hidden))
    if spec.short_conv is not None:
        by_kind["short_conv"] = tuple(short_conv_weights(spec.short_conv, hidden))
    norms = [
        weight for name in NORMS[spec.arrangement] for weight in _norm_weights(name, hidden, spec)
    ]
    heads = config.num_heads
    indexer = tuple(_indexer_weights(spec.indexer, hidden)) if spec.indexer else ()
    sinks = WeightSpec("self_attn.sinks", (heads,), "self_attn.sinks", shard_dim=0)
    for layer in spec.layers:
        attention = by_kind[layer.attention]
        weights = (
            *norms,
            *(
                weight
                for weight in attention
                if layer.qk_norm or ".qk_norm." not in weight.parameter
            ),
            *((sinks,) if layer.sinks else ()),
            *(indexer if layer.indexed else ()),
            *by_kind[layer.feed_forward],
        )
        yield tuple(map(_transposed, weights)) if spec.transposed else weights


def _transposed(weight: WeightSpec) -> WeightSpec:
    if len(weight.shape) < 2:
        return weight
    fields = " x ".join(reversed(weight.fields.split(" x ")))
    return weight._replace(shape=weight.shape[::-1], fields=fields, transposed=True)


def attention_weights(config: ModelConfig, spec: DecoderSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of dense attention, including its query and key norms."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    query = Axis(heads * head_dim, "num_attention_heads * head_dim")
    gated = Axis(2 * query.size, f"2 * {query.fields}") if spec.attention_gate else query
    key = Axis(kv_heads * head_dim, "num_key_value_heads * head_dim")
    attention = "self_attn"
    yield from row_linear(f"{attention}.o_proj", hidden, query, has_bias=spec.o_bias)
    for weight in linear(
        f"{attention}.qkv_proj",
        {f"{attention}.{n}_proj": axis for n, axis in (("q", gated), ("k", key), ("v", key))},
        hidden,
        has_bias=spec.qkv_bias,
        num_heads=(heads, kv_heads, kv_heads),
        fused=spec.qkv_layout != "separate",
        fused_fields=f"({query.fields} + 2 * {key.fields})",
    ):
        is_rotated = spec.interleaved_rope and weight.outputs != (VALUES,)
        if is_rotated and VALUES in weight.outputs:
            weight = weight._replace(interleaved_outputs=VALUES)
        weight = weight._replace(row_groups=kv_heads if spec.qkv_layout == "grouped" else None)
        yield _interleaved(weight, config, is_rotated)
    if spec.qk_norm not in ("none", "unweighted"):
        yield from _qk_norm_weights(f"{attention}.", config, spec)


def _interleaved(weight: WeightSpec, config: ModelConfig, is_rotated: bool) -> WeightSpec:
    if not is_rotated:
        return weight
    head_dim = config.head_dim
    rotated_size = config.rope.rotated_size(head_dim)
    return weight._replace(interleaved_size=head_dim, rotated_size=rotated_size)


def _qk_norm_weights(prefix: str, config: ModelConfig, spec: DecoderSpec) -> Iterator[WeightSpec]:
    """Tensors of the query and key norms, which share a parameter. A weight that all heads share is
    repeated for each head in the parameter."""
    counts, head_dim = (config.num_heads, config.num_kv_heads), config.head_dim
    of_all, own = spec.qk_norm == "all", spec.qk_norm == "each_head"
    for index, (name, count) in enumerate(zip(("q_norm", "k_norm"), counts, strict=True)):
        shape: tuple[int, ...] = (count * head_dim,) if of_all else (head_dim,)
        weight = WeightSpec(
            f"{prefix}{name}.weight",
            (count, head_dim) if own and not spec.single_head_norms else shape,
            f"{prefix}qk_norm.weight",
            output_sizes=tuple(n * head_dim for n in counts) if of_all else counts,
            outputs=(index,),
            num_heads=counts,
            shard_dim=0,
            repeats=count if spec.qk_norm == "heads" else None,
            offset=1.0 if spec.norm_offset else 0.0,
        )
        weight = weight._replace(interleaved_dim=len(weight.shape) - 1)
        weight = _interleaved(weight, config, spec.interleaved_rope)
        if not spec.single_head_norms:
            yield weight
            continue
        theirs = spec.names.get(f"{prefix}{name}", f"{prefix}{name}")
        for row in range(count):
            yield weight._replace(name=f"{theirs}.norms.{row}.weight", row=row)


def _indexer_weights(spec: IndexerSpec, hidden: Axis) -> Iterator[WeightSpec]:
    """Tensors of the indexer: projections of the index queries and the index key, and their norms,
    whose weights are stored minus 1."""
    size = Axis(spec.head_dim, "index_head_dim")
    query = Axis(spec.num_heads * spec.head_dim, f"index_n_heads * {size.fields}")
    yield matrix(f"{INDEXER}.q_proj.weight", query, hidden, shard_dim=0)._replace(
        output_sizes=(query.size,), outputs=(0,), num_heads=(spec.num_heads,)
    )
    yield matrix(f"{INDEXER}.k_proj.weight", size, hidden)
    for name in ("q_norm", "k_norm"):
        weight = f"{INDEXER}.{name}.weight"
        yield WeightSpec(weight, (size.size,), weight, size.fields, offset=1.0)
