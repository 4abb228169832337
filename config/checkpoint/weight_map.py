"""WeightMap: which tensors a checkpoint holds, and which parameter of the model each one fills.

Declared once, without torch: for the loader, the size estimate and the check of a checkpoint's
shapes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from config.model.decoder_spec import DecoderSpec, MoESpec
from config.model.encoder import BERT, DISTIL_BERT
from config.model.model_config import ModelConfig

VALUES = 2
"""Index of the values among the outputs of queries, keys and values."""


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
    expert: int | None = None
    """Of a parameter that stacks experts along its first dimension: which one the tensor holds. The
    fields above then describe one expert."""
    num_experts: int | None = None
    """Of such a parameter, if the tensor holds all experts, stacked likewise: how many."""
    interleaved_size: int | None = None
    """Of a tensor of heads whose neighbouring rows are rotated together: rows of a head. In the
    parameter those are in its two halves."""
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
    config: ModelConfig, spec: DecoderSpec, hidden: _Axis
) -> tuple[tuple[WeightSpec, ...], ...]:
    inner = _Axis(config.intermediate_size, "intermediate_size")
    dense = (*_attention(config, spec, hidden), *_mlp("mlp", "mlp", inner, hidden, spec))
    by_kind = {"mlp": dense, "moe": dense}
    if spec.moe is not None:
        by_kind["moe"] = (*_attention(config, spec, hidden), *_moe(config, spec, hidden))
    return tuple(by_kind[layer.feed_forward] for layer in spec.layers)


def _attention(config: ModelConfig, spec: DecoderSpec, hidden: _Axis) -> Iterator[WeightSpec]:
    """Attention, and the norms of the layer."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    query = _Axis(heads * head_dim, "num_attention_heads * head_dim")
    key = _Axis(kv_heads * head_dim, "num_key_value_heads * head_dim")
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield WeightSpec(name, (hidden.size,), name)
    attention = "self_attn"
    yield from _row_linear(f"{attention}.o_proj", hidden, query, has_bias=spec.o_bias)
    for weight in _linear(
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
    if spec.qk_norm == "none":
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


def _mlp(
    name: str, parameter: str, inner: _Axis, hidden: _Axis, spec: DecoderSpec
) -> Iterator[WeightSpec]:
    """A gated MLP that the checkpoint calls `name`."""
    down, has_bias = "down_proj", spec.mlp_bias
    yield from _row_linear(
        f"{name}.{down}", hidden, inner, has_bias=has_bias, parameter=f"{parameter}.{down}"
    )
    yield from _linear(
        f"{parameter}.gate_up_proj",
        {f"{name}.gate_proj": inner, f"{name}.up_proj": inner},
        hidden,
        has_bias=has_bias,
        fused=spec.fused_weights,
        fused_fields=f"2 * {inner.fields}",
    )


def _moe(config: ModelConfig, spec: DecoderSpec, hidden: _Axis) -> Iterator[WeightSpec]:
    """Router, routed experts and shared expert."""
    moe, names = config.moe, spec.moe
    assert moe is not None and names is not None
    experts = _Axis(moe.num_experts, moe.fields.num_experts)
    gate = _matrix(f"{names.block}.{names.gate}.weight", experts, hidden)
    yield gate._replace(parameter="mlp.gate.weight")
    if names.correction_bias:
        yield WeightSpec(
            f"{names.block}.{names.correction_bias}",
            (*names.correction_rows, experts.size),
            "mlp.e_score_correction_bias",
        )
    inner = _Axis(moe.inner_size, moe.fields.inner_size)
    shared = _Axis(moe.shared_size, moe.shared_fields)
    if names.merged:
        yield from _merged_experts(names.block, experts, shared, hidden, inner)
        return
    for expert in range(moe.num_experts):
        yield from _expert(expert, names, hidden, inner)
    if shared.size:
        name = f"{names.block}.{names.shared}"
        yield from _mlp(name, "mlp.shared_experts", shared, hidden, spec)
    if shared.size and names.shared_gate:
        weight = _matrix(f"{names.block}.{names.shared_gate}.weight", _Axis(1, "1"), hidden)
        yield weight._replace(parameter="mlp.shared_expert_gate.weight")


def _expert(expert: int, names: MoESpec, hidden: _Axis, inner: _Axis) -> Iterator[WeightSpec]:
    """The tensors of one routed expert."""
    gate, up, down = names.projections
    prefix = f"{names.block}.experts.{expert}"
    for output, name in enumerate((gate, up)):
        yield _matrix(f"{prefix}.{name}.weight", inner, hidden)._replace(
            parameter="mlp.experts.w13_weight",
            output_sizes=(inner.size, inner.size),
            outputs=(output,),
            shard_dim=0,
            expert=expert,
        )
    yield _matrix(f"{prefix}.{down}.weight", hidden, inner)._replace(
        parameter="mlp.experts.w2_weight", shard_dim=1, expert=expert
    )


def _merged_experts(
    block: str, experts: _Axis, shared: _Axis, hidden: _Axis, inner: _Axis
) -> Iterator[WeightSpec]:
    """Two tensors for all routed experts, and two for the shared one if it has a size."""
    up, down = "input_linear.weight", "output_linear.weight"
    merged = _merged(f"{block}.{up}", "mlp.experts.w13_weight", inner, hidden)
    plain = _matrix(f"{block}.{down}", hidden, inner, shard_dim=1)
    for spec in (merged, plain._replace(parameter="mlp.experts.w2_weight")):
        yield spec._replace(
            shape=(experts.size, *spec.shape),
            fields=f"{experts.fields} x {spec.fields}",
            num_experts=experts.size,
        )
    if shared.size:
        yield _merged(f"shared_mlp.{up}", "mlp.shared_experts.gate_up_proj.weight", shared, hidden)
        plain = _matrix(f"shared_mlp.{down}", hidden, shared, shard_dim=1)
        yield plain._replace(parameter="mlp.shared_experts.down_proj.weight")


def _merged(name: str, parameter: str, inner: _Axis, hidden: _Axis) -> WeightSpec:
    """Gate and up of an MLP in one tensor."""
    rows = _Axis(2 * inner.size, f"2 * {inner.fields}")
    return _matrix(name, rows, hidden, shard_dim=0)._replace(
        parameter=parameter, output_sizes=(inner.size, inner.size), outputs=(0, 1)
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
