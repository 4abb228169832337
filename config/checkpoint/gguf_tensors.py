"""Assembles the weights of a model from the tensors of its GGUF file. Names come from the package
`gguf`, as in llama.cpp's converter. This file undoes the converter's other changes (order of rows,
stacked experts, offsets), see
https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    TensorNameMap,
    get_tensor_name_map,
)

from config.checkpoint.gguf_metadata import GgufFile, GgufTensor
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.errors import ConfigError
from config.model.decoder_spec import MXFP4_BLOCK
from config.model.json_fields import shown
from config.model.model_config import ModelConfig

Array = npt.NDArray[Any]

DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint8": ("U8", 1),
}
"""dtype -> (safetensors name, bytes per element)."""
PERMUTED = (
    *("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "internlm2", "baichuan"),
)
"""Architectures whose files interleave the two halves of each q and k head, for a rope that rotates
adjacent elements."""

_TILED = ("qwen35", "qwen35moe")

# Tensors that no weight uses: rope tensors, and the head of a reranker, which is not part of the
# encoder.
_OTHERS = re.compile(
    r"(^|\.)(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.weight$|^cls[._]"
)
_BLOCK = re.compile(r"^blk\.([0-9]{1,9})\.")
# Expert or head indices in the names of tensors that GGUF files stack.
_EXPERT, _NORM = re.compile(r"\.experts\.[0-9]+\."), re.compile(r"\.norms\.[0-9]+\.")
_RENAMED = {
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".dt_bias": ".dt_proj.bias",
    ".sinks": ".sinks.weight",
}
"""Name suffixes that the converter replaces before the lookup."""
_MXFP4_BYTES = 1 + MXFP4_BLOCK // 2
"""Bytes of an MXFP4 block: a scale byte, and two weights per byte."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of a tensor in the file."""

    name: str
    """Name of the tensor in the file."""
    tensor: GgufTensor
    expert: int | None = None
    """Index of the expert in a stacked tensor; None: the whole tensor."""
    order: npt.NDArray[np.int64] | None = None
    """Indices of the stored rows in checkpoint order; None: unchanged order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in checkpoint order, outermost dimension first."""
        shape = self.tensor.shape[::-1]
        if self.expert is not None:
            shape = shape[1:]
        return shape if self.order is None else (len(self.order), *shape[1:])

    def rows(self) -> Array:
        """(rows, elements or bytes per row), as stored, in checkpoint order. Quantized rows are
        reordered without dequantizing them."""
        data = self.tensor.data if self.expert is None else self.tensor.data[self.expert]
        data = data.reshape(data.shape[0] if data.ndim else 1, -1)
        return data if self.order is None else data[self.order]


@dataclass(frozen=True, slots=True)
class Rows:
    """A Part.combine that concatenates the rows of all sources and permutes them."""

    order: npt.NDArray[np.int64]

    def __call__(self, *parts: Array) -> Array:
        rows: Array = np.concatenate(parts)[self.order]
        return rows


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of the bytes of a weight."""

    sources: tuple[TensorRows, ...]
    combine: Callable[..., Array] | None = None
    """Combines the rows of the sources; None: there is a single source."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the converted checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of DTYPES; uint8: the sources are not dequantized."""
    parts: tuple[Part, ...]
    change: Callable[[Array], Array] | None = None
    """Function applied to the values; None: the values are unchanged."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def only_source(self) -> TensorRows | None:
        """The only source of the entry, if at most the order of its rows changes; otherwise
        None."""
        if self.change is None and len(self.parts) == 1 and self.parts[0].combine is None:
            return self.parts[0].sources[0]
        return None


def num_blocks(file: GgufFile) -> int:
    """Number of layers in `file`: the highest layer index of a tensor, plus 1."""
    matches = (_BLOCK.match(name) for name in file.tensors)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def model_entries(
    file: GgufFile, model_config: ModelConfig, weight_map: WeightMap, dtype: str
) -> list[Entry]:
    """Entries for all tensors of the checkpoint: matrices in `dtype`, vectors in float32, MXFP4
    weights in uint8. Raises ConfigError."""
    tensors = WeightSources(file, model_config, weight_map)
    entries = [tensors.entry(spec, dtype) for spec in weight_map.entries()]
    tensors.check_all_used()
    return entries


class MissingTensor(ConfigError):
    """The file lacks a tensor that a weight needs."""


class WeightSources:
    """Finds the tensors of a file for each weight."""

    def __init__(self, file: GgufFile, model_config: ModelConfig, weight_map: WeightMap) -> None:
        self._file = file
        self._facts = model_config
        self._used: set[str] = set()
        self._names = _name_map(file.architecture)
        self._layer = re.compile(f"^{re.escape(weight_map.layer_prefix)}([0-9]+)\\.")
        self._layer_prefix = weight_map.layer_prefix

    def check_all_used(self) -> None:
        """Raise ConfigError for a tensor that no weight uses, except tensors of MTP layers, which
        follow the other layers and are not loaded, and tensors in _OTHERS."""
        for name in self._file.tensors:
            block = _BLOCK.match(name)
            is_mtp = block is not None and int(block[1]) >= self._facts.num_layers
            if name not in self._used and not is_mtp and not _OTHERS.search(name):
                raise ConfigError(
                    f"{self._file.path} has a tensor {shown(name)}, which "
                    f"{self._file.architecture} models do not have"
                )

    def entry(self, spec: WeightSpec, dtype: str) -> Entry:
        """The entry for the weight that `spec` describes."""
        parts = self.parts(spec)
        if spec.mxfp4:
            return Entry(spec.name, spec.shape, "uint8", parts)
        shape = spec.shape
        if all(part.combine is None for part in parts):
            stored = [source.shape for part in parts for source in part.sources]
            shape = (sum(rows for rows, *_ in stored), *stored[0][1:])
            # Files omit dimensions of 1, such as the input channel of a convolution, and may store
            # a vector as rows.
            is_vector = len(spec.shape) == 1 and math.prod(shape) == spec.shape[0]
            if is_vector or _squeezed(shape) == _squeezed(spec.shape):
                shape = spec.shape
        is_vector = len(shape) == 1
        change = _change(spec)
        return Entry(spec.name, shape, "float32" if is_vector else dtype, parts, change)

    def parts(self, spec: WeightSpec) -> tuple[Part, ...]:
        """The parts of the weight in order. Raises MissingTensor for a tensor that the file lacks;
        ConfigError for a tensor of the wrong shape or type."""
        kind = spec.name.rpartition(".")[2]
        if spec.num_experts is not None:
            return tuple(self._stacked_experts(spec, spec.num_experts))
        if ".in_proj_qkvz." in spec.name:
            return self._fused_delta(spec, kind)
        if spec.name.endswith(
            (".shared_mlp.input_linear.weight", ".shared_mlp.output_linear.weight")
        ):
            return self._merged_mlp(spec)
        if spec.name.endswith(".linear_attn.out_proj.weight"):
            return self._delta_output(spec)
        if spec.name.endswith(".kv_b_proj.weight"):
            return self._latent_heads(spec)
        name = self._stored_name(spec.name)
        if name not in self._file.tensors and (
            found := self._fused_part(spec, kind) or self._split_parts(spec, kind)
        ):
            return found
        stacked = (spec.expert, spec.total_experts)
        if spec.row is not None:
            stacked = (spec.row, spec.output_sizes[spec.outputs[0]])
        source = self._source(name, spec.name, *stacked)
        if spec.transposed and len(source.shape) == 2:
            self._check_shape(source, spec.shape[::-1], spec.name)
            return (Part((source,), np.transpose),)
        order = self._order(spec, source, name)
        return (Part((replace(source, order=order),)),)

    def _stored_name(self, name: str) -> str:
        for theirs, ours in _RENAMED.items():
            if name.endswith(theirs):
                name = name.removesuffix(theirs) + ours
        block = self._block(name)
        name = self._layer.sub(f"{self._layer_prefix}0.", name)
        name = _NORM.sub(".", _EXPERT.sub(".experts.", name))
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias")) or ""
        return found.replace("blk.0.", block, 1) if block else found

    def _block(self, weight: str) -> str:
        """Beginning of the names of the file's tensors for the layer of `weight`; empty for a
        weight outside the layers."""
        layer = self._layer.match(weight)
        return f"blk.{layer[1]}." if layer else ""

    def _source(
        self,
        name: str,
        weight: str,
        expert: int | None = None,
        num_experts: int | None = None,
    ) -> TensorRows:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise MissingTensor(
                f"{self._file.path} has no tensor {name or f'for {weight}'}, which its metadata "
                f"requires for {self._file.architecture}"
            )
        self._used.add(name)
        if expert is not None and (len(tensor.shape) < 2 or tensor.shape[-1] != num_experts):
            raise ConfigError(
                f"the metadata of {self._file.path} has {num_experts} experts or heads for "
                f"{weight}, the shape of {name} is {_size_text(tensor.shape[::-1])}"
            )
        return TensorRows(name, tensor, expert)

    def _check_shape(self, source: TensorRows, shape: tuple[int, ...], weight: str) -> None:
        if source.shape != shape:
            raise ConfigError(
                f"{self._file.path} has a tensor of {_size_text(source.shape)} for {weight}, its "
                f"metadata requires {_size_text(shape)}"
            )

    def _order(
        self, spec: WeightSpec, source: TensorRows, name: str
    ) -> npt.NDArray[np.int64] | None:
        rows = source.shape[0] if source.shape else 1
        is_attention = "qkv_proj" in spec.parameter
        if is_attention and spec.row_groups is not None:
            self._check_shape(source, (sum(spec.output_sizes), *source.shape[1:]), spec.name)
            return _grouped(spec.row_groups, spec.output_sizes)
        if (order := self._delta_order(spec.name, rows)) is not None:
            return order
        counts = {0: self._facts.num_heads, 1: self._facts.num_kv_heads}
        heads = counts.get(spec.outputs[0]) if len(spec.outputs) == 1 else None
        if not is_attention or heads is None or self._file.architecture not in PERMUTED:
            return None
        return self._halves(rows, heads, name)

    def _halves(self, rows: int, heads: int, name: str) -> npt.NDArray[np.int64]:
        if rows % (2 * heads):
            raise ConfigError(
                f"{self._file.path} has {rows} rows in {name}, it must be a multiple of "
                f"{2 * heads} for {heads} heads"
            )
        # Stored rows of a head alternate between its first and second half.
        stored = np.arange(rows).reshape(heads, rows // heads // 2, 2)
        halves: npt.NDArray[np.int64] = stored.swapaxes(1, 2).reshape(-1)
        return halves

    def _fused_part(self, spec: WeightSpec, kind: str) -> tuple[Part, ...]:
        """q, k or v from the file's fused qkv tensor; empty for another weight, or if the file has
        no such tensor."""
        block = self._block(spec.name)
        if not block or "qkv_proj" not in spec.parameter or len(spec.outputs) != 1:
            return ()
        name = f"{block}attn_qkv.{kind}"
        if name not in self._file.tensors:
            return ()
        source = self._source(name, spec.name)
        self._check_shape(source, (sum(spec.output_sizes), *spec.shape[1:]), spec.name)
        begin = sum(spec.output_sizes[: spec.outputs[0]])
        order = np.arange(begin, begin + spec.output_sizes[spec.outputs[0]])
        return (Part((replace(source, order=order),)),)

    def _split_parts(self, spec: WeightSpec, kind: str) -> tuple[Part, ...]:
        """The checkpoint's fused qkv weight from three tensors of the file; empty for another
        weight, or if the file has no such tensors."""
        block = self._block(spec.name)
        if not block or "qkv_proj" not in spec.parameter or len(spec.outputs) != 3:
            return ()
        names = [f"{block}attn_{part}.{kind}" for part in "qkv"]
        if names[0] not in self._file.tensors:
            return ()
        sources = [self._source(name, spec.name) for name in names]
        for source, size in zip(sources, spec.output_sizes, strict=True):
            self._check_shape(source, (size, *spec.shape[1:]), spec.name)
        if self._file.architecture in PERMUTED:
            for index, heads in enumerate((self._facts.num_heads, self._facts.num_kv_heads)):
                order = self._halves(spec.output_sizes[index], heads, names[index])
                sources[index] = replace(sources[index], order=order)
        if spec.row_groups is None:
            return tuple(Part((source,)) for source in sources)
        grouped = _grouped(spec.row_groups, spec.output_sizes)
        return (Part(tuple(sources), Rows(grouped)),)

    def _latent_heads(self, spec: WeightSpec) -> tuple[Part, ...]:
        """kv_b_proj of MLA. Newer files store the transposed keys of all heads and the values in
        two tensors."""
        name = self._stored_name(spec.name)
        if name in self._file.tensors:
            return (Part((self._source(name, spec.name),)),)
        heads, rank = self._facts.num_heads, spec.shape[1]
        size = self._facts.fields.count("v_head_dim")
        keys = spec.shape[0] // heads - size
        key, value = (
            self._source(self._stored_name(spec.name.replace("kv_b_proj", part)), spec.name)
            for part in ("k_b_proj", "v_b_proj")
        )
        self._check_shape(key, (heads, rank, keys), spec.name)
        self._check_shape(value, (heads, size, rank), spec.name)

        def combine(keys_t: Array, values: Array) -> Array:
            parts = (
                keys_t.reshape(heads, rank, keys).swapaxes(1, 2),
                values.reshape(heads, size, rank),
            )
            return np.concatenate(parts, axis=1)

        return (Part((key, value), combine),)

    def _fused_delta(self, spec: WeightSpec, kind: str) -> tuple[Part, ...]:
        """Queries, keys, values and gates of gated DeltaNet, grouped by key head in the checkpoint.
        Older files have the same layout; newer files store the gates in a separate tensor."""
        block = self._block(spec.name)
        name = f"{block}ssm_in.{kind}"
        if name in self._file.tensors:
            return (Part((self._source(name, spec.name),)),)
        qkv = self._source(f"{block}attn_qkv.{kind}", spec.name)
        gate = self._source(f"{block}attn_gate.{kind}", spec.name)
        sizes = tuple(spec.output_sizes[output] for output in spec.outputs)
        self._check_shape(qkv, (sum(sizes[:3]), *spec.shape[1:]), spec.name)
        self._check_shape(gate, (sizes[3], *spec.shape[1:]), spec.name)
        assert spec.row_groups is not None
        return (Part((qkv, gate), Rows(_grouped(spec.row_groups, sizes))),)

    def _delta_sizes(self) -> tuple[int, int, int]:
        """(key heads, value heads per key head, size of a value head)."""
        fields = self._facts.fields
        keys, values = (fields.count(f"linear_num_{kind}_heads") for kind in ("key", "value"))
        return keys, values // keys, fields.count("linear_value_head_dim")

    def _delta_order(self, name: str, rows: int) -> npt.NDArray[np.int64] | None:
        """TensorRows.order for gated DeltaNet; None if the order does not change. Files of Qwen3.5
        store the first value head of every key head, then the second value head of every key head,
        and so on."""
        if self._file.architecture not in _TILED or ".linear_attn." not in name:
            return None
        keys, each, size = self._delta_sizes()
        if name.endswith((".A_log", ".dt_bias", ".in_proj_a.weight", ".in_proj_b.weight")):
            size = 1
        elif ".norm." in name:
            return None
        num_values = keys * each * size
        if rows < num_values:
            raise ConfigError(
                f"{self._file.path} has {rows} rows for {name}, its metadata requires at least "
                f"{num_values}"
            )
        tiled = np.arange(rows - num_values, rows).reshape(each, keys, size)
        # Queries and keys come before the values.
        return np.concatenate((np.arange(rows - num_values), tiled.swapaxes(0, 1).reshape(-1)))

    def _delta_output(self, spec: WeightSpec) -> tuple[Part, ...]:
        """Output projection of gated DeltaNet. Its inputs are the value heads, which are put into
        checkpoint order."""
        source = self._source(self._stored_name(spec.name), spec.name)
        if self._file.architecture not in _TILED:
            return (Part((source,)),)
        self._check_shape(source, spec.shape, spec.name)
        order = self._delta_order(".linear_attn.", spec.shape[1])
        return (Part((source,), lambda values: values[:, order]),)

    def _merged_mlp(self, spec: WeightSpec) -> tuple[Part, ...]:
        """The shared MLP, with gate and up merged in the checkpoint. GGUF files store it as a
        shared expert, or as a plain MLP in models without experts."""
        block = self._block(spec.name)
        is_down = spec.name.endswith("output_linear.weight")
        parts = ("down",) if is_down else ("gate", "up")
        shape = (spec.shape[0] // len(parts), spec.shape[1])
        end = "" if f"{block}ffn_{parts[0]}.weight" in self._file.tensors else "_shexp"
        sources = [self._source(f"{block}ffn_{part}{end}.weight", spec.name) for part in parts]
        for source in sources:
            self._check_shape(source, shape, spec.name)
        return tuple(Part((source,)) for source in sources)

    def _stacked_experts(self, spec: WeightSpec, count: int) -> Iterator[Part]:
        """Weights or biases of all `count` experts. The file stores gate, up and down
        separately."""
        path = spec.name
        kind = "bias" if path.endswith("_bias") else "weight"
        stem = path.removesuffix("_bias").removesuffix("_blocks").removesuffix("_scales")
        if (block := self._block(path)) and path.endswith("_linear.weight"):
            parts = ("down",) if path.endswith("output_linear.weight") else ("gate", "up")
            stored = [f"{block}ffn_{part}_exps.weight" for part in parts]
        else:
            names = [stem] if stem.endswith("down_proj") else []
            both = ("gate_proj", "up_proj")
            names = names or [stem.replace("gate_up_proj", part) for part in both]
            stored = [self._stored_name(f"{name}.{kind}") for name in names]
        if kind == "bias":
            sources = tuple(self._source(name, path) for name in stored)
            for source in sources:
                self._check_shape(source, (count, spec.shape[1] // len(sources)), path)
            yield Part(sources, lambda *parts: np.stack(parts, axis=-1))
            return
        if spec.mxfp4:
            rows, columns = spec.shape[1], spec.shape[2] * MXFP4_BLOCK
        else:
            rows, columns = spec.shape[:0:-1] if spec.transposed else spec.shape[1:]

        def joined(parts: tuple[Array, ...]) -> Array:
            """Concatenate gate and up rows, or interleave them if the spec has no output sizes."""
            if spec.output_sizes:
                return np.concatenate(parts)
            return np.stack(parts, axis=1).reshape(rows, -1)

        combine: Callable[..., Array] = {
            "": lambda *parts: joined(parts).T if spec.transposed else joined(parts),
            "blocks": lambda *parts: _mxfp4_blocks(joined(parts)),
            "scales": lambda *parts: _mxfp4(joined(parts))[..., 0],
        }[spec.mxfp4]
        for expert in range(count):
            sources = tuple(self._source(name, path, expert, count) for name in stored)
            for source in sources:
                self._check_shape(source, (rows // len(sources), columns), path)
                if spec.mxfp4 and source.tensor.tensor_type != GGMLQuantizationType.MXFP4:
                    raise ConfigError(
                        f"{self._file.path} has experts in MXFP4 and {path} in "
                        f"{source.tensor.tensor_type.name}, all must be in MXFP4"
                    )
            yield Part(sources, combine)


def _name_map(architecture: str) -> TensorNameMap:
    """Map from checkpoint names to file names, for a single layer with index 0."""
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, 1)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _grouped(groups: int, sizes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Row order that regroups the concatenated outputs of `sizes` into `groups` groups with an
    equal part of every output."""
    ends = np.cumsum(sizes)
    outputs = [
        np.arange(end - size, end).reshape(groups, -1)
        for size, end in zip(sizes, ends, strict=True)
    ]
    return np.concatenate(outputs, axis=1).reshape(-1)


def _change(spec: WeightSpec) -> Callable[[Array], Array] | None:
    """Conversion of stored values: files store norm weights with the offset already added, and
    -exp(A_log) instead of A_log."""
    if spec.offset:
        offset = np.float32(spec.offset)
        return lambda values: values - offset
    if spec.name.endswith(".A_log"):
        return lambda values: np.log(-values)
    return None


def _mxfp4(rows: Array) -> Array:
    """`rows` as (..., blocks, bytes of a block)."""
    blocks: Array = rows.reshape(*rows.shape[:-1], -1, _MXFP4_BYTES)
    return blocks


def _mxfp4_blocks(rows: Array) -> Array:
    """The packed weights in checkpoint order. A byte of the checkpoint contains weights 2i and
    2i + 1; a byte of the file contains weights i and i + 16."""
    packed = _mxfp4(rows)[..., 1:]
    codes = np.concatenate((packed & 0xF, packed >> 4), axis=-1)
    blocks: Array = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks


def _size_text(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "one number"
