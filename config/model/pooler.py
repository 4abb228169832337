"""PoolerConfig: how hidden states are pooled to vectors, from the checkpoint's files and
--pooler-config."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from config.engine import EngineConfig
from config.errors import ConfigError, SettingError
from config.json_text import Json, json_setting_problem, parse_json
from config.model.family_fields import GENERATOR_ENDINGS
from config.model.json_fields import MAX_COUNT, Fields, read_json, shown
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
_ACTIVATIONS = {"Sigmoid": SIGMOID, "Softmax": SOFTMAX, "Identity": IDENTITY}
_PROBLEM_ACTIVATIONS = {
    "regression": IDENTITY,
    "single_label_classification": SOFTMAX,
    "multi_label_classification": SIGMOID,
}
MAX_LABELS = 2**20
"""Maximum of num_labels: every label gets a name, even if the checkpoint names no labels."""
CLASSIFIER = "ForSequenceClassification"

_NORMALIZE = ("normalize", "use_activation", "activation", "softmax")
_TYPES = ("pooling_type", "seq_pooling_type")
_TRUNCATIONS = ("is_matryoshka", "matryoshka_dimensions")


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """Pooling after the last layer, and the settings for the API servers."""

    modes: tuple[str, ...]
    """Pooling modes, from sentence_transformers.MODES; the vectors of several modes are
    concatenated."""
    facts: PoolingFacts
    dense: tuple[DenseConfig, ...] = ()
    has_head: bool = False
    """Whether a classification head is applied to the vector."""
    activation: str = IDENTITY
    """Activation function of the head's logits."""
    max_tokens: int | None = None
    """Length to which sentence-transformers truncates; None: no limit."""


def choose_pooler(config: EngineConfig, model: ModelConfig) -> PoolerConfig | None:
    """The pooler of `model`; None for a generative model.

    With --runner auto, a model is served for pooling if --convert is embed, if its architecture has
    no language-model head, or if it has sentence-transformers files. Raises ConfigError.
    """
    architecture = model.architecture
    sentence = read_sentence_config(model.path)
    generates = architecture.endswith(GENERATOR_ENDINGS)
    runner = config.runner
    if runner == "auto":
        is_embedder = sentence is not None or config.convert == "embed"
        runner = "generate" if generates and not is_embedder else "pooling"
    if runner == "generate":
        if not generates:
            raise SettingError(
                f"--runner is 'generate', and {model.path} is a {architecture}, which is a pooling "
                "model: set --runner to auto or pooling"
            )
        if config.convert == "embed":
            raise SettingError(
                "--runner is 'generate' and --convert is 'embed', which makes an embedding model: "
                "leave out one of the two"
            )
        return None
    if generates and config.convert == "none":
        raise SettingError(
            f"--runner is 'pooling' and --convert is 'none', and {model.path} is a {architecture}, "
            "which generates text unless it is converted: set --convert to auto or embed"
        )
    if not model.is_causal and model.layer_types:
        raise ConfigError(
            f"{model.path} has a sliding window or chunks and is not causal, which is not supported"
        )
    options = _options(config.pooler_config)
    if architecture.endswith(CLASSIFIER) and config.convert != "embed":
        return _classifier(model, options)
    return _embedder(model, options, sentence)


def _embedder(model: ModelConfig, options: Fields, sentence: SentenceConfig | None) -> PoolerConfig:
    found = sentence or SentenceConfig(modes=(CLS if model.encoder else LAST,))
    mode = _mode_option(options)
    if mode is not None:
        found = replace(found, modes=(mode,))
    normalizes = _normalize_option(options)
    width = model.hidden_size * len(found.modes)
    for dense in found.dense:
        if dense.in_size != width:
            raise ConfigError(
                f"{dense.folder} has {dense.in_size} input features, its input vectors have {width}"
            )
        width = dense.out_size
    if found.truncate_dim is not None:
        width = min(width, found.truncate_dim)
    facts = PoolingFacts(
        tasks=(EMBED, TOKEN_EMBED),
        width=width,
        token_width=model.hidden_size,
        normalizes=found.normalizes if normalizes is None else normalizes,
        dimensions=_dimensions(model, options),
        similarity=found.similarity,
        prompts=found.prompts,
        default_prompt=found.default_prompt,
        includes_prompt=found.includes_prompt,
        lowers_case=found.lowers_case,
    )
    return PoolerConfig(found.modes, facts, found.dense, max_tokens=found.max_tokens)


def _classifier(model: ModelConfig, options: Fields) -> PoolerConfig:
    fields = Fields(read_json(Path(model.path) / "config.json"), Path(model.path) / "config.json")
    labels = _labels(fields)
    is_single = len(labels) == 1
    mode = CLS if model.encoder else LAST
    if _mode_option(options) not in (None, mode):
        raise SettingError(
            f"the head of {model.path} was trained for {mode} pooling only: leave pooling_type "
            "out of --pooler-config"
        )
    normalizes = _normalize_option(options)
    facts = PoolingFacts(
        tasks=(SCORE, CLASSIFY) if is_single else (CLASSIFY,),
        width=len(labels),
        token_width=model.hidden_size,
        normalizes=normalizes is not False,
        labels=labels,
    )
    activation = _activation(fields, SIGMOID if is_single else SOFTMAX)
    return PoolerConfig((mode,), facts, has_head=True, activation=activation)


def _labels(fields: Fields) -> tuple[str, ...]:
    names = fields.get("id2label", dict, {})
    if not names:
        count = fields.count("num_labels", 2, maximum=MAX_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        return tuple(str(names[str(index)]) for index in range(len(names)))
    except KeyError as error:
        raise ConfigError(f"id2label in {fields.file} has no label {error}") from None


def _activation(fields: Fields, default: str) -> str:
    """Activation of the head: the name that sentence-transformers writes, otherwise the activation
    of problem_type, otherwise `default`."""
    sentence = Fields(fields.get("sentence_transformers", dict, {}), fields.file)
    name = sentence.get("activation_fn", str, None)
    name = name or fields.get("sbert_ce_default_activation_function", str, None)
    if name is not None:
        last = str(name).rsplit(".", 1)[-1]
        if last not in _ACTIVATIONS:
            raise ConfigError(
                f"the activation in {fields.file} is {shown(name)}, which is not supported"
            )
        return _ACTIVATIONS[last]
    return _PROBLEM_ACTIVATIONS.get(fields.get("problem_type", str, None), default)


def _options(text: str) -> Fields:
    file = Path("--pooler-config")
    if not text:
        return Fields({}, file)
    try:
        raw: Json = parse_json(text)
    except ValueError as error:
        raise SettingError(
            f"--pooler-config is {text!r}, "
            + json_setting_problem(error, '{"pooling_type": "MEAN"}')
        ) from None
    known = (*_TYPES, *_NORMALIZE, *_TRUNCATIONS)
    strange = sorted(set(raw) - set(known)) if isinstance(raw, Mapping) else ["no object"]
    if strange:
        raise SettingError(f"--pooler-config has {strange[0]}, it may have {', '.join(known)}")
    return Fields(raw, file)


def _mode_option(options: Fields) -> str | None:
    given = [options.get(name, str, None) for name in _TYPES]
    word = next((word.lower() for word in given if word), None)
    mode = {"last": LAST}.get(word or "", word)
    if mode is not None and mode not in MODES:
        raise SettingError(
            f"pooling_type in --pooler-config is {word!r}, it must be LAST or one of "
            f"{', '.join(MODES)}"
        )
    return mode


def _normalize_option(options: Fields) -> bool | None:
    given = [options.get(name, bool, None) for name in _NORMALIZE]
    return next((value for value in given if value is not None), None)


def _dimensions(model: ModelConfig, options: Fields) -> tuple[int, ...] | None:
    """PoolingFacts.dimensions, from --pooler-config, else from the checkpoint."""
    file = Path(model.path) / "config.json"
    for fields in (options, Fields(read_json(file), file)):
        listed = fields.get("matryoshka_dimensions", list, None)
        if listed:
            # Bounded because API servers receive the dimensions in 64 bits.
            if not all(isinstance(size, int) and 0 < size <= MAX_COUNT for size in listed):
                raise ConfigError(
                    f"matryoshka_dimensions in {fields.file} is {shown(listed)}, it must contain "
                    f"integers from 1 to {MAX_COUNT}"
                )
            return tuple(sorted(listed))
        if (is_matryoshka := fields.get("is_matryoshka", bool, None)) is not None:
            return None if is_matryoshka else ()
    return ()
