"""The tensors of EAGLE and MTP drafters, in vLLM's layout."""

from collections.abc import Iterable
from dataclasses import replace

from config.checkpoint.weight_maps.base import Axis, WeightMap, WeightSpec, matrix
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig

FIRST_LAYER = "model.layers.0."


def eagle_weight_map(config: ModelConfig, spec: DecoderSpec) -> WeightMap:
    """Weight map of an EAGLE drafter: a projection and decoder layers. The first layer has no input
    norm, and there is no final norm. The embedding and the head are the target's."""
    hidden = Axis(config.hidden_size, "hidden_size")
    both = Axis(2 * hidden.size, "2 * hidden_size")
    layers = decoder_weight_map(config, spec, has_head=False)
    first = tuple(
        weight for weight in layers.layers[0] if not weight.name.startswith("input_layernorm.")
    )
    return _outside_of_target(
        replace(layers, layers=(first, *layers.layers[1:])), [_linear("fc", hidden, both)]
    )


def eagle3_weight_map(
    config: ModelConfig, spec: DecoderSpec, *, target_hidden: int, draft_vocab: int
) -> WeightMap:
    """Weight map of an EAGLE-3 drafter: a projection of three hidden states, a layer that reads
    concatenated embeddings and hidden states, a norm, and a head over the most frequent tokens."""
    hidden = Axis(config.hidden_size, "hidden_size")
    three = Axis(3 * target_hidden, "3 * hidden_size of the target")
    both = Axis(2 * hidden.size, "2 * hidden_size")
    layers = decoder_weight_map(config, spec, has_head=False)
    first = [
        weight._replace(
            shape=(weight.shape[0], both.size),
            fields=f"{weight.fields.partition(' x ')[0]} x {both.fields}",
        )
        if weight.parameter == "self_attn.qkv_proj.weight"
        else weight
        for weight in layers.layers[0]
    ]
    first.append(WeightSpec("hidden_norm.weight", (hidden.size,), "hidden_norm.weight"))
    norm = WeightSpec("model.norm.weight", (hidden.size,), "norm.weight")
    vocab = Axis(draft_vocab, "draft_vocab_size")
    head = matrix("lm_head.weight", vocab, hidden, shard_dim=0)._replace(rounds_up=True)
    found = _outside_of_target(
        replace(layers, layers=(tuple(first),), renamed=(("midlayer.", "layers.0."),)),
        [_linear("fc", hidden, three), norm, head],
    )
    kept = tuple(prefix for prefix in found.ignored_prefixes if prefix != "lm_head.weight")
    # d2t and t2d map between draft tokens and target tokens; d2t is read separately.
    return replace(found, ignored_prefixes=(*kept, "model.d2t", "model.t2d"))


def mtp_weight_map(config: ModelConfig, spec: DecoderSpec) -> WeightMap:
    """Weight map of an MTP drafter: the last layer of `config`, which follows the target's layers
    in its checkpoint. The embedding and the head are the target's; the copies in the layer are
    ignored."""
    hidden = Axis(config.hidden_size, "hidden_size")
    both = Axis(2 * hidden.size, "2 * hidden_size")
    layers = decoder_weight_map(config, spec, has_head=False)
    path = f"model.layers.{config.num_layers - 1}."
    own = [
        WeightSpec(f"{path}enorm.weight", (hidden.size,), "enorm.weight"),
        WeightSpec(f"{path}hnorm.weight", (hidden.size,), "hnorm.weight"),
        WeightSpec(f"{path}shared_head.norm.weight", (hidden.size,), "norm.weight"),
        matrix(f"{path}eh_proj.weight", hidden, both)._replace(parameter="fc.weight"),
    ]
    return replace(
        layers,
        outer=(*layers.outer, *own),
        ignored_suffixes=(
            *layers.ignored_suffixes,
            *(f"{path}embed_tokens.weight", f"{path}shared_head.head.weight"),
        ),
    )


def _linear(name: str, rows: Axis, columns: Axis) -> WeightSpec:
    return matrix(f"model.{name}.weight", rows, columns)._replace(parameter=f"{name}.weight")


def _outside_of_target(layers: WeightMap, outer: Iterable[WeightSpec]) -> WeightMap:
    """`layers` with the outer tensors `outer`, for a checkpoint that may repeat the target's
    embedding."""
    ignored = (*layers.ignored_prefixes, "model.embed_tokens.weight")
    return replace(layers, outer=tuple(outer), ignored_prefixes=ignored)
