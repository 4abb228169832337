"""Reads the sentence-transformers files of a checkpoint: modules, prompts and lengths."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import Fields, read_any_json, read_json, shown
from config.whole_files import is_present

CLS, MEAN, MAX, LAST = "cls", "mean", "max", "lasttoken"
WEIGHTED_MEAN, MEAN_SQRT_LEN = "weightedmean", "mean_sqrt_len_tokens"
MODES = (CLS, MEAN, MAX, LAST, WEIGHTED_MEAN, MEAN_SQRT_LEN)
"""Pooling modes."""

_OLDER = {
    CLS: "pooling_mode_cls_token",
    MAX: "pooling_mode_max_tokens",
    MEAN: "pooling_mode_mean_tokens",
    MEAN_SQRT_LEN: "pooling_mode_mean_sqrt_len_tokens",
    WEIGHTED_MEAN: "pooling_mode_weightedmean_tokens",
    LAST: "pooling_mode_lasttoken",
}
"""Mode -> its field in older files, in the order in which several modes are concatenated."""
_MODELS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""sentence_<model>_config.json: the first releases used several names, later releases always
bert."""

NO_LIMIT = 10**40
"""Upper bound of length fields. It is above int(1e30), which means no limit in tokenizer files."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Activation functions of a dense module, by their names in torch.nn."""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A dense module: a linear layer and an activation."""

    folder: str
    in_size: int
    out_size: int
    has_bias: bool
    activation: str
    """One of ACTIVATIONS."""


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """Contents of the sentence-transformers files; the defaults are for a checkpoint without
    them."""

    modes: tuple[str, ...]
    includes_prompt: bool = True
    dense: tuple[DenseConfig, ...] = ()
    normalizes: bool = True
    max_tokens: int | None = None
    lowers_case: bool = False
    similarity: str = "cosine"
    truncate_dim: int | None = None
    """Number of leading vector dimensions to keep; None: all."""
    default_prompt: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)


def read_sentence_config(folder: str) -> SentenceConfig | None:
    """Read the files in `folder`; None without modules.json. Raises ConfigError."""
    path = Path(folder)
    if not is_present(path / "modules.json"):
        return None
    kinds = _modules(path / "modules.json")
    pooling = next(
        _fields(path / subfolder / "config.json") for kind, subfolder in kinds if kind == "Pooling"
    )
    named = [path / f"sentence_{model}_config.json" for model in _MODELS]
    lengths = _fields(next((file for file in named if is_present(file)), named[0]))
    _check_modalities(lengths)
    # model_max_length is the default of max_seq_length.
    tokenizer = _fields(path / "tokenizer_config.json")
    settings = _fields(path / "config_sentence_transformers.json")
    prompts = settings.get("prompts", dict, {})
    if not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"prompts in {settings.file} must be an object whose values are strings")
    default = settings.get("default_prompt_name", str, None)
    if default is not None and default not in prompts:
        raise ConfigError(
            f"{settings.file} has no prompt {shown(default)}, its default_prompt_name"
        )
    return SentenceConfig(
        modes=_modes(pooling),
        includes_prompt=pooling.get("include_prompt", bool, True),
        dense=tuple(_dense(path / subfolder) for kind, subfolder in kinds if kind == "Dense"),
        normalizes=any(kind == "Normalize" for kind, _ in kinds),
        max_tokens=lengths.count_or_none("max_seq_length", maximum=NO_LIMIT)
        or tokenizer.count_or_none("model_max_length", maximum=NO_LIMIT),
        lowers_case=lengths.get("do_lower_case", bool, False),
        similarity=_similarity(settings),
        truncate_dim=settings.count_or_none("truncate_dim"),
        default_prompt=default,
        prompts=prompts,
    )


def _check_modalities(fields: Fields) -> None:
    """Raise ConfigError for a model that takes chat messages instead of texts."""
    if "message" in fields.get("modality_config", dict, {}):
        raise ConfigError(
            f"modality_config of {fields.file} has 'message', so sentence-transformers renders "
            "each text with the chat template, which is not supported: remove it to embed texts "
            "without the template"
        )


def _fields(file: Path) -> Fields:
    return Fields(read_json(file) if is_present(file) else {}, file)


def _modules(file: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module in order, except `Transformer`, the model itself."""
    listed: Any = read_any_json(file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ConfigError(f"{file} must contain a list of modules")
    kinds = []
    for module in listed:
        entry: Json = module
        fields = Fields(entry, file)
        kind = str(fields.get("type", str, "")).rsplit(".", 1)[-1]
        subfolder = str(fields.get("path", str, ""))
        if Path(subfolder).is_absolute() or ".." in Path(subfolder).parts:
            raise ConfigError(
                f"{file} names the folder {shown(subfolder)}, it must be in the folder of the file"
            )
        kinds.append((kind, subfolder))
    names = [kind for kind, _ in kinds]
    behind = [name for name in names[1:] if name != "Dropout"]
    middle = behind[1:-1] if behind[-1:] == ["Normalize"] else behind[1:]
    is_known = names[:1] == ["Transformer"] and behind[:1] == ["Pooling"]
    if not is_known or any(name != "Dense" for name in middle):
        listing = shown(", ".join(names))[1:-1]
        raise ConfigError(
            f"{file} lists {listing or 'nothing'}, it must list a Transformer, then Pooling, then "
            "any number of Dense, then optionally Normalize"
        )
    if kinds[0][1]:
        raise ConfigError(
            f"{file} has the Transformer in {shown(kinds[0][1])}, it must be in the folder of the "
            "file"
        )
    return kinds[1:]


def _modes(fields: Fields) -> tuple[str, ...]:
    """Pooling modes. Newer files list the modes; older files have a boolean per mode."""
    named = fields.raw.get("pooling_mode")
    if named is None:
        chosen = [mode for mode, name in _OLDER.items() if fields.get(name, bool, False)]
        named = chosen or MEAN
    modes = tuple(named) if isinstance(named, list) else (named,)
    # Repeated modes would allow vectors of any width.
    if not modes or not all(mode in MODES for mode in modes) or len(set(modes)) < len(modes):
        raise ConfigError(
            f"the pooling mode in {fields.file} is {shown(named)}, it must be one or more of "
            f"{', '.join(MODES)}"
        )
    return modes


def _dense(folder: Path) -> DenseConfig:
    fields = _fields(folder / "config.json")
    name = fields.get("activation_function", str, "torch.nn.modules.activation.Tanh")
    activation = str(name).rsplit(".", 1)[-1]
    known = str(name).startswith("torch.nn.") and activation in ACTIVATIONS
    odd = [
        key
        for key, usual in (
            ("use_residual", False),
            ("module_input_name", "sentence_embedding"),
            ("module_output_name", "sentence_embedding"),
        )
        if fields.raw.get(key) not in (None, usual)
    ]
    if not known or odd:
        what = f"{odd[0]} {shown(fields.raw[odd[0]])}" if odd else f"the activation {shown(name)}"
        raise ConfigError(f"{fields.file} has {what}, which is not supported")
    return DenseConfig(
        str(folder),
        fields.count("in_features"),
        fields.count("out_features"),
        fields.get("bias", bool, True),
        activation,
    )


def _similarity(fields: Fields) -> str:
    name = fields.get("similarity_fn_name", str, "cosine")
    if name not in SIMILARITIES:
        raise ConfigError(
            f"similarity_fn_name in {fields.file} is {shown(name)}, it must be one of "
            f"{', '.join(SIMILARITIES)}"
        )
    return str(name)
