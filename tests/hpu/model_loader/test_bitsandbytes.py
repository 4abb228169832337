"""bitsandbytes weights, compared with vectors that its release 0.50.2 produced and dequantized."""

import json
from pathlib import Path

import pytest
import torch
from paged_harness import load_decoder
from quantized_checkpoints import FORMATS, make_quantized, replace_tensor
from safetensors.torch import load_file
from torch import Tensor

from config.errors import CheckpointError, ConfigError
from config.model.json_fields import Fields
from config.model.quantization.base import Role
from config.model.quantization.bitsandbytes import SCB_FACTOR, read_bitsandbytes
from config.model.read_config import read_model_config
from hpu.model_loader.bitsandbytes import decode_flat

VECTORS = Path(__file__).parents[2] / "vectors" / "bitsandbytes.safetensors"
ROLES: dict[str, Role] = {
    "weight": "values",
    "weight.absmax": "blocks",
    "weight.quant_map": "codes",
    "weight.nested_absmax": "nested_blocks",
    "weight.nested_quant_map": "nested_codes",
}


def parts_of(name: str) -> tuple[dict[Role, Tensor], Tensor]:
    """Tensors of a weight, and eight of its dequantized rows."""
    own = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in load_file(VECTORS).items()
        if key.startswith(f"{name}.")
    }
    expected = own.pop("expected")
    return {ROLES.get(key, "state"): tensor for key, tensor in own.items()}, expected


@pytest.mark.parametrize(("name", "rows"), [("nf4", 8), ("fp4", 8), ("nested", 128)])
def test_a_weight_equals_the_tools_dequantization(name: str, rows: int) -> None:
    parts, expected = parts_of(name)

    found = decode_flat(parts, (rows, 192), name)

    assert found.shape == (rows, 192)
    torch.testing.assert_close(found[:: rows // 8], expected, rtol=1e-6, atol=1e-7)


def test_an_8_bit_weight_equals_the_tools_dequantization() -> None:
    vectors = load_file(VECTORS)

    scales = vectors["int8.SCB"].unsqueeze(1) * SCB_FACTOR

    found = vectors["int8.weight"].float() * scales
    torch.testing.assert_close(found, vectors["int8.expected"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [192, 8]}, r"quant_state of nf4 has shape \[192, 8\], it must be \[8, 192\]"),
        ({"blocksize": 128}, "has blocksize 128, it must be 64"),
    ],
)
def test_a_different_state_is_refused_with_both_states(
    change: dict[str, object], message: str
) -> None:
    parts, _ = parts_of("nf4")
    state = {**json.loads(bytes(parts["state"].tolist())), **change}
    parts["state"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    with pytest.raises(CheckpointError, match=message):
        decode_flat(parts, (8, 192), "nf4")


def nested_with_offset(offset: object) -> dict[Role, Tensor]:
    parts, _ = parts_of("nested")
    state = {**json.loads(bytes(parts["state"].tolist())), "nested_offset": offset}
    parts["state"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts


def test_a_nested_offset_may_be_an_integer_of_json() -> None:
    whole, fraction = (
        decode_flat(nested_with_offset(offset), (128, 192), "nested") for offset in (1, 1.0)
    )

    assert torch.equal(whole, fraction)


@pytest.mark.parametrize("offset", [True, "1", None])
def test_a_nested_offset_that_is_no_number_is_an_error(offset: object) -> None:
    with pytest.raises(CheckpointError, match=f"has nested_offset {offset}, it must be a number"):
        decode_flat(nested_with_offset(offset), (128, 192), "nested")


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000])
def test_a_state_that_is_not_json_is_an_error(text: bytes) -> None:
    parts, _ = parts_of("nf4")
    parts["state"] = torch.tensor(list(text), dtype=torch.uint8)

    with pytest.raises(CheckpointError, match="quant_state of nf4 is not JSON"):
        decode_flat(parts, (8, 192), "nf4")


def test_nan_scales_are_an_error() -> None:
    parts, _ = parts_of("nf4")
    parts["blocks"][3] = torch.nan

    with pytest.raises(CheckpointError, match="nf4 has scales or codes that are NaN or infinite"):
        decode_flat(parts, (8, 192), "nf4")


def test_an_unsupported_quant_storage_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"bnb_4bit_quant_storage .* is 'bfloat16', it must be one"
    ):
        raw = {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
        read_bitsandbytes(Fields(raw, "config.json"))


def test_a_wrong_number_of_blocks_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = make_quantized(FORMATS["nf4"], tmp_path).folder
    name = "model.layers.0.mlp.down_proj.weight.absmax"
    replace_tensor(folder, name, lambda scales: scales[:-1])

    facts = read_model_config(str(folder))

    assert facts.quantization is not None and facts.quantization.method == "bitsandbytes"
    with pytest.raises(CheckpointError, match=r"absmax in .* is 511, the model needs 512"):
        load_decoder(folder)
