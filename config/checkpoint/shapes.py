"""What config.json says of a model's sizes, compared with the shapes of the tensors in its files:
before anything is built, so that no size is allocated that the files do not have. Reads no weights.
"""

import re
from pathlib import Path
from typing import NamedTuple

from config.checkpoint.safetensors_files import Shapes, folder_shapes
from config.errors import ConfigError
from config.model.encoder import BERT, DISTIL_BERT
from config.model.model_config import MAX_LAYERS, ModelConfig
from config.model.pooler import PoolerConfig

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Granite", "Phi3")
"""Decoders whose tensors are compared; a test holds them equal to those of hpu/models/."""

_ENDINGS = re.compile("(ForCausalLM|ForSequenceClassification|Model)$")
_ENCODER_PREFIXES = ("bert.", "roberta.", "distilbert.")
_DECODER_PREFIXES = ("model.", "lm_head.", "score.")


class _Wanted(NamedTuple):
    """A tensor that a checkpoint must hold, and the fields that its shape comes from."""

    name: str
    shape: tuple[int, ...]
    fields: str


class _Layout(NamedTuple):
    """Tensors outside the layers, the prefix of the layers' names, and the tensors of each."""

    whole: list[_Wanted]
    prefix: str
    layer: list[_Wanted]


def check_weights(facts: ModelConfig, pooler: PoolerConfig | None) -> None:
    """Raise ConfigError unless the sizes in the config.json of folder `facts.path`, and those of
    the modules behind the model, are the sizes of the tensors in their files."""
    shapes = folder_shapes(Path(facts.path))
    check_shapes(facts, shapes, Path(facts.path, "config.json"))
    if pooler is None:
        return
    if pooler.has_head:
        name = _head_name(facts)
        size = (pooler.facts.width, facts.hidden_size)
        wanted = _Wanted(name, size, "labels x hidden size")
        _check(wanted, name, shapes, Path(facts.path, "config.json"))
    for dense in pooler.dense:
        size = (dense.out_size, dense.in_size)
        wanted = _Wanted("linear.weight", size, "out_features x in_features")
        _check(
            wanted,
            wanted.name,
            folder_shapes(Path(dense.folder)),
            Path(dense.folder, "config.json"),
        )


def check_shapes(facts: ModelConfig, stored: Shapes, source: Path) -> None:
    """Raise ConfigError unless the sizes that `source` gives (`facts`) are those of the tensors
    `stored`. An architecture that is not built here passes: a worker refuses it by its name."""
    is_encoder = facts.encoder is not None
    shapes = {_own_name(name, is_encoder): shape for name, shape in stored.items()}
    layout = _encoder_layout(facts) if is_encoder else _decoder_layout(facts)
    if layout is None:
        return
    num_layers = _num_layers(shapes, layout.prefix)
    if facts.num_layers != num_layers:
        raise ConfigError(f"{source} says {facts.num_layers} layers, the files have {num_layers}")
    if num_layers > MAX_LAYERS:
        raise ConfigError(f"{source} says {num_layers} layers, at most {MAX_LAYERS} are built")
    for wanted in layout.whole:
        _check(wanted, wanted.name, shapes, source)
    for index in range(num_layers):
        for wanted in layout.layer:
            _check(wanted, f"{layout.prefix}{index}.{wanted.name}", shapes, source)


def _own_name(name: str, is_encoder: bool) -> str:
    """One name for a tensor, whether its checkpoint has a head (and so a prefix) or not."""
    if is_encoder:
        return next((name[len(p) :] for p in _ENCODER_PREFIXES if name.startswith(p)), name)
    return name if name.startswith(_DECODER_PREFIXES) else f"model.{name}"


def _head_name(facts: ModelConfig) -> str:
    if facts.encoder is None:
        return "score.weight"
    if facts.encoder.family in (BERT, DISTIL_BERT):
        return "classifier.weight"
    return "classifier.out_proj.weight"


def _num_layers(shapes: Shapes, prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"([0-9]{1,9})\.")
    found = (pattern.match(name) for name in shapes)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _check(wanted: _Wanted, name: str, shapes: Shapes, source: Path) -> None:
    shape = shapes.get(name)
    says = f"{source} says {_written(wanted.shape)} ({wanted.fields}) for {name}"
    if shape is None:
        raise ConfigError(f"{says}, the files have no such tensor")
    if shape != wanted.shape:
        raise ConfigError(f"{says}, the files have {_written(shape)}")


def _written(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "one number"


def _decoder_layout(facts: ModelConfig) -> _Layout | None:
    family = _ENDINGS.sub("", facts.architecture)
    if family not in FAMILIES:
        return None
    hidden, inner = facts.hidden_size, facts.intermediate_size
    query, key = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    queries, keys = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
    features = "intermediate_size"
    layer = [
        _Wanted("self_attn.o_proj.weight", (hidden, query), f"hidden_size x {queries}"),
        _Wanted("mlp.down_proj.weight", (hidden, inner), f"hidden_size x {features}"),
    ]
    if family == "Phi3":
        all_heads = f"({queries} + 2 * {keys})"
        layer += [
            _Wanted(
                "self_attn.qkv_proj.weight", (query + 2 * key, hidden), f"{all_heads} x hidden_size"
            ),
            _Wanted(
                "mlp.gate_up_proj.weight", (2 * inner, hidden), f"2 * {features} x hidden_size"
            ),
        ]
    else:
        layer += [
            _Wanted("self_attn.q_proj.weight", (query, hidden), f"{queries} x hidden_size"),
            _Wanted("self_attn.k_proj.weight", (key, hidden), f"{keys} x hidden_size"),
            _Wanted("self_attn.v_proj.weight", (key, hidden), f"{keys} x hidden_size"),
            _Wanted("mlp.gate_proj.weight", (inner, hidden), f"{features} x hidden_size"),
            _Wanted("mlp.up_proj.weight", (inner, hidden), f"{features} x hidden_size"),
        ]
    table = (facts.vocab_size, hidden)
    whole = [_Wanted("model.embed_tokens.weight", table, "vocab_size x hidden_size")]
    if facts.architecture.endswith("ForCausalLM") and not facts.tie_word_embeddings:
        whole.append(_Wanted("lm_head.weight", table, "vocab_size x hidden_size"))
    return _Layout(whole, "model.layers.", layer)


def _encoder_layout(facts: ModelConfig) -> _Layout:
    encoder = facts.encoder
    assert encoder is not None, "a decoder has another layout"
    hidden, inner = facts.hidden_size, facts.intermediate_size
    tables = [
        ("word", facts.vocab_size, "vocab_size"),
        ("position", facts.max_position + encoder.first_position, "max_position_embeddings"),
    ]
    if encoder.num_types:
        tables.append(("token_type", encoder.num_types, "type_vocab_size"))
    whole = [
        _Wanted(f"embeddings.{name}_embeddings.weight", (rows, hidden), f"{field} x hidden size")
        for name, rows, field in tables
    ]
    if encoder.family == DISTIL_BERT:
        prefix, query, up = "transformer.layer.", "attention.q_lin", "ffn.lin1"
    else:
        prefix, query, up = "encoder.layer.", "attention.self.query", "intermediate.dense"
    layer = [
        _Wanted(f"{query}.weight", (hidden, hidden), "hidden size x hidden size"),
        _Wanted(f"{up}.weight", (inner, hidden), "intermediate size x hidden size"),
    ]
    return _Layout(whole, prefix, layer)
