"""Each format with each damage: the error is one sentence that names file and tensor."""

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from live import LiveServer
from paged_harness import load_decoder
from quantized_checkpoints import (
    FORMATS,
    INT8,
    STACKING,
    WEIGHTS,
    Blocks,
    Floats,
    Integers,
    Vectors,
    make_quantized,
    replace_tensor,
    with_first,
)
from random_checkpoint import write_mxfp4
from safetensors.torch import load_file, save_file
from tiny_gguf import family_weights, write_gguf
from tiny_models import make_tiny
from torch import Tensor

from config.checkpoint.gguf_metadata import open_gguf
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.kv_cache_dtype import FP8
from config.startup_checks import check_checkpoint
from hpu.backends.cpu import CpuBackend

Make = Callable[[Path], Path]
Change = Callable[[Tensor], Tensor | None]
NO_FLOATS = ("scale of 0", "infinite scale")
"""Kinds of damage that power-of-two scales in bytes cannot have."""
UP = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2"


class Case(NamedTuple):
    """A checkpoint, and its tensors that can be damaged."""

    make: Make
    values: str
    """A tensor with quantized weights; empty if only scales are stored."""
    scales: str
    regrouped: dict[str, Any] | None = None
    """A different group size or granularity for quantization_config; None if the format has
    none."""
    unharmed: tuple[str, ...] = ()
    """Harmless changes: the format has no such values, or the changed values are valid."""


def format_case(name: str, family: str = "llama", module: str = UP, **fields: Any) -> Case:
    form = FORMATS[name]
    values, scales, unharmed = "weight", "weight_scale", ()
    if isinstance(form, Integers) and form.version != INT8:
        values = "weight_packed" if form.name == "compressed-tensors" else "qweight"
        scales = "weight_scale" if form.name == "compressed-tensors" else "scales"
    elif isinstance(form, Floats):
        if form.name in ("fp8", "mxfp8") and form.strategy == "block":
            scales = "weight_scale_inv"
        if form.powers is not None:
            unharmed = NO_FLOATS
    elif isinstance(form, Blocks):
        scales = "weight.nested_absmax" if form.nested else "weight.absmax"
        # A block of zeros has a scale of 0.
        unharmed = ("scale of 0",)
    elif isinstance(form, Vectors):
        scales = "SCB"

    def make(folder: Path) -> Path:
        sizes = {"num_hidden_layers": 2, **fields}
        return make_quantized(form, folder, family, **sizes).folder

    return Case(make, f"{module}.{values}", f"{module}.{scales}", regrouped(form), unharmed)


def regrouped(form: Integers | Floats | Blocks | Vectors) -> dict[str, Any] | None:
    config = form.config
    if isinstance(form, Blocks | Vectors) or form.name == STACKING:
        return None
    if isinstance(form, Floats) and form.block == (1, 32):
        # Other block sizes are refused before a file is read.
        return None
    if form.name == "compressed-tensors":
        (group,) = config["config_groups"].values()
        weights = group["weights"]
        if isinstance(form, Integers):
            weights |= {"strategy": "group", "group_size": 16}
        else:
            weights |= {"strategy": "block", "block_structure": [16, 16]}
    elif isinstance(form, Integers):
        config["group_size"] = 16
    else:
        config["weight_block_size"] = [16, 16]
    return config


KEYS = "model.layers.0.self_attn.k_proj.k_scale"


def scaled_cache(folder: Path) -> Path:
    made = make_tiny("llama", folder, num_hidden_layers=1)
    save_file({**load_file(made / WEIGHTS), KEYS: torch.tensor(0.5)}, made / WEIGHTS)
    return made


STACKED = "model.layers.1.feed_forward.experts.gate_up_proj"
SHARED = "model.layers.1.mlp.experts.gate_up_proj"
LLAMA4 = {"num_hidden_layers": 2, "intermediate_size": 128, "intermediate_size_mlp": 256}
CASES = {
    **{name: format_case(name) for name in FORMATS if name not in (STACKING, "gptq, head")},
    **{
        f"experts: {name}": format_case(name, "mixtral", EXPERT, num_local_experts=4)
        for name in ("gptq", "awq", "wna16", "wna16, 8 bits", "fp8", "fp8, blocks", "mxfp8")
    },
    STACKING: format_case(STACKING, "llama4_text", STACKED, **LLAMA4)._replace(
        values=STACKED, scales=f"{STACKED}_scale"
    ),
    # Scales are powers of two in bytes; only a single byte value is NaN.
    "mxfp4": Case(write_mxfp4, f"{SHARED}_blocks", f"{SHARED}_scales", unharmed=NO_FLOATS),
    # The scales are optional.
    "scales of the KV cache": Case(scaled_cache, "", KEYS, unharmed=("no scales", "no floats")),
}


def short(tensor: Tensor) -> Tensor:
    """`tensor` with a wrong size: an entry removed, or two entries instead of a scalar."""
    return torch.cat([tensor.view(-1), tensor.view(-1)]) if not tensor.dim() else tensor[:-1]


SCALES: dict[str, tuple[Change, str]] = {
    "scale of 0": (with_first(0), r" has 1 of \d+ scales that are zero"),
    "NaN scale": (with_first(torch.nan), r" has 1 of \d+ scales that are NaN"),
    "infinite scale": (with_first(-torch.inf), r" has 1 of \d+ scales that are NaN or infinite"),
    "no scales": (lambda tensor: None, "the files do not have this tensor"),
    "another shape": (short, "the files have |the model needs "),
    "no floats": (lambda tensor: torch.ones(tensor.shape).long(), " is I64, "),
}
VALUES: dict[str, tuple[Change, str]] = {
    "other values": (lambda tensor: torch.ones(tensor.shape).double(), " is F64, "),
    "no values": (lambda tensor: None, "the files do not have this tensor"),
    "fewer values": (lambda tensor: tensor[:-1], "the files have |the model needs "),
}


TENSORS = {**SCALES, **VALUES}


COMMON = (
    *("gptq", "gptq, version 2", "awq", "wna16", "int-quantized", "fp8", "fp8, blocks", "mxfp8"),
    *("float-quantized, channels", STACKING, "nf4", "bitsandbytes, 8 bits", "mxfp4"),
    *("experts: wna16", "experts: fp8", "scales of the KV cache"),
)
"""Default cases, a case of each kind; the other cases are slow tests."""


def marked(*values: str) -> Any:
    """A pytest parameter whose first value is the name of a case."""
    return pytest.param(*values, marks=() if values[0] in COMMON else pytest.mark.slow)


def damages() -> list[Any]:
    """Each format with each damage that it can have."""
    found = []
    for name, case in CASES.items():
        own = [*SCALES, *(VALUES if case.values else ())]
        found += [marked(name, damage) for damage in own if damage not in case.unharmed]
    return found


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def original(name: str) -> Path:
        if name not in made:
            made[name] = CASES[name].make(tmp_path_factory.mktemp("checkpoint"))
        return made[name]

    return original


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def load(folder: Path) -> None:
    check_checkpoint(EngineConfig(str(folder), device="cpu"), str(folder))
    load_decoder(folder, format=CpuBackend(1).kv_cache_format(FP8, torch.float32))


def refusal(folder: Path) -> str:
    """The error message of the folder, a single line."""
    with pytest.raises(ConfigError) as refused:
        load(folder)
    text = str(refused.value)
    assert "\n" not in text and str(folder) in text
    return text


@pytest.mark.parametrize(("name", "damage"), damages())
def test_the_error_names_a_damaged_tensor_and_its_file(
    name: str, damage: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, case = copy(originals(name), tmp_path / "damaged"), CASES[name]
    tensor = case.scales if damage in SCALES else case.values
    change, message = TENSORS[damage]
    replace_tensor(folder, tensor, change)

    text = refusal(folder)

    assert tensor in text and re.search(message, text)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_checkpoints_with_harmless_changes_are_loaded(
    name: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, case = copy(originals(name), tmp_path / "copy"), CASES[name]
    if "scale of 0" in case.unharmed and case.unharmed != NO_FLOATS:
        replace_tensor(folder, case.scales, with_first(0))
    if "no scales" in case.unharmed:
        replace_tensor(folder, case.scales, lambda tensor: None)

    load(folder)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_the_error_names_a_truncated_file(
    name: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(originals(name), tmp_path / "damaged")
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1000])

    assert f"{file} is not a complete safetensors file" in refusal(folder)


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


@pytest.mark.parametrize("name", [marked(name) for name, case in CASES.items() if case.regrouped])
def test_another_group_size_is_refused_with_the_specified_shape(
    name: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(originals(name), tmp_path / "damaged")
    changed = CASES[name].regrouped
    assert changed is not None
    set_quantization(folder, changed)

    text = refusal(folder)

    assert re.search(
        r"config\.json specifies \d+x\d+ .*, the files (have (\d+|one)|do not have)", text
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("awq", "gptq"),
        ("gptq", "awq"),
        ("wna16", "awq"),
        ("int-quantized", "fp8"),
        ("fp8", "gptq"),
        ("fp8, blocks", "bitsandbytes, 8 bits"),
        (STACKING, "wna16"),
        ("nf4", "bitsandbytes, 8 bits"),
        ("bitsandbytes, 8 bits", "nf4"),
        ("float-quantized", "awq"),
    ],
)
def test_a_checkpoint_with_the_label_of_another_format_is_refused(
    name: str, other: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy(originals(name), tmp_path / "damaged")
    set_quantization(folder, FORMATS[other].config)

    assert re.search(r"the files (have|do not have) |, by the quantization_config", refusal(folder))


def gguf(path: Path, kind: str) -> Path:
    weights = family_weights("llama")
    matrices = [name for name in weights if name.startswith("blk.") and "norm" not in name]
    types = dict.fromkeys(matrices, GGMLQuantizationType[kind])
    return write_gguf(path, weights=weights, quantized=types)


def damage_gguf(file: Path, damage: str) -> None:
    data = file.read_bytes()
    if damage == "truncated":
        data = data[:-1000]
    elif damage == "mislabelled":
        data = b"GGML" + data[4:]
    else:
        number = {"NaN scale": np.nan, "infinite scale": np.inf}[damage]
        at = find_scale(file)
        data = data[:at] + np.float16(number).tobytes() + data[at + 2 :]
    file.write_bytes(data)


def find_scale(file: Path) -> int:
    """File offset of a tensor's first scale."""
    tensor = open_gguf(file).tensors["blk.1.ffn_down.weight"]
    return file.read_bytes().index(tensor.data.tobytes())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", "m.gguf cannot be read as a GGUF file: "),
        ("mislabelled", "m.gguf cannot be read as a GGUF file: it does not begin with GGUF"),
        ("NaN scale", r"model.layers.1.mlp.down_proj.weight in .*m.gguf has 32 of \d+ weights"),
        ("infinite scale", r"model.layers.1.mlp.down_proj.weight in .*m.gguf has \d+ of \d+ w"),
    ],
)
def test_the_error_names_a_damaged_gguf_file(
    kind: str, damage: str, message: str, tmp_path: Path
) -> None:
    file = gguf(tmp_path / "m.gguf", kind)
    damage_gguf(file, damage)

    with pytest.raises(ConfigError, match=message) as refused:
        resolve(
            EngineConfig(str(file), cache_dir=str(tmp_path), quantization="gguf"), progress=False
        )

    assert "\n" not in str(refused.value) and str(file) in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMON, "gguf"])
def test_the_command_fails_with_one_sentence_and_status_1(
    name: str, originals: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = ["--device=cpu", "--max-model-len=64", "--max-num-seqs=2", "--skip-tokenizer-init"]
    if name == "gguf":
        folder, tensor = gguf(tmp_path / "m.gguf", "Q8_0"), "model.layers.1.mlp.down_proj.weight"
        damage_gguf(folder, "NaN scale")
        flags += ["--quantization=gguf", f"--cache-dir={tmp_path}"]
    else:
        folder, tensor = copy(originals(name), tmp_path / "damaged"), CASES[name].scales
        replace_tensor(folder, tensor, with_first(torch.nan))
    if tensor == KEYS:
        flags.append("--kv-cache-dtype=fp8")

    with contextlib.closing(LiveServer(str(folder), tmp_path / "log", *flags)) as server:
        status, lines = server.wait_exit(60), server.text().splitlines()

    assert status == 1 and not any("Traceback" in line for line in lines)
    (error,) = [line for line in lines if " ERROR " in line or line.startswith("gaudiserve: ")]
    assert f"{tensor} in {folder}" in error and " NaN" in error
