"""Quantized tiny checkpoints, packed from the formats' definitions, each with a reference
checkpoint of the dequantized weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor

Ints = npt.NDArray[np.int64]
Change = Callable[[Path, dict[str, Any]], None]
"""A change of a folder, and of its quantization_config."""
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 32,
}
"""Sizes that give two ranks whole groups of 64 inputs, except for down_proj in groups of 256."""
WEIGHTS = "model.safetensors"
STACKING = "fbgemm_fp8"
"""Format that stacks experts."""
INT8 = "int-quantized"
"""Format of compressed-tensors with one byte per weight."""


class Rounded(NamedTuple):
    """Integers, scales and zero points of a weight (out, in)."""

    values: Ints
    """(out, in) values, starting at 0."""
    scales: Tensor
    """(out, groups) scales in float16."""
    zeros: Ints
    """(out, groups) zero points."""
    groups: Ints
    """(in) group of each input."""

    def dequantize(self) -> Tensor:
        """Dequantized weight (out, in) in float32."""
        shifted = self.values - self.zeros[:, self.groups]
        return torch.from_numpy(shifted).float() * self.scales.float()[:, self.groups]


def round_weight(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    order: Ints | None = None,
    dtype: torch.dtype = torch.float16,
) -> Rounded:
    """Round to the nearest of 2^bits steps in groups of `group_size` inputs (-1: all inputs), taken
    in `order` (None: in natural order)."""
    out, size = weight.shape
    width, most = size if group_size == -1 else group_size, 2**bits - 1
    order = np.arange(size) if order is None else order
    groups = np.empty(size, np.int64)
    groups[order] = np.arange(size) // width
    ordered = weight[:, torch.from_numpy(order)].view(out, -1, width)
    low, high = ordered.amin(-1), ordered.amax(-1)
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / most).to(dtype)
        zeros = torch.full_like(scales, 2.0 ** (bits - 1)).float()
    else:
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most)
    table = zeros.long().numpy()
    values = weight / scales.float()[:, groups] + zeros[:, groups]
    return Rounded(values.round().clamp(0, most).long().numpy(), scales, table, groups)


def pack_rows(values: Ints, bits: int) -> Tensor:
    """Pack (rows, columns) to (rows / (32 / bits), columns) int32, with the first row in the lowest
    bits."""
    count = 32 // bits
    padded = np.zeros((-(-len(values) // count) * count, values.shape[1]), np.uint32)
    padded[: len(values)] = values
    packed = np.zeros((len(padded) // count, values.shape[1]), np.uint32)
    for row in range(len(padded)):
        packed[row // count] |= padded[row] << np.uint32(bits * (row % count))
    return torch.from_numpy(packed.view(np.int32))


def pack_columns(values: Ints, bits: int) -> Tensor:
    """`values` packed into int32 along the columns."""
    return pack_rows(values.T, bits).T.contiguous()


@dataclass(frozen=True)
class Integers:
    """A format of integers, and the rounding of a weight for it."""

    name: str
    bits: int = 4
    group_size: int = 64
    symmetric: bool = False
    desc_act: bool = False
    version: str = ""
    has_head: bool = False

    def round(self, weight: Tensor, number: int) -> Rounded:
        """Round a weight. `number`: number of the layer's input."""
        order = None
        if self.desc_act:
            order = np.random.default_rng(number).permutation(weight.shape[1])
        dtype = torch.bfloat16 if self.name == "compressed-tensors" else torch.float16
        return round_weight(
            weight,
            self.bits,
            self.group_size,
            symmetric=self.symmetric,
            order=order,
            dtype=dtype,
        )

    def pack(self, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        """Stored tensors by name suffix, and the dequantized weight in float32."""
        rounded = self.round(weight, number)
        packers: dict[str, Callable[[Rounded], dict[str, Tensor]]] = {
            "gptq": self._gptq,
            "awq": self._awq,
            "compressed-tensors": self._compressed,
        }
        return packers[self.name](rounded), rounded.dequantize()

    def _gptq(self, rounded: Rounded) -> dict[str, Tensor]:
        """Layout of QuantLinear.pack in AutoGPTQ; version 2 of GPTQModel stores zero points
        unchanged."""
        less = 0 if self.version == "gptq_v2" else 1
        zeros = (rounded.zeros - less) & (2**self.bits - 1)
        return {
            "qweight": pack_rows(rounded.values.T, self.bits),
            "qzeros": pack_columns(zeros.T, self.bits),
            "scales": rounded.scales.t().contiguous(),
            "g_idx": torch.from_numpy(rounded.groups).int(),
        }

    def _awq(self, rounded: Rounded) -> dict[str, Tensor]:
        """Layout of WQLinear_GEMM.from_linear in AutoAWQ: of eight outputs, output order[i] is in
        the i-th four bits."""
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

        def pack(table: Ints) -> Tensor:
            ordered = table.reshape(len(table), -1, 8)[:, :, order]
            return pack_columns(ordered.reshape(table.shape), 4)

        return {
            "qweight": pack(rounded.values.T),
            "qzeros": pack(rounded.zeros.T),
            "scales": rounded.scales.t().contiguous(),
        }

    def _compressed(self, rounded: Rounded) -> dict[str, Tensor]:
        """Layout of PackedQuantizationCompressor: signed values, to which pack_to_int32 adds half
        of the range; zero points are packed along the outputs."""
        if self.version == INT8:
            values = torch.from_numpy(rounded.values - 128).to(torch.int8)
            return {"weight": values, "weight_scale": rounded.scales}
        tensors = {
            "weight_packed": pack_columns(rounded.values, self.bits),
            "weight_scale": rounded.scales,
            "weight_shape": torch.tensor(rounded.values.shape),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = pack_rows(rounded.zeros, self.bits)
        if self.desc_act:
            tensors["weight_g_idx"] = torch.from_numpy(rounded.groups).int()
        return tensors

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config."""
        if self.name == "compressed-tensors":
            weights = {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": self.symmetric,
                "strategy": "channel" if self.group_size == -1 else "group",
                "group_size": None if self.group_size == -1 else self.group_size,
                "actorder": "group" if self.desc_act else None,
            }
            return compressed_config(self.version or "pack-quantized", weights, None)
        own: dict[str, Any] = {"bits": self.bits, "group_size": self.group_size}
        if self.name == "gptq":
            own |= {"desc_act": self.desc_act, "sym": self.symmetric}
            own |= {"checkpoint_format": self.version} if self.version else {}
            own |= {"lm_head": True} if self.has_head else {}
        else:
            own |= {"version": "gemm", "zero_point": True}
        return {"quant_method": self.name, **own}


def compressed_config(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Floats:
    """An FP8 format."""

    name: str
    strategy: str = "tensor"
    """"tensor", "channel" or "block"."""
    static: bool = False
    has_head: bool = False
    block: tuple[int, int] = (128, 128)
    weight_only: bool = False
    powers: torch.dtype | None = None
    """Dtype in which scales are stored as exponents; None: scales are stored as floats."""

    def pack(self, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        """See Integers.pack."""
        out, size = weight.shape
        rows, columns = {"tensor": (out, size), "channel": (1, size)}.get(self.strategy, self.block)
        spread = torch.zeros(-(-out // rows) * rows, -(-size // columns) * columns)
        spread[:out, :size] = weight
        blocks = spread.view(-1, rows, spread.shape[1] // columns, columns)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        if self.powers is not None:
            scales = scales.log2().ceil().exp2()
        elif self.name == "compressed-tensors":
            scales = scales.bfloat16().float()
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :size]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        is_inverse = self.name in ("fp8", "mxfp8") and self.strategy == "block"
        suffix = "weight_scale_inv" if is_inverse else ""
        stored = scales.squeeze() if self.strategy == "tensor" else scales
        if self.powers is not None:
            stored = (scales.log2() + 127).to(torch.uint8).view(self.powers)
        elif self.name == "compressed-tensors":
            stored = stored.reshape(-1) if self.strategy == "tensor" else stored
            stored = stored.bfloat16()
        tensors = {"weight": codes, suffix or "weight_scale": stored}
        if self.static:
            tensors["input_scale"] = torch.tensor(0.02 + 0.001 * number)
        return tensors, codes.float() * wide

    @property
    def config(self) -> dict[str, Any]:
        if self.name == STACKING:
            return {"quant_method": self.name, "activation_scale_ub": 1200.0}
        if self.name == "mxfp8":
            own = {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}
            blocks = {"weight_block_size": list(self.block), "ignored_layers": ["lm_head"]}
            return {"quant_method": self.name, **own, **blocks}
        if self.name == "modelopt":
            return {"quant_method": self.name, "quant_algo": "MXFP8", "ignore": ["lm_head"]}
        if self.name == "auto-round":
            kind = {"data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"}
            acts = {"act_bits": 8, "act_data_type": "mx_fp_rceil", "act_group_size": 32}
            return {"quant_method": self.name, "bits": 8, "group_size": 32, **kind, **acts}
        if self.name == "fp8":
            config: dict[str, Any] = {
                "quant_method": "fp8",
                "activation_scheme": "static" if self.static else "dynamic",
            }
            if self.powers is not None:
                config["scale_fmt"] = "ue8m0"
            return config | (
                {"weight_block_size": list(self.block)} if self.strategy == "block" else {}
            )
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": self.strategy}
        if self.powers is not None:
            weights |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
            acts = {**weights, "dynamic": True, "scale_dtype": None}
            return compressed_config("mxfp8-quantized", weights, None if self.weight_only else acts)
        if self.strategy == "block":
            weights["block_structure"] = list(self.block)
        strategy = {"static": "tensor"}.get("static" if self.static else "", "token")
        if self.weight_only:
            # Name of the format in llmcompressor.
            return compressed_config("naive-quantized", weights, None)
        activations = {"num_bits": 8, "type": "float", "dynamic": not self.static}
        return compressed_config("float-quantized", weights, {**activations, "strategy": strategy})


def mxfp8(name: str, powers: torch.dtype = torch.uint8, *, weight_only: bool = False) -> Floats:
    """MXFP8 as the tool `name` stores it."""
    return Floats(name, "block", block=(1, 32), powers=powers, weight_only=weight_only)


NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""The 16 values of nf4 (quant_map in the files of bitsandbytes)."""


@dataclass(frozen=True)
class Blocks:
    """bitsandbytes' nf4; `nested`: with 8-bit scales."""

    nested: bool = False
    name: str = "bitsandbytes"
    has_head: bool = False

    def pack(self, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        """See Integers.pack; the layout of bitsandbytes' functional.quantize_4bit."""
        blocks = weight.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        stored = {"weight.absmax": scales}
        if self.nested:
            offset = float(scales.mean())
            codes = torch.linspace(-1, 1, 256)
            padded = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256))
            nested = padded.view(-1, 256).abs().amax(1)
            shares = padded.view(-1, 256) / nested.unsqueeze(1)
            indices = (shares.unsqueeze(-1) - codes).abs().argmin(-1).flatten()[: len(scales)]
            scales = codes[indices] * nested.repeat_interleave(256)[: len(scales)] + offset
            stored = {
                "weight.absmax": indices.to(torch.uint8),
                "weight.nested_absmax": nested,
                "weight.nested_quant_map": codes,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        values = ((blocks / scales.unsqueeze(1)).unsqueeze(-1) - NF4).abs().argmin(-1)
        flat = values.flatten().to(torch.uint8)
        stored["weight"] = (flat[::2] << 4 | flat[1::2]).unsqueeze(1)
        stored["weight.quant_map"] = NF4.clone()
        text = json.dumps(state).encode()
        key = "weight.quant_state.bitsandbytes__nf4"
        stored[key] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, (NF4[values] * scales.unsqueeze(1)).view(weight.shape)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.nested,
        }


@dataclass(frozen=True)
class Vectors:
    """LLM.int8 of bitsandbytes, scaled by the largest magnitude of each output."""

    name: str = "bitsandbytes"
    has_head: bool = False

    def pack(self, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
        """See Integers.pack; the layout of bitsandbytes' functional.int8_vectorwise_quant."""
        largest = weight.abs().amax(1)
        values = (weight * (127 / largest).unsqueeze(1)).round().to(torch.int8)
        stored = {
            "weight": values,
            "SCB": largest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return stored, values.float() * (largest * (1 / 127)).unsqueeze(1)

    @property
    def config(self) -> dict[str, Any]:
        return {"quant_method": self.name, "load_in_8bit": True, "load_in_4bit": False}


Format = Integers | Floats | Blocks | Vectors
FORMATS: dict[str, Format] = {
    "gptq": Integers("gptq"),
    "gptq, symmetric": Integers("gptq", symmetric=True),
    "gptq, 8 bits": Integers("gptq", bits=8),
    "gptq, all inputs": Integers("gptq", group_size=-1, symmetric=True),
    "gptq, 8 bits of all inputs": Integers("gptq", bits=8, group_size=-1, symmetric=True),
    "gptq, version 2": Integers("gptq", version="gptq_v2"),
    "gptq, desc_act": Integers("gptq", desc_act=True, group_size=32),
    "gptq, 8 bits, desc_act": Integers("gptq", bits=8, desc_act=True, group_size=32),
    "gptq, head": Integers("gptq", has_head=True),
    "awq": Integers("awq"),
    "wna16": Integers("compressed-tensors"),
    "wna16, symmetric": Integers("compressed-tensors", symmetric=True),
    "wna16, 8 bits": Integers("compressed-tensors", bits=8),
    "wna16, channels": Integers("compressed-tensors", group_size=-1, symmetric=True),
    "wna16, actorder": Integers("compressed-tensors", desc_act=True, symmetric=True),
    "int-quantized": Integers("compressed-tensors", 8, -1, True, version=INT8),
    "fp8": Floats("fp8"),
    "fp8, static": Floats("fp8", static=True),
    "fp8, blocks": Floats("fp8", "block"),
    "fp8, small blocks": Floats("fp8", "block", block=(48, 80)),
    STACKING: Floats(STACKING, "channel"),
    "nf4": Blocks(),
    "nf4, nested": Blocks(nested=True),
    "bitsandbytes, 8 bits": Vectors(),
    "float-quantized": Floats("compressed-tensors"),
    "float-quantized, channels": Floats("compressed-tensors", "channel"),
    "float-quantized, static": Floats("compressed-tensors", static=True),
    "float-quantized, blocks": Floats("compressed-tensors", "block"),
    "float-quantized, weights": Floats("compressed-tensors", "channel", weight_only=True),
    "float-quantized, weights in blocks": Floats("compressed-tensors", "block", weight_only=True),
    "fp8, powers": Floats("fp8", "block", powers=torch.float8_e8m0fnu),
    "mxfp8": mxfp8("mxfp8"),
    "mxfp8, e8m0": mxfp8("mxfp8", torch.float8_e8m0fnu),
    "mxfp8-quantized": mxfp8("compressed-tensors"),
    "mxfp8-quantized, weights": mxfp8("compressed-tensors", weight_only=True),
    "modelopt, mxfp8": mxfp8("modelopt"),
    "auto-round, mxfp8": mxfp8("auto-round"),
}


class Quantized(NamedTuple):
    folder: Path
    reference: Path
    """The same checkpoint with dequantized weights in float32."""


def make_quantized(
    form: Format, folder: Path, family: str = "llama", **overrides: Any
) -> Quantized:
    """A tiny checkpoint whose linear layers, except head and routers, are in the format."""
    reference = make_tiny(family, folder / "reference", **{**SIZES, **overrides})
    return quantize(form, reference, folder / "quantized")


def quantize(
    form: Format, reference: Path, target: Path, *, other: tuple[str, ...] = ()
) -> Quantized:
    """Write a checkpoint whose linear layers are in the format, except names that begin with an
    entry of `other`. The reference's linear layers are replaced by the dequantized weights."""
    shutil.copytree(reference, target)
    tensors = load_file(reference / WEIGHTS)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            parts, plain[name] = _pack_experts(form, name, tensor)
            stored.update(parts)
            continue
        is_head = module == "lm_head" and form.has_head
        is_named = not name.startswith(other) and (_is_linear(module) or is_head)
        if not name.endswith(".weight") or not is_named:
            stored[name] = plain[name] = tensor
            continue
        packed, plain[name] = form.pack(tensor, _number(module))
        stored.update({f"{module}.{end}": part for end, part in packed.items()})
    save_file(stored, target / WEIGHTS)
    save_file({name: item.contiguous() for name, item in plain.items()}, reference / WEIGHTS)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = form.config
    (target / "config.json").write_text(json.dumps(config))
    return Quantized(target, reference)


def _pack_experts(form: Format, name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Stored tensors and dequantized weight of `tensor` (experts, in, out). The format FBGEMM has
    one tensor for all experts (FbgemmFp8Llama4TextExperts of transformers); other formats have a
    tensor per expert (llmcompressor)."""
    prefix, _, product = name.rpartition(".")
    if form.name == STACKING:
        packed = [form.pack(part.t(), 0) for part in tensor]
        codes = torch.stack([parts["weight"].t() for parts, _ in packed])
        scales = torch.stack([parts["weight_scale"] for parts, _ in packed])
        # Scales of gate and up are (experts, 1, out), scales of down (experts, out, 1).
        scales = scales.transpose(1, 2) if product == "gate_up_proj" else scales
        stored = {name: codes.contiguous(), f"{name}_scale": scales.contiguous()}
        return stored, torch.stack([plain.t() for _, plain in packed])
    outputs = ("gate_proj", "up_proj") if product == "gate_up_proj" else ("down_proj",)
    stored, found = {}, []
    for expert, item in enumerate(tensor):
        plains = []
        for output, weight in zip(outputs, item.t().chunk(len(outputs)), strict=True):
            parts, plain = form.pack(weight.contiguous(), 0)
            plains.append(plain)
            module = f"{prefix}.{expert}.{output}"
            stored |= {f"{module}.{end}": part for end, part in parts.items()}
        found.append(torch.cat(plains).t())
    return stored, torch.stack(found)


def _is_linear(module: str) -> bool:
    return "_proj" in module.rpartition(".")[2] or ".experts." in module


def _number(module: str) -> int:
    """Number of a layer's input: equal for layers with the same input, which tools quantize in the
    same order."""
    own = module.rpartition(".")[2]
    return {"o_proj": 2, "down_proj": 3}.get(own, 1 if own[0] in "qkv" else 0)


def write_settings(folder: Path, **settings: Any) -> None:
    """Add fields to config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def as_auto_round(packing: str) -> Change:
    """Write the settings as AutoRound does for a packing."""

    def change(folder: Path, config: dict[str, Any]) -> None:
        own = {"quant_method": "auto-round", "packing_format": packing, "sym": False}
        write_settings(folder, quantization_config={**config, **own, "data_type": "int"})

    return change


def replace_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Replace a tensor by the result of `change`; None removes the tensor."""
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / WEIGHTS)


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    """A change for `replace_tensor` that sets the first number of a float tensor to `value`. Byte
    tensors are powers of two of MXFP4; their first byte becomes 255, which means NaN."""

    def change(tensor: Tensor) -> Tensor:
        is_power = tensor.dtype == torch.float8_e8m0fnu
        flat = tensor.view(torch.uint8 if is_power else tensor.dtype).view(-1)
        flat[0] = 255 if flat.dtype == torch.uint8 else value
        return tensor

    return change
