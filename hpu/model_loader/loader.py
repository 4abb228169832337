"""Loads weights from safetensors into a model's parameters, tensor by tensor, never from pickles.
A rank reads the part of a sharded tensor that covers its shard; 4-bit bitsandbytes tensors are read
whole."""

import logging
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.checkpoint.safetensors_files import StoredTensor, read_header, weight_files
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.shard import Interval, Shard, shard_of
from config.checkpoint.weight_maps.text_part import OUTSIDE
from config.errors import CheckpointError, bytes_text
from config.model.quantization.base import Role
from config.progress import CountBar
from hpu.distributed.process_groups import SINGLE, ProcessGroup, shard_rank
from hpu.model_loader.bitsandbytes import decode_flat
from hpu.model_loader.quantized_weights import (
    check_kv_scale,
    check_part,
    check_powers,
    dequantize,
    dequantize_mxfp4,
    to_pairs,
    unpack_part,
)
from hpu.model_loader.tensor_reader import Read, TensorReader

logger = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights, by their safetensors names."""
MXFP4_DTYPE = "U8"
QUANTIZED_DTYPES = {
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    # Read as bytes: torch before 2.7 lacks the type.
    "F8_E8M0": torch.uint8,
    MXFP4_DTYPE: torch.uint8,
    **DTYPES,
}
"""Dtypes of the tensors of quantized weights, by their safetensors names."""
MAX_NAMES_IN_ERROR = 5
MIN_MAPPED_BYTES = 2**20

Progress = Callable[[int, int], None]
"""Called after each tensor with the bytes loaded so far and the total bytes."""


class Loadable(Protocol):
    """A model, or several models that share a checkpoint."""

    @property
    def weight_map(self) -> WeightMap: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their paths in `weight_map`."""
        ...


def load_weights(
    model: Loadable,
    path: str,
    *,
    on_progress: Progress,
    group: ProcessGroup = SINGLE,
    expert_group: ProcessGroup = SINGLE,
    is_stage: bool = False,
) -> int:
    """Fill `model` from the safetensors in folder `path`, converting dtypes. Returns the bytes that
    were read: for sharded parameters the part that covers the shard of this rank of the
    tensor-parallel `group`, and of `expert_group` if experts are distributed (4-bit bitsandbytes
    weights are read whole); for a pipeline stage (`is_stage`) only the tensors of its own
    parameters.

    Tensors that match a parameter in host memory are read directly into it. Other tensors are freed
    once they are copied; tensors that are combined (parts of a quantized weight, halves of an MXFP4
    weight, parts of a device parameter) stay in memory until the last of them is read. Raises
    CheckpointError before any tensor is read if tensors are missing, unexpected, duplicate, or of a
    wrong shape or dtype; while reading, for invalid values. Raises ConfigError if a file cannot be
    read.
    """
    parameters = dict(model.named_parameters())
    at = shard_rank(group, expert_group)
    files = {
        file: [
            _Source(stored, shard, spec)
            for stored, spec in tensors
            if (not is_stage or _is_local(spec, parameters))
            and (shard := _resident_shard(shard_of(spec, at), parameters)) is not None
        ]
        for file, tensors in _match(model.weight_map, Path(path)).items()
    }
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    filler = _Filler()
    quantized = _QuantizedWeights(parameters, filler, files.values())
    loaded = 0
    with _progress_bar(total) as bar, TensorReader() as reader:
        for file, tensors in files.items():
            reads = _reads(tensors, parameters, filler)
            for tensor, read in zip(tensors, reader.read(file, reads), strict=True):
                spec = tensor.shard.spec
                if tensor.whole.mxfp4 == "scales":
                    check_powers(read.target, f"{tensor.stored.name} in {file}")
                if spec.is_kv_scale:
                    check_kv_scale(read.target, f"{tensor.stored.name} in {file}")
                    filler.fill(parameters[spec.parameter], spec, read.target.reshape(1))
                elif spec.part is not None:
                    quantized.add(tensor, read.target, file)
                elif filler.place(parameters[spec.parameter], spec, read.target.dtype) is None:
                    filler.fill(parameters[spec.parameter], spec, read.target)
                # Release the memory before the next file is read.
                del read
                loaded += tensor.num_bytes
                bar.update(tensor.num_bytes)
                on_progress(loaded, total)
    if at.size > 1 or at.expert_size > 1:
        logger.info(
            "Weights: rank %d of %d read %s", group.rank, group.size, bytes_text(reader.num_bytes)
        )
    return reader.num_bytes


def fill_parameter(parameter: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
    """Copy `tensor`, in the checkpoint's order, into the part of the host `parameter` that it
    fills. For a sharded parameter `tensor` is this rank's part."""
    _Filler().fill(parameter, spec, tensor)


class _Source(NamedTuple):
    """A tensor of a file, and the part of it that this rank reads."""

    stored: StoredTensor
    shard: Shard
    whole: WeightSpec
    """The tensor's spec over all ranks."""

    @property
    def num_bytes(self) -> int:
        dim, intervals = self.shard.stored
        if intervals is None:
            return self.stored.num_bytes
        return self.stored.num_bytes // self.stored.shape[dim] * _length(intervals)


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def _resident_shard(shard: Shard | None, parameters: Mapping[str, Tensor]) -> Shard | None:
    """`shard`, with the spec of the MXFP4 parameter if the model keeps this MXFP4 tensor
    unconverted."""
    if shard is None or shard.spec.mxfp4_parameter not in parameters:
        return shard
    parameter = shard.spec.mxfp4_parameter
    return shard._replace(spec=shard.spec._replace(parameter=parameter, mxfp4=""))


def _is_local(spec: WeightSpec, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the model has the parameter, quantized or not."""
    own = spec.mxfp4_parameter if spec.part is None else spec.quantized_parameter
    return spec.parameter in parameters or own in parameters


class _QuantizedWeights:
    """Fills parameters of layers that stay quantized; other quantized weights are dequantized once
    all tensors of their module are read."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        filler: "_Filler",
        files: Iterable[Sequence["_Source"]],
    ) -> None:
        self._parameters = parameters
        self._filler = filler
        self._missing: dict[str, int] = {}
        """Unread tensors per module."""
        for sources in files:
            for spec in (own.spec for source in sources for own in source.shard.each_expert()):
                if spec.part is not None:
                    self._missing[spec.module] = self._missing.get(spec.module, 0) + 1
        self._found: dict[str, dict[Role, Tensor]] = {}

    def add(self, source: "_Source", tensor: Tensor, file: Path) -> None:
        """Add `tensor`, as read from the file. Raises CheckpointError for invalid values."""
        check_part(tensor, source.shard, f"{source.stored.name} in {file}", source.whole.shape)
        count = source.shard.spec.num_experts
        tensors: Iterable[Tensor] = (tensor,) if count is None else tensor
        for shard, own in zip(source.shard.each_expert(), tensors, strict=True):
            self._add(shard, own, source.whole)

    def _add(self, shard: Shard, tensor: Tensor, whole: WeightSpec) -> None:
        """Add the tensor of a single weight. `whole`: see _Source."""
        spec = shard.spec
        assert spec.part is not None and spec.scheme is not None
        role = spec.part.role
        self._missing[spec.module] -= 1
        weight = self._parameters.get(spec.parameter)
        own = self._parameters.get(spec.quantized_parameter)
        if own is not None:
            self._fill(own, spec, unpack_part(tensor, shard))
            return
        if weight is None:
            # A layer that keeps its weight quantized does not need the tensor.
            return
        found = self._found.setdefault(spec.module, {})
        if spec.scheme.is_flat:
            found[role] = tensor
        elif role not in ("shape", "input_scale"):
            found[role] = unpack_part(tensor, shard)
        if self._missing[spec.module] == 0:
            parts = self._found.pop(spec.module)
            if spec.scheme.is_flat:
                plain = _part_of(decode_flat(parts, whole.shape, spec.module), shard)
            else:
                plain = dequantize(parts, spec.scheme)
            self._filler.fill(weight, _unquantized(spec), plain)

    def _fill(self, parameter: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
        assert spec.part is not None and spec.scheme is not None
        if spec.part.role == "groups":
            # Group indices have a row for each output of the layer.
            own = parameter if spec.expert is None else parameter[spec.expert]
            with torch.no_grad():
                own[list(spec.outputs) or [0]] = tensor.to(parameter.dtype)
            return
        if spec.part.role == "values" and spec.scheme.bits == 4:
            tensor = to_pairs(tensor)
        self._filler.fill(parameter, _unquantized(spec), tensor)


def _part_of(whole: Tensor, shard: Shard) -> Tensor:
    if shard.intervals is None:
        return whole
    return torch.cat([whole.narrow(shard.dim, a, b - a) for a, b in shard.intervals], shard.dim)


def _unquantized(spec: WeightSpec) -> WeightSpec:
    return spec._replace(part=None, scheme=None)


def _reads(
    tensors: Sequence[_Source],
    parameters: Mapping[str, Tensor],
    filler: "_Filler",
) -> Iterator[Read]:
    """Read targets: the parameter itself if the bytes match, else a temporary tensor."""
    for source in tensors:
        stored, spec = source.stored, source.shard.spec
        dim, intervals = source.shard.stored
        dtype = QUANTIZED_DTYPES[stored.dtype]
        target = None
        if spec.part is None:
            target = filler.place(parameters[spec.parameter], spec, dtype)
        if target is None:
            shape = stored.shape
            if intervals is not None:
                shape = (*shape[:dim], _length(intervals), *shape[dim + 1 :])
            target = _own_memory(shape, dtype)
        yield Read(stored, target, dim, intervals)


def _own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Tensor to be filled. Memory of MIN_MAPPED_BYTES or more returns to the system when it is
    freed: memory from malloc stays in the process, in pieces that may be too small for later
    tensors."""
    size = math.prod(shape) * dtype.itemsize
    if size < MIN_MAPPED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def _match(
    weight_map: WeightMap, folder: Path
) -> dict[Path, list[tuple[StoredTensor, WeightSpec]]]:
    """Needed tensors of each file. Raises CheckpointError for missing, unexpected and duplicate
    tensors, and for wrong shapes and dtypes."""
    headers = {file: read_header(file) for file in weight_files(folder)}
    shapes = {
        weight_map.map_name(stored.name): stored.shape
        for header in headers.values()
        for stored in header
    }
    specs = {spec.name: spec for spec in weight_map.stored_as(shapes).entries()}
    optional = {spec.name: spec for spec in weight_map.optional}
    files: dict[Path, list[tuple[StoredTensor, WeightSpec]]] = {}
    found: dict[str, Path] = {}
    left_over: list[str] = []
    wrong: list[str] = []
    num_outside = 0
    for file, header in headers.items():
        files[file] = []
        for stored in header:
            name = weight_map.map_name(stored.name)
            spec = specs.get(name) or optional.get(name)
            if spec is not None and spec.is_kv_scale:
                # A KV scale is a single tensor under several possible names.
                name = spec.parameter
            if spec is None:
                num_outside += name.startswith(OUTSIDE)
                if not weight_map.ignores(name):
                    left_over.append(f"{name} in {file.name}")
            elif name in found:
                wrong.append(f"{name} is in {found[name].name} and in {file.name}")
            else:
                found[name] = file
                files[file].append((stored, spec))
                wrong += _mismatches(spec, stored, file)
    missing = [
        f"{name} {_format_shape(spec.stored_shape)}"
        for name, spec in specs.items()
        if name not in found
    ]
    problems = [_listed(wrong)] if wrong else []
    if missing:
        problems.append(f"{len(missing)} of {len(specs)} are missing: {_listed(missing)}")
    if left_over:
        problems.append(f"the model does not have {_listed(left_over)}")
    if problems:
        raise CheckpointError(
            f"the tensors in {folder} do not match the model: {'; '.join(problems)}"
        )
    if optional:
        parameters = {spec.parameter for spec in optional.values()}
        logger.info(
            "KV cache: the checkpoint has %d of %d scales of keys and values; others are 1",
            len(parameters & found.keys()),
            len(parameters),
        )
    if num_outside and not weight_map.has_tower:
        logger.info(
            "%d tensors in %s are not the text model's and are not loaded: images, audio and video "
            "are not served",
            num_outside,
            folder,
        )
    return files


def _mismatches(spec: WeightSpec, stored: StoredTensor, file: Path) -> Iterator[str]:
    if not spec.fits(stored.shape):
        yield (
            f"{spec.name} in {file.name} is {_format_shape(stored.shape)}, the model needs "
            f"{_format_shape(spec.stored_shape)}"
        )
    elif spec.part is not None:
        if stored.dtype not in spec.part.dtypes:
            yield (
                f"{spec.name} in {file.name} is {stored.dtype}, by the quantization_config of "
                f"config.json it must be {' or '.join(spec.part.dtypes)}"
            )
    elif spec.mxfp4:
        if stored.dtype != MXFP4_DTYPE:
            yield f"{spec.name} in {file.name} is {stored.dtype}, MXFP4 must be {MXFP4_DTYPE}"
    elif stored.dtype not in DTYPES:
        yield (
            f"{spec.name} in {file.name} is {stored.dtype}, it must be one of "
            f"{', '.join(DTYPES)}: config.json has no quantization_config for this dtype"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_IN_ERROR
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    return f"{shown} and {more} more" if more > 0 else shown


class _Filler:
    """Copies tensors into parameters; for sharded parameters the tensors are this rank's parts.

    A device parameter that is filled by several tensors is assembled on the host and copied once:
    on a lazy device each write to a part of a parameter copies the whole parameter.
    """

    def __init__(self) -> None:
        self._unfinished: dict[str, tuple[Tensor, int]] = {}
        """Parameter path -> its host copy, and the number of filled elements."""
        self._halves: dict[str, tuple[WeightSpec, Tensor]] = {}
        """Parameter path -> the first half (blocks or scales) of its MXFP4 weight."""

    def place(self, parameter: Tensor, spec: WeightSpec, dtype: torch.dtype) -> Tensor | None:
        """The part of `parameter` into which the bytes of a tensor of `dtype` can be read directly;
        None if a copy is needed. Zeroes the padding rows of the parameter."""
        if parameter.device.type != "cpu" or dtype != parameter.dtype or not spec.is_stored_as_is:
            return None
        part = parameter.detach()
        if spec.rounds_up:
            part[spec.shape[0] :].zero_()
            part = part[: spec.shape[0]]
        if spec.expert is not None:
            part = part[spec.expert]
        if spec.outputs != tuple(range(len(spec.output_sizes))):
            if len(spec.outputs) != 1 or spec.num_experts is not None:
                return None
            part = part.split_with_sizes(spec.output_sizes)[spec.outputs[0]]
        return part if part.is_contiguous() else None

    def fill(self, parameter: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
        """Copy `tensor` into its part of `parameter`, or keep it until the other parts come."""
        with torch.no_grad():
            if spec.mxfp4:
                self._fill_mxfp4(parameter, spec, tensor)
                return
            tensor = _as_stored(spec, tensor)
            if parameter.device.type == "cpu":
                self._fill_part(parameter, spec, _parts(spec, tensor))
            elif (spec.output_sizes, spec.expert, spec.num_experts) == ((), None, None):
                # Converted on the host: on the device the conversion would need memory for both
                # dtypes.
                parameter.copy_(_padded_shard(spec, tensor, parameter).to(parameter.dtype))
            else:
                self._collect(parameter, spec, _parts(spec, tensor), spec.num_elements())

    def _fill_mxfp4(self, parameter: Tensor, spec: WeightSpec, tensor: Tensor) -> None:
        """Keep the blocks or scales that come first; when the other tensor comes, dequantize expert
        by expert."""
        if spec.parameter not in self._halves:
            self._halves[spec.parameter] = spec, tensor
            return
        first, half = self._halves.pop(spec.parameter)
        blocks, scales = (tensor, half) if spec.mxfp4 == "blocks" else (half, tensor)
        columns = slice(*(spec.mxfp4_columns or (None,)))
        parts = (dequantize_mxfp4(*both)[:, columns] for both in zip(blocks, scales, strict=True))
        if parameter.device.type == "cpu":
            self._fill_part(parameter, spec, parts)
        else:
            num_elements = first.num_elements() + spec.num_elements()
            self._collect(parameter, spec, parts, num_elements)

    def _collect(
        self, parameter: Tensor, spec: WeightSpec, parts: Iterable[Tensor], num_elements: int
    ) -> None:
        if spec.parameter not in self._unfinished:
            self._unfinished[spec.parameter] = (
                torch.empty(parameter.shape, dtype=parameter.dtype),
                0,
            )
        host, filled = self._unfinished[spec.parameter]
        self._fill_part(host, spec, parts)
        filled += num_elements
        self._unfinished[spec.parameter] = host, filled
        if filled == host.numel():
            parameter.copy_(host)
            del self._unfinished[spec.parameter]

    def _fill_part(self, target: Tensor, spec: WeightSpec, parts: Iterable[Tensor]) -> None:
        targets = target if spec.expert is None else target[spec.expert]
        for part, source in zip(_parts(spec, targets), parts, strict=True):
            if not spec.output_sizes:
                part.copy_(_padded_shard(spec, source, part))
                continue
            outputs = part.split_with_sizes(spec.output_sizes)
            if spec.row is not None:
                outputs[spec.outputs[0]][spec.row].copy_(source)
                continue
            sizes = [spec.output_sizes[output] for output in spec.outputs]
            for output, own in zip(spec.outputs, source.split_with_sizes(sizes), strict=True):
                outputs[output].copy_(own)


def _padded_shard(spec: WeightSpec, tensor: Tensor, parameter: Tensor) -> Tensor:
    missing = parameter.shape[0] - tensor.shape[0] if spec.rounds_up else 0
    if not missing:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


def _parts(spec: WeightSpec, tensor: Tensor) -> Iterable[Tensor]:
    return tensor if spec.num_experts is not None else (tensor,)


def _as_stored(spec: WeightSpec, tensor: Tensor) -> Tensor:
    """Checkpoint `tensor` with the order and the values of the parameter."""
    if spec.leading_rows is not None:
        tensor = tensor[: spec.leading_rows]
    if spec.transposed:
        tensor = tensor.transpose(-1, -2)
    if spec.row_groups is not None:
        tensor = _ungrouped(tensor, spec, spec.row_groups)
    if spec.interleaved_size is not None:
        tensor = _deinterleave_rope(tensor, spec, spec.interleaved_size)
    if spec.offset:
        tensor = tensor.float() + spec.offset
    if spec.normalized:
        tensor = functional.normalize(tensor.float())
    return tensor if spec.repeats is None else tensor.expand(spec.repeats, *tensor.shape)


def _ungrouped(tensor: Tensor, spec: WeightSpec, num_groups: int) -> Tensor:
    """`tensor` with grouped outputs reordered to contiguous outputs."""
    sizes = [spec.output_sizes[output] // num_groups for output in spec.outputs]
    parts = tensor.reshape(num_groups, -1, *tensor.shape[1:]).split_with_sizes(sizes, dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _deinterleave_rope(tensor: Tensor, spec: WeightSpec, size: int) -> Tensor:
    """De-interleave rotary dimensions: within a head, the first elements of all rotated pairs
    precede the second elements."""
    if spec.interleaved_outputs is not None:
        outputs = spec.outputs[: spec.interleaved_outputs]
        rows = sum(spec.output_sizes[output] for output in outputs)
        rotated = _deinterleave_rope(tensor[:rows], spec._replace(interleaved_outputs=None), size)
        return torch.cat((rotated, tensor[rows:]))
    dim, start = spec.interleaved_dim, spec.interleaved_start
    end, rotated_end = start + size, start + (spec.rotated_size or size)
    heads = tensor.reshape(*tensor.shape[:dim], -1, end, *tensor.shape[dim + 1 :])
    even, odd = torch.arange(start, rotated_end, 2), torch.arange(start + 1, rotated_end, 2)
    order = torch.cat((torch.arange(start), even, odd, torch.arange(rotated_end, end)))
    return heads.index_select(dim + 1, order).view(tensor.shape)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)


def _progress_bar(total_bytes: int) -> CountBar:
    return CountBar(
        total=total_bytes,
        desc="Loading weights",
        unit="B",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    )
