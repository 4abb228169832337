"""LoRA adapters in PEFT folders and GGUF files: their tensors and values, checked against the base
model, and the hash of their contents."""

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from config.checkpoint.safetensors_files import StoredTensor
from config.errors import ConfigError, SettingError
from config.lora.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, OpenWeights
from config.lora.base_modules import BaseModule, BaseModules, ExpertStack
from config.lora.gguf_adapter import MAX_FILE_BYTES, read_gguf_adapter, written
from config.lora.info import LoRAInfo
from config.lora.peft_config import PeftConfig, path_ends
from config.model.json_fields import shown
from config.params.lora import EMBEDDING, EXTRA_TARGETS, HEAD

logger = logging.getLogger(__name__)

PICKLE_FILE = "adapter_model.bin"
NEW_TOKENS_FILE = "new_embeddings.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE, NEW_TOKENS_FILE)
"""Files of an adapter folder that are downloaded. NEW_TOKENS_FILE is refused, not read."""

MAX_VALUE = 65504.0
"""Maximum absolute value of a weight; for the second matrix, also after multiplication by the
scale. This is the largest float16 number, so that no serving dtype overflows."""

MAX_TENSORS_PER_MODULE = 4
"""Maximum tensors of an adapter per base module: two matrices, and copies of the base weight and
bias."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B)")
_NAMES = ("lora_A.weight", "lora_B.weight")
_TABLE_NAMES = ("lora_embedding_A", "lora_embedding_B")
_BASE_TENSOR = re.compile(r"(.+?)(?:\.base_layer)?\.(weight|bias)")


class ExpertPart(NamedTuple):
    """An expert's slice of the LoRA matrices of stacked experts. The first matrix is (experts *
    rank, in). The second is (out, rank * experts), with the expert as the fastest-varying index, as
    in ParamWrapper of peft.tuners.lora.layer, unless `is_grouped`."""

    expert: int
    num_experts: int
    first_row: int
    """First row of the module's outputs in the second matrix."""
    is_grouped: bool = False
    """Whether the rank is the fastest-varying index of the second matrix."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The two LoRA matrices of a module: y += scale * (x A^T) B^T."""

    base: BaseModule
    rank: int
    scale: float
    a: StoredTensor
    """(rank, in); for an embedding (rank, tokens). With `part`: see ExpertPart."""
    b: StoredTensor
    """(out, rank). With `part`: see ExpertPart."""
    part: ExpertPart | None = None
    """The expert's slice of `a` and `b`, if they contain all experts of a layer."""


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A base-model tensor that the adapter file also contains."""

    stored: StoredTensor
    name: str
    """The tensor's name as WeightMap.map_name returns it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Contents of an adapter folder or GGUF file."""

    folder: AdapterFolder
    config_file: str
    """Name of the settings file, for errors."""
    file: str
    """Name of the weights file, for errors."""
    modules: tuple[AdapterModule, ...]
    base_tensors: tuple[BaseTensor, ...] = ()

    @property
    def rank(self) -> int:
        """Largest rank of a module."""
        return max(module.rank for module in self.modules)

    @property
    def num_bytes(self) -> int:
        """Total size of the LoRA matrices; of a GGUF file, in float32."""
        tensors = {tensor for module in self.modules for tensor in (module.a, module.b)}
        return sum(tensor.num_bytes for tensor in tensors)

    @property
    def extra_targets(self) -> tuple[str, ...]:
        """The EXTRA_TARGETS for which the adapter has weights."""
        kinds = {module.base.kind for module in self.modules}
        return tuple(kind for kind in EXTRA_TARGETS if kind in kinds)


class LoadedAdapter(NamedTuple):
    """An adapter whose values have been checked."""

    adapter: Adapter
    content: str
    """SHA-256 of the adapter's settings and weights, in hexadecimal."""
    data: NDArray[np.uint8]
    """Bytes of the weights as a safetensors file; empty if `load_adapter` keeps no bytes."""

    def info(self, name: str, parent: str | None = None, kind: str = "") -> LoRAInfo:
        """LoRAInfo of the adapter, served as `name`."""
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


def read_adapter(folder: AdapterFolder, base: BaseModules, max_rank: int) -> Adapter:
    """Read the adapter in `folder`: of a PEFT folder, the config and the header of the weights; of
    a GGUF file, also the weights. Raises ConfigError, also for a GGUF file with far more weights
    than an adapter of `max_rank`."""
    with _opened(folder, base, max_rank) as (adapter, _, _):
        return adapter


def check_adapter(
    folder: AdapterFolder, base: BaseModules, max_rank: int, extra_targets: tuple[str, ...]
) -> None:
    """Check an adapter like read_adapter, and against the server's limits."""
    _check_limits(read_adapter(folder, base, max_rank), max_rank, extra_targets)


def load_adapter(
    folder: AdapterFolder,
    base: BaseModules,
    max_rank: int,
    extra_targets: tuple[str, ...],
    *,
    keeps_bytes: bool = False,
) -> LoadedAdapter:
    """Load an adapter like read_adapter. Checks the server's limits and all values of the adapter,
    and opens each file of the adapter once."""
    with _opened(folder, base, max_rank) as (adapter, config, weights):
        _check_limits(adapter, max_rank, extra_targets)
        for base_tensor in adapter.base_tensors:
            _check_base_values(adapter, base_tensor, weights, base)
        content, data, largest = weights.read(config, keeps_bytes=keeps_bytes)
    for module in adapter.modules:
        for tensor, scale in ((module.a, 1.0), (module.b, abs(module.scale))):
            _check_value(adapter, tensor, largest[tensor], scale)
    return LoadedAdapter(adapter, content, data)


Opened = Iterator[tuple[Adapter, bytes, OpenWeights]]
"""(adapter, bytes of its settings for the hash, its weights as a safetensors file)."""


def _opened(
    folder: AdapterFolder, base: BaseModules, max_rank: int
) -> AbstractContextManager[tuple[Adapter, bytes, OpenWeights]]:
    return _opened_gguf(folder, base, max_rank) if folder.is_file else _opened_peft(folder, base)


@contextmanager
def _opened_gguf(folder: AdapterFolder, base: BaseModules, max_rank: int) -> Opened:
    file = folder.name
    with folder.open_file(MAX_FILE_BYTES) as part:
        pairs, content = read_gguf_adapter(part, base, max_rank)
    del part
    with written(pairs) as opened:
        weights = OpenWeights(opened, file, 2 * len(pairs))
        stored = {tensor.name: tensor for tensor in weights.tensors}
        modules = []
        for pair in pairs:
            a, b = (stored[name] for name in pair.names)
            modules.append(AdapterModule(pair.base, len(pair.a), 1.0, a, b))
        yield Adapter(folder, file, file, tuple(modules)), content, weights


@contextmanager
def _opened_peft(folder: AdapterFolder, base: BaseModules) -> Opened:
    data, fields = folder.read_config()
    config = PeftConfig.of(fields, folder.file(CONFIG_FILE))
    if folder.has(PICKLE_FILE) and not folder.has(WEIGHTS_FILE):
        raise ConfigError(
            f"{folder.name} has only pickled weights ({PICKLE_FILE}), which can execute code and "
            f"are never loaded: save them as {WEIGHTS_FILE}"
        )
    if folder.has(NEW_TOKENS_FILE):
        raise ConfigError(
            f"{folder.name} has {NEW_TOKENS_FILE}: adapters with added tokens are not supported"
        )
    with folder.open(WEIGHTS_FILE) as opened:
        file = folder.file(WEIGHTS_FILE)
        weights = OpenWeights(opened, file, MAX_TENSORS_PER_MODULE * len(base.modules))
        pairs, base_tensors = _sorted(weights, file, base)
        modules = _modules(pairs, file, config, base)
        yield Adapter(folder, config.file, file, modules, base_tensors), data, weights


Pairs = dict[str, dict[str, StoredTensor]]
"""Module name -> name suffix -> tensor."""


def _sorted(
    weights: OpenWeights, file: str, base: BaseModules
) -> tuple[Pairs, tuple[BaseTensor, ...]]:
    """(LoRA matrices, base-model tensors that the file also contains)."""
    pairs: Pairs = {}
    base_tensors = []
    for tensor in weights.tensors:
        name = tensor.name.removeprefix(_PREFIX)
        if name == tensor.name:
            raise _no_tensor(file, tensor)
        match = _TENSOR.fullmatch(name)
        if match is not None:
            pairs.setdefault(match[1], {})[match[2]] = tensor
        else:
            base_tensors.append(_base_tensor(tensor, name, file, base))
    if not pairs:
        raise ConfigError(f"{file} has 0 low-rank matrices, an adapter needs at least 2")
    return pairs, tuple(base_tensors)


def _no_tensor(file: str, tensor: StoredTensor) -> ConfigError:
    return ConfigError(
        f"{file} has {shown(tensor.name)[1:-1]}, which is not a LoRA tensor: save the adapter "
        "with PEFT"
    )


def _base_tensor(tensor: StoredTensor, name: str, file: str, base: BaseModules) -> BaseTensor:
    """The base-model tensor `name` in the file: PEFT saves the embedding and the head if an adapter
    targets them (`save_embedding_layers`)."""
    match = _BASE_TENSOR.fullmatch(name)
    module = None if match is None else base.find(match[1])
    if match is None or module is None:
        raise _no_tensor(file, tensor)
    weight = module.spec.shape
    shape = weight if match[2] == "weight" else (module.out_features,)
    if tensor.shape != shape:
        raise ConfigError(
            f"{file} has {tensor.name} of {_text(tensor.shape)}, the base model has "
            f"{_text(shape)}: {_OTHER_BASE}"
        )
    return BaseTensor(tensor, f"{module.name}.{match[2]}")


_OTHER_BASE = (
    "adapters that change weights of the base model are not supported, merge it into the base "
    "model (merge_and_unload) and serve the merged model"
)


def _modules(
    pairs: Pairs, file: str, config: PeftConfig, base: BaseModules
) -> tuple[AdapterModule, ...]:
    modules: dict[str, AdapterModule] = {}
    for name, pair in pairs.items():
        for module in _modules_of(name, pair, file, config, base):
            if module.base.name in modules:
                raise ConfigError(f"{file} has weights for {name} under 2 names, it needs 1")
            modules[module.base.name] = module
    _report_targets(config, pairs)
    return tuple(modules.values())


def _check_base_values(
    adapter: Adapter, tensor: BaseTensor, weights: OpenWeights, base: BaseModules
) -> None:
    """Raise ConfigError if `tensor` differs from the base model's tensor. A tensor that
    `BaseTensors.find` does not find is ignored with a warning."""
    found = base.tensors.find(tensor.name)
    if found is None:
        logger.warning(
            "%s has %s, which the base model does not store as a separate tensor: it is ignored",
            adapter.file,
            tensor.stored.name,
        )
    elif not weights.has_values(tensor.stored, *found):
        raise ConfigError(
            f"{adapter.file} has other values in {tensor.stored.name} than the base model: "
            f"{_OTHER_BASE}"
        )


def _check_value(adapter: Adapter, tensor: StoredTensor, largest: float, scale: float) -> None:
    if not math.isfinite(largest):
        raise ConfigError(
            f"{adapter.file} has an infinite or NaN value in {tensor.name}, all values must be "
            "finite"
        )
    if max(largest, 1.0) * scale > MAX_VALUE or largest > MAX_VALUE:
        by = f", which lora_alpha and the rank multiply by {scale:.4g}" if scale != 1 else ""
        raise ConfigError(
            f"{adapter.file} has {largest:.4g} in {tensor.name}{by}, at most {MAX_VALUE:.0f} is "
            "supported"
        )


def _modules_of(
    name: str, pair: Mapping[str, StoredTensor], file: str, config: PeftConfig, base: BaseModules
) -> Iterator[AdapterModule]:
    stack = base.find_experts(name.removesuffix(".base_layer"))
    if stack is not None:
        yield from _experts(name, pair, stack, file, config)
        return
    module = base.find(name)
    if module is None:
        raise ConfigError(
            f"{file} has weights for {shown(name)[1:-1]}, which is not a module that takes an "
            "adapter in the text model of the base model"
        )
    if module.refusal:
        raise ConfigError(f"{file} has weights for {name}: {module.refusal}")
    # PEFT treats the router, which is a parameter, like a linear layer.
    key = f"{name}.weight" if config.selects_parameter(f"{name}.weight") else name
    is_tied = config.ties_weights and module.kind == HEAD
    if key == name and not config.selects(name) and not is_tied:
        raise ConfigError(
            f"{file} has weights for {name}, which target_modules of {config.file} does not name"
        )
    is_table = module.kind == EMBEDDING
    a, b = _matrices(name, pair, _TABLE_NAMES if is_table else _NAMES, file)
    rank = config.rank_of(key, max(a.shape[0] if a.shape else 1, 1))
    _check_shapes(file, rank, {a: (rank, module.in_features), b: (module.out_features, rank)})
    yield AdapterModule(module, rank, config.scale_of(key, rank), a, b)


def _experts(
    name: str,
    pair: Mapping[str, StoredTensor],
    stack: ExpertStack,
    file: str,
    config: PeftConfig,
) -> Iterator[AdapterModule]:
    path = name.removesuffix(".base_layer")
    # PEFT nests the wrappers of a layer's expert parameters in this order.
    parameters = [
        parameter
        for parameter in stack.parameters
        if config.selects_parameter(f"{path}.{parameter}")
    ]
    depth = 1 if name != path else 0
    if depth >= len(parameters):
        raise ConfigError(
            f"{file} has weights for {name}, for which target_parameters of {config.file} must "
            f"name at least {depth + 1} parameters of {path}, it names {len(parameters)}"
        )
    parameter = parameters[-1 - depth]
    projections = stack.parameters[parameter]
    count = stack.num_experts
    a, b = _matrices(name, pair, _NAMES, file)
    key = f"{path}.{parameter}"
    rank = config.rank_of(key, max((a.shape[0] if a.shape else 1) // count, 1))
    first = projections[0][0]
    out_features = sum(modules[0].out_features for modules in projections)
    _check_shapes(
        file, rank, {a: (count * rank, first.in_features), b: (out_features, rank * count)}
    )
    first_row = 0
    for modules in projections:
        for expert, module in enumerate(modules):
            part = ExpertPart(expert, count, first_row, parameter in config.grouped)
            yield AdapterModule(module, rank, config.scale_of(key, rank), a, b, part)
        first_row += modules[0].out_features


def _matrices(
    name: str, pair: Mapping[str, StoredTensor], names: tuple[str, str], file: str
) -> tuple[StoredTensor, StoredTensor]:
    missing = [end for end in names if end not in pair]
    if missing:
        raise ConfigError(f"{file} has {next(iter(pair.values())).name} and no {name}.{missing[0]}")
    extra = [tensor.name for end, tensor in pair.items() if end not in names]
    if extra:
        raise ConfigError(f"{file} has {extra[0]}, which does not belong to {pair[names[0]].name}")
    return pair[names[0]], pair[names[1]]


def _check_shapes(file: str, rank: int, expected: Mapping[StoredTensor, tuple[int, ...]]) -> None:
    for tensor, shape in expected.items():
        if tensor.shape != shape:
            raise ConfigError(
                f"{file} has {tensor.name} of {_text(tensor.shape)}, the base model and rank "
                f"{rank} need {_text(shape)}"
            )


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _report_targets(config: PeftConfig, found: Iterable[str]) -> None:
    """Log the first target without weights, if any. It is not an error: PEFT writes default targets
    for several models, and does not remove names that exclude_modules or layers_to_transform
    exclude."""
    if not isinstance(config.targets, frozenset):
        return
    missing = config.targets.difference(*map(path_ends, found))
    if missing:
        logger.warning(
            "%s has target_modules %s, and %s has weights for 0 of these modules",
            config.file,
            shown(min(missing)),
            WEIGHTS_FILE,
        )


def _check_limits(adapter: Adapter, max_rank: int, extra_targets: tuple[str, ...]) -> None:
    if adapter.rank > max_rank:
        raise SettingError(
            f"{adapter.config_file} has rank {adapter.rank}, --max-lora-rank is {max_rank}: set "
            f"--max-lora-rank {adapter.rank}"
        )
    for kind in adapter.extra_targets:
        if kind not in extra_targets:
            reserved = ", ".join(extra_targets) or "none"
            raise SettingError(
                f"{adapter.file} has weights for the {kind}, --lora-extra-targets is {reserved}: "
                f"add {kind} to it"
            )
