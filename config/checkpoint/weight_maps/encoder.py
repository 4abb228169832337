"""The tensors of encoders of the BERT family, and of heads for classification."""

from collections.abc import Iterator
from typing import NamedTuple

from config.checkpoint.weight_maps.base import (
    Axis,
    WeightMap,
    WeightSpec,
    linear,
    matrix,
    row_linear,
)
from config.model.encoder import BERT, DISTIL_BERT
from config.model.model_config import ModelConfig


class _EncoderNames(NamedTuple):
    """What a family of encoders calls the tensors of a layer."""

    layer_prefix: str
    qkv: tuple[str, str, str]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


_BERT_NAMES = _EncoderNames(
    "encoder.layer.",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_DISTIL_BERT_NAMES = _EncoderNames(
    "transformer.layer.",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


_ENCODER_HEADS = ("cls.", "lm_head.", "vocab_", "pooler.", "classifier.", "pre_classifier.")
"""Heads that were trained with the encoder."""


def encoder_weight_map(config: ModelConfig) -> WeightMap:
    """The tensors of an encoder of the BERT family."""
    encoder = config.encoder
    assert encoder is not None, "a decoder has another weight map"
    names = _DISTIL_BERT_NAMES if encoder.family == DISTIL_BERT else _BERT_NAMES
    hidden = Axis(config.hidden_size, "hidden size")
    num_positions = config.max_position + encoder.first_position
    tables = [
        matrix("word_embeddings.weight", Axis(config.vocab_size, "vocab_size"), hidden),
        matrix(
            "position_embeddings.weight", Axis(num_positions, "max_position_embeddings"), hidden
        ),
    ]
    if encoder.num_types:
        types = Axis(encoder.num_types, "type_vocab_size")
        tables.append(matrix("token_type_embeddings.weight", types, hidden))
    outer = [table._replace(name=f"embeddings.{table.name}") for table in tables]
    outer += _norm("embeddings.LayerNorm", "embedding_norm", hidden)
    return WeightMap(
        tuple(outer),
        (tuple(_encoder_layer(config, names, hidden)),) * config.num_layers,
        layer_prefix=names.layer_prefix,
        parameter_prefix="layers.",
        # In a checkpoint with a head.
        stripped_prefixes=("bert.", "roberta.", "distilbert."),
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
        ignored_prefixes=_ENCODER_HEADS,
        ignored_suffixes=("position_ids", "token_type_ids"),
    )


def _norm(name: str, parameter: str, hidden: Axis) -> Iterator[WeightSpec]:
    for kind in ("weight", "bias"):
        yield WeightSpec(f"{name}.{kind}", (hidden.size,), f"{parameter}.{kind}")


def _encoder_layer(config: ModelConfig, names: _EncoderNames, hidden: Axis) -> Iterator[WeightSpec]:
    inner = Axis(config.intermediate_size, "intermediate size")
    qkv = dict.fromkeys(names.qkv, hidden)
    yield from linear("self_attn.qkv_proj", qkv, hidden, has_bias=True)
    yield from row_linear(names.out, hidden, hidden, has_bias=True, parameter="self_attn.o_proj")
    yield from _norm(names.attention_norm, "attention_norm", hidden)
    yield from linear("up_proj", {names.up: inner}, hidden, has_bias=True)
    yield from row_linear(names.down, hidden, inner, has_bias=True, parameter="down_proj")
    yield from _norm(names.mlp_norm, "mlp_norm", hidden)


def head_weights(config: ModelConfig, num_labels: int) -> Iterator[WeightSpec]:
    """The tensors of the classification head behind an encoder or a decoder, filling `dense` and
    `out`."""
    family = None if config.encoder is None else config.encoder.family
    # A decoder has one matrix without a bias; encoders have two matrices.
    dense, out = {
        None: ("", "score"),
        BERT: ("pooler.dense", "classifier"),
        DISTIL_BERT: ("pre_classifier", "classifier"),
    }.get(family, ("classifier.dense", "classifier.out_proj"))
    hidden = config.hidden_size
    if dense:
        yield WeightSpec(f"{dense}.weight", (hidden, hidden), "dense.weight")
        yield WeightSpec(f"{dense}.bias", (hidden,), "dense.bias")
    yield WeightSpec(f"{out}.weight", (num_labels, hidden), "out.weight", "labels x hidden size")
    if dense:
        yield WeightSpec(f"{out}.bias", (num_labels,), "out.bias")
