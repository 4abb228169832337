"""LoRA adapters in GGUF files, as written by llama.cpp's convert_lora_to_gguf.py. Converts the
matrices to the layout of the base model's checkpoint."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from config.checkpoint.gguf_families import FAMILIES, architecture_of
from config.checkpoint.gguf_metadata import GgufFile, GgufLimits, GgufTensor, parse_gguf
from config.checkpoint.gguf_tensors import MissingTensor, Part, Rows, TensorRows, WeightSources
from config.checkpoint.gguf_weights import write_stream
from config.errors import ConfigError
from config.lora.adapter_folder import PartialFile
from config.lora.base_modules import DOWN, GATE_UP, BaseModule, BaseModules, ExpertStack
from config.model.json_fields import shown

Array = npt.NDArray[Any]
Matrices = tuple[Array, Array]
"""(rank, in) and (out, rank)."""

MAX_FILE_BYTES = 4 * 2**30
MAX_NUMBERS = 2**31
"""Maximum total number of elements of all matrices; each takes 4 bytes."""
MAX_METADATA_BYTES = 16 * 2**20
"""Maximum size of the metadata, which is parsed under the GIL. An adapter has about 20 keys, and
100 bytes for each tensor."""
MAX_KEYS = 1_024
MAX_ELEMENTS = 2**16
"""Maximum total number of array elements. An adapter has no vocabulary."""
MAX_TENSORS_PER_MODULE = 8
"""Maximum tensors of a file per base module: two matrices for each projection that the checkpoint
may merge."""

_TABLE = "token_embd.weight"
_EXPERTS = re.compile(r"blk\.[0-9]{1,9}\.ffn_[a-z_]+_exps\.weight")
_PROJECTIONS = {GATE_UP: ("gate", "up"), DOWN: ("down",)}
"""Parameter of ExpertStack -> names of its projections in GGUF files."""
_ENDS = (".lora_a", ".lora_b")


class GgufPair(NamedTuple):
    """The LoRA matrices of a module, in float32."""

    base: BaseModule
    name: str
    """Name of the adapted tensor in the file, for errors, with the index of an expert. If several
    modules share the tensor, the module's name follows, except for the first module."""
    a: Array
    """(rank, in); for an embedding (rank, tokens)."""
    b: Array
    """(out, rank), multiplied by alpha / rank unless alpha is 0 or absent."""

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two matrices, which are unique in the adapter."""
        return f"{self.name}.lora_a", f"{self.name}.lora_b"


def read_gguf_adapter(
    stored: PartialFile, base: BaseModules, max_rank: int
) -> tuple[tuple[GgufPair, ...], bytes]:
    """Read an adapter's matrices; returns them and the SHA-256 of metadata and matrices. Beyond the
    first MAX_METADATA_BYTES, the file is read only if the metadata fits the base model, and the
    matrices have at most twice the elements of an adapter of `max_rank` for all modules of `base`.
    Raises ConfigError."""
    file = stored.name
    head = stored.read(0, MAX_METADATA_BYTES)
    limits = GgufLimits(
        MAX_METADATA_BYTES, MAX_KEYS, MAX_ELEMENTS, MAX_TENSORS_PER_MODULE * len(base.modules)
    )
    opened = parse_gguf(stored.data, Path(file), limits)
    alpha = _checked_alpha(opened, file, base)
    _check_tensors(opened, file, base, max_rank)
    content = _read_tensors(stored, head, opened)
    pairs = {name: _scaled(pair, alpha) for name, pair in _pairs(opened, file).items()}
    used: set[str] = set()
    found = [*_modules(pairs, opened, base, used), *_experts(pairs, file, base, used)]
    for name in pairs.keys() - used:
        raise ConfigError(
            f"{file} has weights for {shown(name)[1:-1]}, which is not a module of the base model "
            f"({base.model_config.architecture}) that takes an adapter"
        )
    for pair in found:
        _check_shapes(pair, file)
    return tuple(found), content


def _read_tensors(stored: PartialFile, head: Array, opened: GgufFile) -> bytes:
    """Read the rest of the tensors after `head`, the start of the file; returns the SHA-256 of
    metadata and tensors."""
    tensors = sorted(opened.tensors.values(), key=lambda tensor: tensor.offset)
    digest = sha256(len(stored.data).to_bytes(8, "little"))
    digest.update(head[: tensors[0].offset].data)
    for tensor in tensors:
        end = tensor.offset + tensor.n_bytes
        stored.read(max(tensor.offset, len(head)), end)
        digest.update(stored.data[tensor.offset : end].data)
    return digest.digest()


@contextmanager
def written(pairs: Sequence[GgufPair]) -> Iterator[FileIO]:
    """A safetensors file in memory with the matrices in `pairs`."""
    matrices = {
        name: matrix
        for pair in pairs
        for name, matrix in zip(pair.names, (pair.a, pair.b), strict=True)
    }
    with open(os.memfd_create("adapter"), "w+b") as memory:
        write_stream(
            memory,
            [(name, "F32", matrix.shape, matrix.nbytes) for name, matrix in matrices.items()],
            map(np.ascontiguousarray, matrices.values()),
        )
        memory.seek(0)
        yield FileIO(memory.fileno(), closefd=False)


def _scaled(pair: Matrices, alpha: float) -> Matrices:
    """`pair` with the second matrix multiplied by alpha / rank; unchanged if alpha is 0."""
    a, b = pair
    return a, b * np.float32(alpha / a.shape[-2]) if alpha else b


def _check_shapes(pair: GgufPair, file: str) -> None:
    rank = len(pair.a)
    expected = ((rank, pair.base.in_features), (pair.base.out_features, rank))
    for name, matrix, shape in zip(pair.names, (pair.a, pair.b), expected, strict=True):
        if matrix.shape != shape:
            raise ConfigError(
                f"{file} has {name} of {_text(matrix.shape)}, the base model and rank "
                f"{rank} need {_text(shape)}"
            )


def _checked_alpha(opened: GgufFile, file: str, base: BaseModules) -> float:
    """`adapter.lora.alpha`; 0 if absent. Raises ConfigError for a file that does not contain a
    LoRA adapter of the base model."""
    kind = opened.value("general.type", str)
    if kind != "adapter":
        raise ConfigError(f"{file} has general.type {shown(kind)}, it must be 'adapter'")
    kind = opened.value("adapter.type", str)
    if kind != "lora":
        raise ConfigError(f"{file} has adapter.type {shown(kind)}, only 'lora' is supported")
    if opened.values("adapter.alora.invocation_tokens", int):
        raise ConfigError(
            f"{file} has adapter.alora.invocation_tokens: activated LoRA (aLoRA) is not supported"
        )
    family = FAMILIES.get(opened.architecture)
    own = architecture_of(base.model_config)
    if family is None or own not in (family.name, *family.others):
        raise ConfigError(
            f"{file} is an adapter of the architecture {shown(opened.architecture)[1:-1]}, the "
            f"base model is a {own}"
        )
    return opened.value("adapter.lora.alpha", float) or 0.0


def _check_tensors(opened: GgufFile, file: str, base: BaseModules, max_rank: int) -> None:
    if not opened.tensors:
        raise ConfigError(f"{file} has 0 low-rank matrices, an adapter needs at least 2")
    most = min(MAX_NUMBERS, 2 * max_rank * base.num_features)
    count = sum(tensor.n_elements for tensor in opened.tensors.values())
    if count > most:
        raise ConfigError(f"{file} has {count} values, at most {most} are allowed")
    for name, tensor in opened.tensors.items():
        stem, end = name[:-7], name[-7:]
        if end not in _ENDS:
            raise ConfigError(f"{file} has {shown(name)[1:-1]}, which is not a LoRA tensor")
        dimensions = 3 if _EXPERTS.fullmatch(stem) else 2
        if len(tensor.shape) != dimensions:
            raise ConfigError(
                f"{file} has {shown(name)[1:-1]} of {len(tensor.shape)} dimensions, it must have "
                f"{dimensions}"
            )
        other = _ENDS[end == _ENDS[0]]
        if f"{stem}{other}" not in opened.tensors:
            raise ConfigError(f"{file} has {shown(name)[1:-1]} and no {shown(stem)[1:-1]}{other}")


def _pairs(opened: GgufFile, file: str) -> dict[str, Matrices]:
    """Name of the adapted tensor -> its matrices. Matrices of stacked experts have a leading expert
    dimension."""
    halves: dict[str, dict[str, Array]] = {}
    for name, tensor in opened.tensors.items():
        halves.setdefault(name[:-7], {})[name[-7:]] = _numbers(tensor, name, file)
    return {stem: _pair(stem, found, file) for stem, found in halves.items()}


def _pair(stem: str, found: Mapping[str, Array], file: str) -> Matrices:
    a, b = (found[end] for end in _ENDS)
    if stem == _TABLE:
        # Embedding rows are looked up, so the file stores the first matrix transposed.
        a = a.T
    if a.shape[:-2] != b.shape[:-2] or a.shape[-2] != b.shape[-1]:
        raise ConfigError(
            f"{file} has {stem}.lora_a of {_text(a.shape)} and {stem}.lora_b of {_text(b.shape)}: "
            f"the ranks are {a.shape[-2]} and {b.shape[-1]}"
        )
    return a, b


def _numbers(tensor: GgufTensor, name: str, file: str) -> Array:
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return tensor.data.astype(np.float32)
    try:
        # NaN and infinite values are reported later, when all values are checked.
        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigError(
            f"{file}: {name} is stored as {tensor.tensor_type.name}: {error}"
        ) from error
    return values.reshape(tensor.shape[::-1])


def _modules(
    pairs: Mapping[str, Matrices], opened: GgufFile, base: BaseModules, used: set[str]
) -> Iterator[GgufPair]:
    """LoRA matrices of linear layers and the embedding. Adds tensor names to `used`."""
    sources = WeightSources(_weight_shapes(pairs, opened), base.model_config, base.weight_map)
    for module in base.modules.values():
        spec = module.spec
        if spec.expert is not None or spec.num_experts is not None:
            continue
        # GGUF files use the names of unquantized weights.
        spec = spec._replace(name=f"{module.name}.weight", part=None, scheme=None)
        try:
            parts = sources.parts(spec)
        except MissingTensor:
            continue
        names = [source.name for part in parts for source in part.sources]
        if module.refusal:
            raise ConfigError(f"{opened.path} has weights for {names[0]}: {module.refusal}")
        label = f"{names[0]} ({module.name})" if names[0] in used else names[0]
        used.update(names)
        matrices = [_matrices(part, pairs, opened) for part in parts]
        yield GgufPair(module, label, *_joined(matrices))


def _weight_shapes(pairs: Mapping[str, Matrices], opened: GgufFile) -> GgufFile:
    """A GGUF file without data whose tensors have the shapes of the adapted weights."""
    nothing: Array = np.empty(0, np.float32)
    tensors = {}
    for name, (a, b) in pairs.items():
        shape = (a.shape[-1], *b.shape[-2::-1])
        tensors[name] = GgufTensor(GGMLQuantizationType.F32, shape, 0, 0, nothing)
    return replace(opened, tensors=tensors)


def _matrices(part: Part, pairs: Mapping[str, Matrices], opened: GgufFile) -> Matrices:
    """The LoRA matrices of a part of a weight."""
    found = [_rows(source, pairs) for source in part.sources]
    if part.combine in (None, np.transpose):
        # A transposed base weight does not change the LoRA matrices: (rank, in) and (out, rank).
        return found[0]
    if isinstance(part.combine, Rows):
        a, b = _joined(found)
        return a, b[part.combine.order]
    raise ConfigError(
        f"{opened.path} has weights for {part.sources[0].name}, whose inputs are permuted in the "
        "base model: adapters for permuted weights are not supported"
    )


def _rows(source: TensorRows, pairs: Mapping[str, Matrices]) -> Matrices:
    a, b = pairs[source.name]
    return a, b if source.order is None else b[source.order]


def _joined(parts: list[Matrices]) -> Matrices:
    """The LoRA matrices of concatenated outputs. Outputs with the same first matrix keep their
    rank; otherwise the ranks add up."""
    first = parts[0][0]
    if all(np.array_equal(a, first) for a, _ in parts):
        return first, np.concatenate([b for _, b in parts])
    rows, ranks = (sum(b.shape[axis] for _, b in parts) for axis in (0, 1))
    joined = np.zeros((rows, ranks), np.float32)
    row = column = 0
    for _, b in parts:
        joined[row : row + b.shape[0], column : column + b.shape[1]] = b
        row, column = row + b.shape[0], column + b.shape[1]
    return np.concatenate([a for a, _ in parts]), joined


def _experts(
    pairs: Mapping[str, Matrices], file: str, base: BaseModules, used: set[str]
) -> Iterator[GgufPair]:
    """LoRA matrices of the routed experts. Adds tensor names to `used`."""
    for layer, stack in base.expert_stacks.items():
        number = int(layer.removeprefix(base.weight_map.layer_prefix))
        for kinds, modules in _projections_of(stack):
            names = [f"blk.{number}.ffn_{kind}_exps.weight" for kind in kinds]
            there = [name for name in names if name in pairs]
            used.update(there)
            for name in there:
                count = len(pairs[name][0])
                if count != len(modules):
                    raise ConfigError(
                        f"{file} has {count} experts in {name}, the base model has {len(modules)}"
                    )
            for expert, module in enumerate(modules if there else ()):
                matrices = [_expert(name, there, expert, pairs) for name in names]
                a, b = _joined(matrices)
                if len(names) > 1 and not module.spec.output_sizes:
                    # The base model interleaves the rows of gate and up.
                    b = b.reshape(len(names), -1, b.shape[-1]).swapaxes(0, 1).reshape(b.shape)
                yield GgufPair(module, f"{there[0]}[{expert}]", a, b)


def _projections_of(stack: ExpertStack) -> Iterator[tuple[tuple[str, ...], list[BaseModule]]]:
    """(projection names in GGUF files, the experts' modules) for each projection of a layer. Gate
    and up may be merged in the checkpoint."""
    for parameter, kinds in _PROJECTIONS.items():
        projections = stack.parameters[parameter]
        if len(projections) < len(kinds):
            yield kinds, projections[0]
            continue
        for kind, modules in zip(kinds, projections, strict=True):
            yield (kind,), modules


def _expert(
    name: str, there: Sequence[str], expert: int, pairs: Mapping[str, Matrices]
) -> Matrices:
    """The LoRA matrices of an expert. For a projection that is not in `there`, the second matrix is
    zero."""
    a, b = pairs[name if name in there else there[0]]
    return a[expert], b[expert] if name in there else np.zeros_like(b[expert])


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
