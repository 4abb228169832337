"""Files of transformers with bitsandbytes are loaded as the weights that bitsandbytes dequantizes.

Skipped without bitsandbytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import load_decoder
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hpu.model_loader.bitsandbytes import decode_flat, encode_nf4

functional = pytest.importorskip("bitsandbytes").functional

pytestmark = pytest.mark.quantizers

FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4, nested": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_equal_the_tools_dequantization(name: str, tmp_path: Path) -> None:
    plain = make_tiny("llama", tmp_path / "plain", hidden_size=128, intermediate_size=256)
    config = BitsAndBytesConfig(**FORMATS[name])
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "quantized")
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    weights = reference.state_dict()
    weights.update(
        {
            f"{path}.weight": _dequantized(module)
            for path, module in model.named_modules()
            if "_proj" in path.rpartition(".")[2]
        }
    )
    reference.load_state_dict(weights)
    reference.save_pretrained(tmp_path / "reference")

    found = load_decoder(tmp_path / "quantized").state_dict()

    expected = load_decoder(tmp_path / "reference").state_dict()
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(16, 192), (3, 50)])
def test_nf4_encoding_equals_bitsandbytes(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    stored, state = functional.quantize_4bit(weight, quant_type="nf4")

    parts = encode_nf4(weight)

    assert state.blocksize == 64 and not state.nested
    assert torch.equal(parts["values"], stored.flatten())
    torch.testing.assert_close(parts["blocks"], state.absmax)
    torch.testing.assert_close(parts["codes"], state.code, rtol=0, atol=1e-7)
    expected = functional.dequantize_4bit(stored, state)
    torch.testing.assert_close(decode_flat(parts, shape, "a weight"), expected)


def _dequantized(module: Any) -> torch.Tensor:
    weight: Any = module.weight
    if hasattr(weight, "quant_state"):
        found: torch.Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
        return found.float()
    scales = weight.SCB if weight.SCB is not None else module.state.SCB
    dequantized: torch.Tensor = functional.int8_vectorwise_dequant(weight.data, scales)
    return dequantized.float()
