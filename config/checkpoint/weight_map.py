"""WeightMap: which tensors a checkpoint holds, and which parameter of the model each one fills.

Declared once, without torch: for the loader, the size estimate and the check of a checkpoint's
shapes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from config.model.architectures import DecoderSpec
from config.model.encoder import BERT, DISTIL_BERT
from config.model.model_config import ModelConfig


class WeightSpec(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    """Path of the parameter, which several tensors may fill."""
    fields: str = ""
    """The fields of config.json that `shape` comes from; empty: the shape is not compared with the
    files before the model is built."""
    output_sizes: tuple[int, ...] = ()
    """Of a parameter that merges several outputs along its first dimension: their sizes."""
    outputs: tuple[int, ...] = ()
    """Which of `output_sizes` the tensor holds."""
    num_heads: tuple[int, ...] = ()
    """Heads of each output, where they consist of heads: of fewer heads than ranks, each is on
    several ranks."""
    shard_dim: int | None = None
    """The dimension of the parameter that tensor parallelism divides; None: every rank holds the
    whole."""
    repeats: int | None = None
    """How often the tensor is repeated along a new first dimension; None: there is none."""

    def num_shards(self, output: int, num_ranks: int) -> int:
        """How many different shards of `output` there are on so many ranks, in the order of the
        ranks."""
        return min(num_ranks, self.num_heads[output]) if self.num_heads else num_ranks

    def num_elements(self, num_ranks: int = 1) -> int:
        """Of the parameter, those that the tensor fills on each of so many ranks."""
        total = math.prod(self.shape) * (self.repeats or 1)
        if self.shard_dim is None:
            return total
        if not self.outputs:
            return total // num_ranks
        row = total // sum(self.output_sizes[output] for output in self.outputs)
        return sum(
            row * self.output_sizes[output] // self.num_shards(output, num_ranks)
            for output in self.outputs
        )


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The tensors of a model, with all names as `map_name` gives them."""

    outer: tuple[WeightSpec, ...]
    """Outside the layers."""
    layers: tuple[tuple[WeightSpec, ...], ...] = ()
    """Of each layer, names and parameters relative to the two prefixes below."""
    layer_prefix: str = ""
    """Before the layer's index in the checkpoint, such as `model.layers.`."""
    parameter_prefix: str = ""
    """Before the layer's index in the model."""
    stripped_prefixes: tuple[str, ...] = ()
    """Prefixes that a checkpoint may put before every name."""
    default_prefix: str = ""
    """Put before a name that begins with none of `known_prefixes`."""
    known_prefixes: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """(old, new) parts of names in early checkpoints."""
    ignored_prefixes: tuple[str, ...] = ()
    """Of tensors that a checkpoint may hold and the model does not need."""
    ignored_suffixes: tuple[str, ...] = ()

    def entries(self) -> Iterator[WeightSpec]:
        """Every tensor that a checkpoint must hold."""
        yield from self.outer
        for index, layer in enumerate(self.layers):
            name, parameter = f"{self.layer_prefix}{index}.", f"{self.parameter_prefix}{index}."
            for spec in layer:
                yield spec._replace(name=name + spec.name, parameter=parameter + spec.parameter)

    def map_name(self, name: str) -> str:
        """The name in this map of the tensor that a checkpoint calls `name`."""
        for prefix in self.stripped_prefixes:
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        for old, new in self.renamed:
            name = name.replace(old, new)
        if self.default_prefix and not name.startswith(self.known_prefixes):
            name = self.default_prefix + name
        return name

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold `name`, as mapped, though the model does not need it."""
        return name.startswith(self.ignored_prefixes) or name.endswith(self.ignored_suffixes)

    def tensor_names(self) -> dict[str, list[str]]:
        """The tensors that fill each parameter, in the order of its outputs."""
        names: dict[str, list[str]] = {}
        for spec in self.entries():
            names.setdefault(spec.parameter, []).append(spec.name)
        return names


class _Axis(NamedTuple):
    """A size, and the fields of config.json that it comes from."""

    size: int
    fields: str


def _matrix(name: str, rows: _Axis, columns: _Axis, *, shard_dim: int | None = None) -> WeightSpec:
    fields = f"{rows.fields} x {columns.fields}"
    return WeightSpec(name, (rows.size, columns.size), name, fields, shard_dim=shard_dim)


def _linear(
    parameter: str,
    tensors: Mapping[str, _Axis],
    columns: _Axis,
    *,
    has_bias: bool,
    num_heads: tuple[int, ...] = (),
    fused: bool = False,
    fused_fields: str = "",
) -> Iterator[WeightSpec]:
    """The tensors of a column-parallel linear layer that merges the outputs named by `tensors`; one
    tensor called `parameter` for all of them if the checkpoint has them `fused`."""
    sizes = tuple(axis.size for axis in tensors.values())
    parts: dict[str, tuple[_Axis, tuple[int, ...]]] = {
        name: (axis, (index,)) for index, (name, axis) in enumerate(tensors.items())
    }
    if fused:
        parts = {parameter: (_Axis(sum(sizes), fused_fields), tuple(range(len(sizes))))}
    for name, (rows, outputs) in parts.items():
        specs = [_matrix(f"{name}.weight", rows, columns)._replace(parameter=f"{parameter}.weight")]
        if has_bias:
            specs.append(WeightSpec(f"{name}.bias", (rows.size,), f"{parameter}.bias"))
        for spec in specs:
            yield spec._replace(
                output_sizes=sizes, outputs=outputs, num_heads=num_heads, shard_dim=0
            )


def _row_linear(
    name: str, rows: _Axis, columns: _Axis, *, has_bias: bool, parameter: str = ""
) -> Iterator[WeightSpec]:
    """The tensors of a row-parallel linear layer."""
    parameter = parameter or name
    weight = _matrix(f"{name}.weight", rows, columns, shard_dim=1)
    yield weight._replace(parameter=f"{parameter}.weight")
    if has_bias:
        yield WeightSpec(f"{name}.bias", (rows.size,), f"{parameter}.bias")


def decoder_weight_map(
    config: ModelConfig, spec: DecoderSpec, *, has_head: bool = True
) -> WeightMap:
    """The tensors of a decoder, under the names of Llama, which are also the model's own."""
    hidden, vocab = _Axis(config.hidden_size, "hidden_size"), _Axis(config.vocab_size, "vocab_size")
    has_own_head = has_head and not config.tie_word_embeddings
    outer = [
        _matrix("model.embed_tokens.weight", vocab, hidden, shard_dim=0),
        WeightSpec("model.norm.weight", (hidden.size,), "model.norm.weight"),
    ]
    if has_own_head:
        outer.append(_matrix("lm_head.weight", vocab, hidden, shard_dim=0))
    ignored = () if has_own_head else ("lm_head.weight",)
    return WeightMap(
        tuple(outer),
        (tuple(_decoder_layer(config, spec, hidden)),) * config.num_layers,
        layer_prefix="model.layers.",
        parameter_prefix="model.layers.",
        # Checkpoints without a head leave the prefix out.
        default_prefix="model.",
        known_prefixes=("model.", "lm_head.", "score."),
        ignored_prefixes=ignored if has_head else (*ignored, "score."),
        ignored_suffixes=(".rotary_emb.inv_freq",),
    )


def _decoder_layer(config: ModelConfig, spec: DecoderSpec, hidden: _Axis) -> Iterator[WeightSpec]:
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    query = _Axis(heads * head_dim, "num_attention_heads * head_dim")
    key = _Axis(kv_heads * head_dim, "num_key_value_heads * head_dim")
    inner = _Axis(config.intermediate_size, "intermediate_size")
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield WeightSpec(name, (hidden.size,), name)
    attention = "self_attn"
    yield from _row_linear(f"{attention}.o_proj", hidden, query, has_bias=spec.o_bias)
    yield from _row_linear("mlp.down_proj", hidden, inner, has_bias=spec.mlp_bias)
    yield from _linear(
        f"{attention}.qkv_proj",
        {f"{attention}.{n}_proj": axis for n, axis in (("q", query), ("k", key), ("v", key))},
        hidden,
        has_bias=spec.qkv_bias,
        num_heads=(heads, kv_heads, kv_heads),
        fused=spec.fused_weights,
        fused_fields=f"({query.fields} + 2 * {key.fields})",
    )
    yield from _linear(
        "mlp.gate_up_proj",
        {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        hidden,
        has_bias=spec.mlp_bias,
        fused=spec.fused_weights,
        fused_fields=f"2 * {inner.fields}",
    )
    if spec.qk_norm:
        # Queries and keys are normed at once: a row of the parameter for each of their heads.
        for index, (name, count) in enumerate((("q_norm", heads), ("k_norm", kv_heads))):
            yield WeightSpec(
                f"{attention}.{name}.weight",
                (head_dim,),
                f"{attention}.qk_norm.weight",
                output_sizes=(heads, kv_heads),
                outputs=(index,),
                num_heads=(heads, kv_heads),
                shard_dim=0,
                repeats=count,
            )


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
    hidden = _Axis(config.hidden_size, "hidden size")
    num_positions = config.max_position + encoder.first_position
    tables = [
        _matrix("word_embeddings.weight", _Axis(config.vocab_size, "vocab_size"), hidden),
        _matrix(
            "position_embeddings.weight", _Axis(num_positions, "max_position_embeddings"), hidden
        ),
    ]
    if encoder.num_types:
        types = _Axis(encoder.num_types, "type_vocab_size")
        tables.append(_matrix("token_type_embeddings.weight", types, hidden))
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


def _norm(name: str, parameter: str, hidden: _Axis) -> Iterator[WeightSpec]:
    for kind in ("weight", "bias"):
        yield WeightSpec(f"{name}.{kind}", (hidden.size,), f"{parameter}.{kind}")


def _encoder_layer(
    config: ModelConfig, names: _EncoderNames, hidden: _Axis
) -> Iterator[WeightSpec]:
    inner = _Axis(config.intermediate_size, "intermediate size")
    qkv = dict.fromkeys(names.qkv, hidden)
    yield from _linear("self_attn.qkv_proj", qkv, hidden, has_bias=True)
    yield from _row_linear(names.out, hidden, hidden, has_bias=True, parameter="self_attn.o_proj")
    yield from _norm(names.attention_norm, "attention_norm", hidden)
    yield from _linear("up_proj", {names.up: inner}, hidden, has_bias=True)
    yield from _row_linear(names.down, hidden, inner, has_bias=True, parameter="down_proj")
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
