"""The tensors of BERT-like encoders, and of classification heads."""

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
from config.model.encoder import BERT, DISTIL_BERT, NOMIC_BERT, EncoderConfig
from config.model.model_config import ModelConfig


class _EncoderNames(NamedTuple):
    """Tensor names of an encoder family."""

    layer_prefix: str
    qkv: tuple[str, ...]
    """Names of q, k and v; a single name for a fused tensor."""
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    gate: str = ""
    embedding_norm: str = "embeddings.LayerNorm"


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
_NOMIC_BERT_NAMES = _EncoderNames(
    "encoder.layers.",
    ("attn.Wqkv",),
    "attn.out_proj",
    "norm1",
    "mlp.fc11",
    "mlp.fc2",
    "norm2",
    "mlp.fc12",
    "emb_ln",
)
_NAMES = {DISTIL_BERT: _DISTIL_BERT_NAMES, NOMIC_BERT: _NOMIC_BERT_NAMES}
"""Family -> names; other families have _BERT_NAMES."""


_ENCODER_HEADS = ("cls.", "lm_head.", "vocab_", "pooler.", "classifier.", "pre_classifier.")
"""Prefixes of pretraining and classification heads, which the encoder does not load; for the
classification head see `head_weights`."""


def encoder_weight_map(config: ModelConfig) -> WeightMap:
    """The tensors of an encoder of the BERT family."""
    encoder = config.encoder
    assert encoder is not None, "a decoder has another weight map"
    names = _NAMES.get(encoder.family, _BERT_NAMES)
    hidden = Axis(config.hidden_size, "hidden size")
    num_positions = config.max_position + encoder.first_position
    tables = [matrix("word_embeddings.weight", Axis(config.vocab_size, "vocab_size"), hidden)]
    if not encoder.has_rope:
        positions = Axis(num_positions, "max_position_embeddings")
        tables.append(matrix("position_embeddings.weight", positions, hidden))
    if encoder.num_types:
        types = Axis(encoder.num_types, "type_vocab_size")
        tables.append(matrix("token_type_embeddings.weight", types, hidden))
    outer = [table._replace(name=f"embeddings.{table.name}") for table in tables]
    outer += _norm(names.embedding_norm, "embedding_norm", hidden)
    return WeightMap(
        tuple(outer),
        (tuple(_encoder_layer(config, encoder, names, hidden)),) * config.num_layers,
        layer_prefix=names.layer_prefix,
        parameter_prefix="layers.",
        # Prefixes in a checkpoint with a head.
        stripped_prefixes=("bert.", "roberta.", "distilbert.", "nomic_bert."),
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
        ignored_prefixes=_ENCODER_HEADS,
        ignored_suffixes=("position_ids", "token_type_ids"),
    )


def _norm(name: str, parameter: str, hidden: Axis) -> Iterator[WeightSpec]:
    for kind in ("weight", "bias"):
        yield WeightSpec(f"{name}.{kind}", (hidden.size,), f"{parameter}.{kind}")


def _encoder_layer(
    config: ModelConfig, encoder: EncoderConfig, names: _EncoderNames, hidden: Axis
) -> Iterator[WeightSpec]:
    inner, has_bias = Axis(config.intermediate_size, "intermediate size"), encoder.has_biases
    fused = len(names.qkv) == 1
    outputs = ("query", "key", "value") if fused else names.qkv
    for weight in linear(
        "self_attn.qkv_proj",
        dict.fromkeys(outputs, hidden),
        hidden,
        has_bias=has_bias,
        fused=fused,
        fused_fields=f"3 * {hidden.fields}",
    ):
        yield weight._replace(name=f"{names.qkv[0]}.weight") if fused else weight
    yield from row_linear(
        names.out, hidden, hidden, has_bias=has_bias, parameter="self_attn.o_proj"
    )
    yield from _norm(names.attention_norm, "attention_norm", hidden)
    if encoder.is_gated:
        gate_up = {names.gate: inner, names.up: inner}
        yield from linear("mlp.gate_up_proj", gate_up, hidden, has_bias=has_bias)
    else:
        yield from linear("mlp.up_proj", {names.up: inner}, hidden, has_bias=has_bias)
    yield from row_linear(names.down, hidden, inner, has_bias=has_bias, parameter="mlp.down_proj")
    yield from _norm(names.mlp_norm, "mlp_norm", hidden)


def head_weights(config: ModelConfig, num_labels: int) -> Iterator[WeightSpec]:
    """The tensors of the classification head of an encoder (`dense` and `out`) or a decoder
    (`out`)."""
    family = None if config.encoder is None else config.encoder.family
    # A decoder's head is a single matrix without a bias; an encoder's head has two matrices.
    dense, out = {
        None: ("", "score"),
        BERT: ("pooler.dense", "classifier"),
        NOMIC_BERT: ("pooler.dense", "classifier"),
        DISTIL_BERT: ("pre_classifier", "classifier"),
    }.get(family, ("classifier.dense", "classifier.out_proj"))
    hidden = config.hidden_size
    if dense:
        yield WeightSpec(f"{dense}.weight", (hidden, hidden), "dense.weight")
        yield WeightSpec(f"{dense}.bias", (hidden,), "dense.bias")
    yield WeightSpec(f"{out}.weight", (num_labels, hidden), "out.weight", "labels x hidden size")
    if dense:
        yield WeightSpec(f"{out}.bias", (num_labels,), "out.bias")
