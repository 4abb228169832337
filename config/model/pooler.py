"""How a model's hidden states become vectors: from its files, and from what the operator set.
Knows no tensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.json_fields import MAX_COUNT, Fields, Json, read_json, shown
from config.model.model_config import ModelConfig
from config.model.sentence_transformers import (
    CLS,
    LAST,
    MODES,
    DenseConfig,
    SentenceConfig,
    read_sentence_config,
)
from config.params.pooling import CLASSIFY, EMBED, SCORE, TOKEN_EMBED, PoolingFacts

SIGMOID, SOFTMAX, IDENTITY = "sigmoid", "softmax", "identity"
_OF_TORCH = {"Sigmoid": SIGMOID, "Softmax": SOFTMAX, "Identity": IDENTITY}
_OF_PROBLEM = {
    "regression": IDENTITY,
    "single_label_classification": SOFTMAX,
    "multi_label_classification": SIGMOID,
}
MAX_LABELS = 2**20
"""Each has a name, even if the checkpoint gives none."""
CLASSIFIER = "ForSequenceClassification"
GENERATOR = "ForCausalLM"

_NORMALIZE = ("normalize", "use_activation", "activation", "softmax")
_TYPES = ("pooling_type", "seq_pooling_type")
_TRUNCATIONS = ("is_matryoshka", "matryoshka_dimensions")


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """What comes behind the last layer, and what front-ends are told of it."""

    modes: tuple[str, ...]
    """Of config.sentence_files.MODES; the vectors of several stand one behind the other."""
    facts: PoolingFacts
    dense: tuple[DenseConfig, ...] = ()
    has_head: bool = False
    """Whether a classification head takes the place of a vector."""
    activation: str = IDENTITY
    """What makes the head's logits numbers between 0 and 1."""
    max_tokens: int | None = None
    """Tokens of the longest text that sentence-transformers reads; None: as many as fit."""


def choose_pooler(config: EngineConfig, model: ModelConfig) -> PoolerConfig | None:
    """None for a model that generates; raises ConfigError where settings and files disagree.

    A model gives vectors if it is told to, if its architecture has no output head for tokens, or if
    sentence-transformers' files lie beside it.
    """
    architecture = model.architecture
    sentence = read_sentence_config(model.path)
    generates = architecture.endswith(GENERATOR)
    runner = config.runner
    if runner == "auto":
        runner = "generate" if generates and sentence is None else "pooling"
    if runner == "generate":
        if not generates:
            raise ConfigError(
                f"runner is 'generate', and {model.path} is a {architecture}, which gives vectors "
                "and no tokens: set --runner to auto or pooling"
            )
        return None
    if generates and config.convert == "none":
        raise ConfigError(
            f"runner is 'pooling' and convert is 'none', and {model.path} is a {architecture}: "
            "it gives tokens unless it is converted (--convert embed)"
        )
    if not model.is_causal and model.sliding_window is not None:
        raise ConfigError(f"{model.path} has a sliding window without being causal: not built here")
    asked = _asked(config.pooler_config)
    if architecture.endswith(CLASSIFIER) and config.convert != "embed":
        return _classifier(model, asked)
    return _embedder(model, asked, sentence)


def _embedder(model: ModelConfig, asked: Fields, sentence: SentenceConfig | None) -> PoolerConfig:
    default = SentenceConfig(
        modes=(CLS if model.encoder else LAST,),
        includes_prompt=True,
        dense=(),
        normalizes=True,
        max_tokens=None,
        lowers_case=False,
        similarity="cosine",
        default_prompt=None,
    )
    found = sentence or default
    mode = _asked_mode(asked)
    if mode is not None:
        found = replace(found, modes=(mode,))
    normalizes = _asked_switch(asked)
    width = model.hidden_size * len(found.modes)
    for dense in found.dense:
        if dense.in_size != width:
            raise ConfigError(
                f"{dense.folder} takes vectors of {dense.in_size} numbers, it is given {width}"
            )
        width = dense.out_size
    facts = PoolingFacts(
        tasks=(EMBED, TOKEN_EMBED),
        width=width,
        token_width=model.hidden_size,
        normalizes=found.normalizes if normalizes is None else normalizes,
        dimensions=_dimensions(model, asked),
        similarity=found.similarity,
        prompts=found.prompts,
        default_prompt=found.default_prompt,
        includes_prompt=found.includes_prompt,
        lowers_case=found.lowers_case,
    )
    return PoolerConfig(found.modes, facts, found.dense, max_tokens=found.max_tokens)


def _classifier(model: ModelConfig, asked: Fields) -> PoolerConfig:
    fields = Fields(read_json(Path(model.path) / "config.json"), Path(model.path) / "config.json")
    labels = _labels(fields)
    one = len(labels) == 1
    mode = CLS if model.encoder else LAST
    if _asked_mode(asked) not in (None, mode):
        raise ConfigError(f"the head of {model.path} was trained on {mode} alone (pooler-config)")
    normalizes = _asked_switch(asked)
    facts = PoolingFacts(
        tasks=(SCORE, CLASSIFY) if one else (CLASSIFY,),
        width=len(labels),
        token_width=model.hidden_size,
        normalizes=normalizes is not False,
        labels=labels,
    )
    activation = _activation(fields, SIGMOID if one else SOFTMAX)
    return PoolerConfig((mode,), facts, has_head=True, activation=activation)


def _labels(fields: Fields) -> tuple[str, ...]:
    names = fields.get("id2label", dict, {})
    if not names:
        count = fields.count("num_labels", 2, most=MAX_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        return tuple(str(names[str(index)]) for index in range(len(names)))
    except KeyError as error:
        raise ConfigError(f"id2label in {fields.file} has no label {error}") from None


def _activation(fields: Fields, default: str) -> str:
    """By name, as sentence-transformers writes it, or by the kind of problem."""
    own = Fields(fields.get("sentence_transformers", dict, {}), fields.file)
    name = own.get("activation_fn", str, None)
    name = name or fields.get("sbert_ce_default_activation_function", str, None)
    if name is not None:
        last = str(name).rsplit(".", 1)[-1]
        if last not in _OF_TORCH:
            raise ConfigError(
                f"the activation in {fields.file} is {shown(name)}, which is not built here"
            )
        return _OF_TORCH[last]
    return _OF_PROBLEM.get(fields.get("problem_type", str, None), default)


def _asked(text: str) -> Fields:
    """The fields of --pooler-config."""
    file = Path("pooler-config")
    if not text:
        return Fields({}, file)
    try:
        raw: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"pooler-config is {text!r}, it must be a JSON object: {error}") from None
    known = (*_TYPES, *_NORMALIZE, *_TRUNCATIONS)
    strange = sorted(set(raw) - set(known)) if isinstance(raw, Mapping) else ["no object"]
    if strange:
        raise ConfigError(f"pooler-config holds {strange[0]}, it may hold {', '.join(known)}")
    return Fields(raw, file)


def _asked_mode(asked: Fields) -> str | None:
    given = [asked.get(name, str, None) for name in _TYPES]
    word = next((word.lower() for word in given if word), None)
    mode = {"last": LAST}.get(word or "", word)
    if mode is not None and mode not in MODES:
        raise ConfigError(
            f"pooling_type in pooler-config is {word!r}, it must be LAST or one of "
            f"{', '.join(MODES)}"
        )
    return mode


def _asked_switch(asked: Fields) -> bool | None:
    given = [asked.get(name, bool, None) for name in _NORMALIZE]
    return next((value for value in given if value is not None), None)


def _dimensions(model: ModelConfig, asked: Fields) -> tuple[int, ...] | None:
    """As PoolingFacts.dimensions, by what the operator says, else the checkpoint."""
    file = Path(model.path) / "config.json"
    for fields in (asked, Fields(read_json(file), file)):
        listed = fields.get("matryoshka_dimensions", list, None)
        if listed:
            # Longer than any vector: front-ends are told of them as 64 bits.
            if not all(isinstance(size, int) and 0 < size <= MAX_COUNT for size in listed):
                raise ConfigError(
                    f"matryoshka_dimensions in {fields.file} is {shown(listed)}, it must hold "
                    f"numbers from 1 to {MAX_COUNT}"
                )
            return tuple(sorted(listed))
        if (may := fields.get("is_matryoshka", bool, None)) is not None:
            return None if may else ()
    return ()
