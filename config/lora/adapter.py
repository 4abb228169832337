"""LoRA adapters in folders of PEFT: their tensors, checked against the base model, and the hash of
their contents. Reads headers; the weights are read by hpu/lora/adapter_weights.py."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from config.checkpoint.safetensors_files import StoredTensor, read_header
from config.errors import ConfigError
from config.lora.base_modules import BaseModule, BaseModules
from config.lora.peft_config import CONFIG_FILE, PeftConfig
from config.params.lora import EMBEDDING, EXTRA_TARGETS

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
NEW_TOKENS_FILE = "new_embeddings.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE, NEW_TOKENS_FILE)
"""All that is read of an adapter's folder, or looked for."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)")
_DTYPES = ("F32", "F16", "BF16", "F64")
_CHUNK_BYTES = 1 << 20


class LoRAInfo(NamedTuple):
    """An adapter that is served."""

    name: str
    path: str
    content: str
    """Hash of its files: the same for two names of the same adapter."""
    rank: int
    """Its largest one."""
    num_bytes: int
    parent: str | None = None
    """Name of the base model as its owner gave it; None: the served model's."""
    kind: str = ""
    """As NamedAdapter.kind."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The two matrices of one module: y += scale * (x A^T) B^T."""

    base: BaseModule
    rank: int
    scale: float
    a: StoredTensor
    """(rank, in); of an embedding (rank, tokens)."""
    b: StoredTensor
    """(out, rank)"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a folder holds."""

    folder: Path
    config: PeftConfig
    modules: tuple[AdapterModule, ...]

    @property
    def file(self) -> Path:
        return self.folder / WEIGHTS_FILE

    @property
    def rank(self) -> int:
        """The largest one."""
        return max(module.rank for module in self.modules)

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(one.a.num_bytes + one.b.num_bytes for one in self.modules)

    @property
    def extra_targets(self) -> tuple[str, ...]:
        """The EXTRA_TARGETS that it has weights for."""
        kinds = {module.base.kind for module in self.modules}
        return tuple(kind for kind in EXTRA_TARGETS if kind in kinds)


def read_adapter(folder: Path, base: BaseModules) -> Adapter:
    """The adapter in `folder`. Raises ConfigError, in one sentence, for whatever does not fit the
    model or is not understood."""
    config = PeftConfig.read(folder)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        if (folder / PICKLE_FILE).is_file():
            raise ConfigError(
                f"{folder} has its weights only as a pickle ({PICKLE_FILE}), which can run code "
                f"when it is read and is never read here: save it as {WEIGHTS_FILE}"
            )
        raise ConfigError(f"{folder} has no {WEIGHTS_FILE}")
    if (folder / NEW_TOKENS_FILE).is_file():
        raise ConfigError(
            f"{folder} has {NEW_TOKENS_FILE}: adapters with tokens of their own are not served"
        )
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for tensor in read_header(file):
        match = _TENSOR.fullmatch(tensor.name.removeprefix(_PREFIX))
        if match is None or not tensor.name.startswith(_PREFIX):
            raise ConfigError(f"{file} has {tensor.name}, which is no tensor of LoRA")
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"{file} has {tensor.name} in {tensor.dtype}, it must be one of "
                f"{', '.join(_DTYPES)}"
            )
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ConfigError(f"{file} has 0 tensors, an adapter needs at least 2")
    modules = tuple(_module(name, pair, file, config, base) for name, pair in pairs.items())
    _check_targets(config, pairs)
    return Adapter(folder, config, modules)


def _module(
    name: str,
    pair: Mapping[str, StoredTensor],
    file: Path,
    config: PeftConfig,
    base: BaseModules,
) -> AdapterModule:
    module = base.find(name)
    if module is None:
        raise ConfigError(f"{file} has weights for {name}, the base model has no such module")
    if module.refusal:
        raise ConfigError(f"{file} has weights for {name}: {module.refusal}")
    if not config.selects(name):
        raise ConfigError(
            f"{file} has weights for {name}, which target_modules of {config.file} does not name"
        )
    is_table = module.kind == EMBEDDING
    names = (
        ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
    )
    missing = [one for one in names if one not in pair]
    if missing:
        raise ConfigError(
            f"{file} has no {name}.{missing[0]}, but {next(iter(pair.values())).name}"
        )
    extra = [one.name for key, one in pair.items() if key not in names]
    if extra:
        raise ConfigError(f"{file} has {extra[0]} besides {pair[names[0]].name}")
    a, b = (pair[one] for one in names)
    rank = config.rank_of(name)
    expected = {a: (rank, module.in_features), b: (module.out_features, rank)}
    for tensor, shape in expected.items():
        if tensor.shape != shape:
            raise ConfigError(
                f"{file} has {tensor.name} of {_text(tensor.shape)}, the base model and rank "
                f"{rank} need {_text(shape)}"
            )
    return AdapterModule(module, rank, config.scale_of(name), a, b)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _check_targets(config: PeftConfig, found: Mapping[str, object]) -> None:
    """Raise ConfigError for a target of which the file has nothing."""
    if isinstance(config.targets, str):
        return
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            raise ConfigError(
                f"{config.file} says target_modules {target!r}, and {WEIGHTS_FILE} has weights for "
                f"0 of them"
            )


def check_limits(adapter: Adapter, max_rank: int, extra_targets: tuple[str, ...]) -> None:
    """Raise ConfigError for an adapter beyond what the server has reserved."""
    if adapter.rank > max_rank:
        raise ConfigError(
            f"{adapter.config.file} has rank {adapter.rank}, --max-lora-rank is {max_rank}"
        )
    for kind in adapter.extra_targets:
        if kind not in extra_targets:
            reserved = ", ".join(extra_targets) or "none"
            raise ConfigError(
                f"{adapter.file} has weights for the {kind}, --lora-extra-targets is {reserved}"
            )


def content_hash(folder: Path) -> str:
    """SHA-256 of the adapter's files, as hexadecimal digits. Raises ConfigError."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        file = folder / name
        try:
            digest.update(file.stat().st_size.to_bytes(8, "little"))
            with file.open("rb") as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
    return digest.hexdigest()


def lora_info(adapter: Adapter, name: str, parent: str | None = None, kind: str = "") -> LoRAInfo:
    """The adapter under `name`, with the hash of its files."""
    content = content_hash(adapter.folder)
    path = str(adapter.folder)
    return LoRAInfo(name, path, content, adapter.rank, adapter.num_bytes, parent, kind)
