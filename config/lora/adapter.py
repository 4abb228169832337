"""LoRA adapters in folders of PEFT: their tensors and values, checked against the base model, and
the hash of their contents. hpu/lora/adapter_weights.py makes tensors of their bytes."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from config.checkpoint.safetensors_files import StoredTensor
from config.errors import ConfigError
from config.lora.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, OpenWeights
from config.lora.base_modules import BaseModule, BaseModules
from config.lora.peft_config import PeftConfig, path_ends
from config.model.json_fields import shown
from config.params.lora import EMBEDDING, EXTRA_TARGETS, NamedAdapter

PICKLE_FILE = "adapter_model.bin"
NEW_TOKENS_FILE = "new_embeddings.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE, NEW_TOKENS_FILE)
"""All that is read of an adapter's folder, or looked for."""

MAX_VALUE = 65504.0
"""Largest absolute value of a weight, times the scale for the second matrix: the largest number of
float16, so that no serving dtype overflows. Weights of trained adapters are below 100."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)")


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
    root: str = ""
    """As AdapterFolder.root."""
    source: str = ""
    """Its folder as its user wrote it, which clients may see."""

    @property
    def named(self) -> NamedAdapter:
        """What loads it again."""
        return NamedAdapter(self.name, self.path, self.parent, self.kind, self.root, self.source)


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

    folder: AdapterFolder
    config: PeftConfig
    modules: tuple[AdapterModule, ...]

    @property
    def file(self) -> str:
        """What errors call the file of the weights."""
        return self.folder.file(WEIGHTS_FILE)

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


class LoadedAdapter(NamedTuple):
    """An adapter whose values are checked."""

    adapter: Adapter
    content: str
    """SHA-256 of its files, as hexadecimal digits."""
    data: bytearray
    """The bytes of the weights file; empty unless they were kept."""

    def info(self, name: str, parent: str | None = None, kind: str = "") -> LoRAInfo:
        """The adapter under `name`."""
        adapter, folder = self.adapter, self.adapter.folder
        return LoRAInfo(
            name,
            folder.path,
            self.content,
            adapter.rank,
            adapter.num_bytes,
            parent,
            kind,
            folder.root,
            folder.name,
        )


def read_adapter(folder: AdapterFolder, base: BaseModules) -> Adapter:
    """The adapter in `folder`, by its config and the header of its weights. Raises ConfigError, in
    one sentence, for whatever does not fit the model or is not understood."""
    with _opened(folder, base) as (adapter, _, _):
        return adapter


def load_adapter(
    folder: AdapterFolder,
    base: BaseModules,
    max_rank: int,
    extra_targets: tuple[str, ...],
    *,
    keeps_bytes: bool = False,
) -> LoadedAdapter:
    """Like read_adapter, with the limits of the server and all values checked. Reads each file
    once."""
    with _opened(folder, base) as (adapter, config, weights):
        _check_limits(adapter, max_rank, extra_targets)
        content, data, largest = weights.read(config, keeps_bytes=keeps_bytes)
    for module in adapter.modules:
        for tensor, scale in ((module.a, 1.0), (module.b, abs(module.scale))):
            _check_value(adapter, tensor, largest[tensor], scale)
    return LoadedAdapter(adapter, content, data)


@contextmanager
def _opened(
    folder: AdapterFolder, base: BaseModules
) -> Iterator[tuple[Adapter, bytes, OpenWeights]]:
    """The adapter, the bytes of its config, and its weights."""
    data, fields = folder.read_config()
    config = PeftConfig.of(fields, folder.file(CONFIG_FILE))
    if folder.has(PICKLE_FILE) and not folder.has(WEIGHTS_FILE):
        raise ConfigError(
            f"{folder.name} has its weights only as a pickle ({PICKLE_FILE}), which can run code "
            f"when it is read and is never read here: save it as {WEIGHTS_FILE}"
        )
    if folder.has(NEW_TOKENS_FILE):
        raise ConfigError(
            f"{folder.name} has {NEW_TOKENS_FILE}: adapters with tokens of their own are not served"
        )
    with folder.open(WEIGHTS_FILE) as opened:
        file = folder.file(WEIGHTS_FILE)
        weights = OpenWeights(opened, file)
        yield Adapter(folder, config, _modules(weights, file, config, base)), data, weights


def _modules(
    weights: OpenWeights, file: str, config: PeftConfig, base: BaseModules
) -> tuple[AdapterModule, ...]:
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for tensor in weights.tensors:
        match = _TENSOR.fullmatch(tensor.name.removeprefix(_PREFIX))
        if match is None or not tensor.name.startswith(_PREFIX):
            raise ConfigError(f"{file} has {shown(tensor.name)[1:-1]}, which is no tensor of LoRA")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ConfigError(f"{file} has 0 tensors, an adapter needs at least 2")
    modules: dict[str, AdapterModule] = {}
    for name, pair in pairs.items():
        module = _module(name, pair, file, config, base)
        if module.base.name in modules:
            raise ConfigError(f"{file} has weights for {name} under 2 names, it needs 1")
        modules[module.base.name] = module
    _check_targets(config, pairs)
    return tuple(modules.values())


def _check_value(adapter: Adapter, tensor: StoredTensor, largest: float, scale: float) -> None:
    if not math.isfinite(largest):
        raise ConfigError(
            f"{adapter.file} has a value in {tensor.name} that is infinite or no number, all must "
            "be finite"
        )
    if max(largest, 1.0) * scale > MAX_VALUE or largest > MAX_VALUE:
        by = f", which lora_alpha and the rank multiply by {scale:.4g}" if scale != 1 else ""
        raise ConfigError(
            f"{adapter.file} has {largest:.4g} in {tensor.name}{by}: at most {MAX_VALUE:.0f} is "
            "served"
        )


def _module(
    name: str,
    pair: Mapping[str, StoredTensor],
    file: str,
    config: PeftConfig,
    base: BaseModules,
) -> AdapterModule:
    module = base.find(name)
    if module is None:
        raise ConfigError(
            f"{file} has weights for {shown(name)[1:-1]}, the base model has no such module"
        )
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
    rank = config.rank_of(name, max(a.shape[0] if a.shape else 1, 1))
    expected = {a: (rank, module.in_features), b: (module.out_features, rank)}
    for tensor, shape in expected.items():
        if tensor.shape != shape:
            raise ConfigError(
                f"{file} has {tensor.name} of {_text(tensor.shape)}, the base model and rank "
                f"{rank} need {_text(shape)}"
            )
    return AdapterModule(module, rank, config.scale_of(name, rank), a, b)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _check_targets(config: PeftConfig, found: Mapping[str, object]) -> None:
    """Raise ConfigError for a target without weights in the file."""
    if not isinstance(config.targets, frozenset):
        return
    missing = config.targets.difference(*map(path_ends, found))
    if missing:
        raise ConfigError(
            f"{config.file} says target_modules {shown(min(missing))}, and {WEIGHTS_FILE} has "
            f"weights for 0 of them"
        )


def _check_limits(adapter: Adapter, max_rank: int, extra_targets: tuple[str, ...]) -> None:
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
