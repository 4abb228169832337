"""Quantized checkpoints on the emulated card."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulated import emulated
from paged_harness import load_decoder
from quantized_card import tokens_on_card
from quantized_checkpoints import FORMATS, STACKING, Floats, Integers, Quantized, make_quantized
from torch import Tensor

from config.execution import ExecutionConfig
from config.model.quantization.base import WeightScheme
from config.model.read_config import read_model_config
from hpu.gaudi_devices import GENERATIONS
from hpu.layers.linear import LinearBase
from hpu.model_loader.loader import load_weights
from hpu.model_loader.size_estimate import weight_bytes
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.quantization.base import LinearMethod
from hpu.quantization.registry import process_weights
from hpu.quantization.stored.checkpoint import CheckpointScheme, MakeMethod
from hpu.quantization.stored.fp8 import (
    Fp8BlockLinearMethod,
    Fp8LinearMethod,
    Fp8Range,
    has_blocks,
    is_weight_only,
)
from hpu.quantization.stored.int8 import Int8LinearMethod, can_expand
from hpu.quantization.stored.uint4 import Uint4LinearMethod, can_convert
from hpu.quantization.stored.weights import StoredWeight

Make = Callable[[str], Quantized]
INT4 = [
    name for name, format in FORMATS.items() if isinstance(format, Integers) and format.bits == 4
]
INT8 = [
    name for name, format in FORMATS.items() if isinstance(format, Integers) and format.bits == 8
]
SHORT = [("gptq", "gaudi3"), ("fp8, blocks", "gaudi2")]
"""Formats and generations whose recipes are counted by default."""
FLOATS = [name for name, form in FORMATS.items() if isinstance(form, Floats)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes the checkpoint of each format once."""
    made: dict[str, Quantized] = {}

    def make(name: str) -> Quantized:
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[name] = make_quantized(FORMATS[name], folder, num_hidden_layers=1)
        return made[name]

    return make


def loaded(folder: Path, make_method: MakeMethod) -> Decoder:
    model = build_model(
        read_model_config(str(folder)),
        ModelBuild(
            dtype=torch.bfloat16,
            device=torch.device("hpu", 0),
            max_model_len=64,
            quantization=CheckpointScheme(make_method),
        ),
    )
    load_weights(model, str(folder), on_progress=lambda done, total: None)
    process_weights(model, None)
    return model


def outputs_of(model: Decoder, rows: int = 5) -> dict[str, tuple[Tensor, Tensor]]:
    """Activations and outputs of each quantized layer."""
    found = {}
    for name, linear in model.named_modules():
        if isinstance(linear, LinearBase) and linear.weight is None:
            x = torch.randn(rows, linear.in_features).bfloat16()
            found[name] = x, linear(x.to("hpu")).cpu()
    assert len([name for name in found if name != "lm_head"]) == 4
    return found


@pytest.mark.parametrize("name", INT4)
def test_products_equal_the_dequantized_weights(name: str, make: Make) -> None:
    quantized = make(name)
    expected = load_decoder(quantized.reference).state_dict()

    def method(weight: StoredWeight) -> LinearMethod | None:
        return Uint4LinearMethod(weight) if can_convert(weight, takes_groups=True) else None

    with emulated(release="1.22.0", strict=True):
        found = outputs_of(loaded(quantized.folder, method))

    assert ("lm_head" in found) == ("head" in name)
    for layer, (x, out) in found.items():
        wanted = x.float() @ expected[f"{layer}.weight"].T
        # Scales are rounded to bfloat16.
        assert torch.allclose(out.float(), wanted, rtol=0.02, atol=0.02 * float(wanted.std()))


@pytest.mark.parametrize("name", INT8)
def test_8_bit_products_equal_the_dequantized_weights(name: str, make: Make) -> None:
    quantized = make(name)
    expected = load_decoder(quantized.reference).state_dict()

    def method(weight: StoredWeight) -> LinearMethod | None:
        return Int8LinearMethod(weight) if can_expand(weight) else None

    with emulated(strict=True):
        model = loaded(quantized.folder, method)
        found = outputs_of(model)
        values = [
            parameter for key, parameter in model.named_parameters() if key.endswith("qweight")
        ]

    assert {item.dtype for item in values} == {torch.int8}
    for layer, (x, out) in found.items():
        # Weights are rounded once, like weights dequantized at load.
        wanted = x.float() @ expected[f"{layer}.weight"].bfloat16().float().T
        assert torch.allclose(out.float(), wanted, rtol=0.01, atol=0.01 * float(wanted.std()))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", FLOATS)
def test_fp8_products_are_close_to_the_dequantized_weights(
    name: str, generation: str, make: Make
) -> None:
    quantized, largest = make(name), GENERATIONS[generation].fp8_max
    expected = load_decoder(quantized.reference).state_dict()

    with emulated(generation=generation, strict=True):
        model = loaded(quantized.folder, lambda weight: Fp8LinearMethod(weight, Fp8Range(largest)))
        found = outputs_of(model)
        codes = [
            parameter.cpu()
            for name, parameter in model.named_parameters()
            if name.endswith("qweight")
        ]

    assert max(float(code.float().abs().max()) for code in codes) <= largest
    assert {code.dtype for code in codes} == {torch.float8_e4m3fn}
    for layer, (x, out) in found.items():
        wanted = x.float() @ expected[f"{layer}.weight"].T
        error = (out.float() - wanted).square().mean().sqrt() / wanted.std()
        # Activations have four significant bits, and block-quantized weights are rounded twice.
        assert error < 0.05, layer


@pytest.mark.parametrize("generation", GENERATIONS)
def test_fp8_products_with_block_scales_are_close_to_the_dequantized_weights(
    generation: str, make: Make
) -> None:
    quantized, largest = make("fp8, small blocks"), GENERATIONS[generation].fp8_max
    expected = load_decoder(quantized.reference).state_dict()

    def method(weight: StoredWeight) -> LinearMethod:
        assert has_blocks(weight)
        return Fp8BlockLinearMethod(weight, Fp8Range(largest))

    with emulated(generation=generation, strict=True):
        found = outputs_of(loaded(quantized.folder, method))

    for layer, (x, out) in found.items():
        wanted = x.float() @ expected[f"{layer}.weight"].T
        assert torch.allclose(out.float(), wanted, rtol=0.02, atol=0.02 * float(wanted.std()))


@pytest.mark.parametrize(
    "name",
    [
        *("gptq", "awq", "wna16, symmetric", "wna16, 8 bits", "int-quantized"),
        *("fp8", "fp8, blocks", "float-quantized, channels", STACKING),
        *("float-quantized, weights", "float-quantized, weights in blocks"),
    ],
)
def test_the_estimate_equals_the_memory_of_a_card(name: str, make: Make) -> None:
    folder = make(name).folder
    facts = read_model_config(str(folder))

    with emulated(strict=True):
        model = loaded(folder, method_of)
        held = sum(parameter.nbytes for parameter in model.parameters())

    assert held == weight_bytes(facts, num_cards=1, width=2, length=0)
    # Each of two ranks holds half of the embedding, the head and the layers.
    assert held / 2 < weight_bytes(facts, num_cards=2, width=2, length=0) < held * 0.6


@pytest.mark.parametrize("name", FORMATS)
def test_loading_takes_the_memory_of_the_quantized_weights(name: str, make: Make) -> None:
    folder = make(name).folder

    with emulated(strict=True) as card:
        model = loaded(folder, method_of)
        held = sum(parameter.nbytes for parameter in (*model.parameters(), *model.buffers()))
        largest = max(parameter.nbytes for parameter in model.parameters())

    # Weights are converted on the host, so not even a single layer is on the card twice.
    assert card.memory.peak < held + largest
    if name not in ("nf4", "nf4, nested"):
        linears = [module for module in model.modules() if isinstance(module, LinearBase)]
        quantized = [linear.get_parameter("qweight") for linear in linears if linear.weight is None]
        assert len(quantized) >= 4


def method_of(weight: StoredWeight) -> LinearMethod | None:
    if weight.scheme.is_flat:
        return None
    if is_weight_only(weight):
        return Fp8BlockLinearMethod(weight, Fp8Range(240.0))
    if weight.scheme.is_float:
        return Fp8LinearMethod(weight, Fp8Range(240.0))
    if weight.scheme.bits == 8:
        return Int8LinearMethod(weight)
    return Uint4LinearMethod(weight)


def test_layers_without_a_method_are_dequantized(make: Make) -> None:
    quantized = make("gptq, 8 bits")
    expected = load_decoder(quantized.reference, dtype=torch.bfloat16).state_dict()

    with emulated(strict=True):
        model = loaded(quantized.folder, lambda weight: None)
        found = {name: parameter.cpu() for name, parameter in model.named_parameters()}

    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_four_bits_give_the_tokens_of_the_dequantized_model(make: Make) -> None:
    quantized = make("wna16")

    found, _ = tokens_on_card(quantized.folder, "gaudi2")

    # Scales in bfloat16: the expanded weights equal the reference's weights.
    assert found == tokens_on_card(quantized.reference, "gaudi2")[0]


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("float-quantized, weights", "gaudi2"),
        ("float-quantized, weights in blocks", "gaudi3"),
        pytest.param("float-quantized, weights", "gaudi3", marks=pytest.mark.slow),
        pytest.param("float-quantized, weights in blocks", "gaudi2", marks=pytest.mark.slow),
    ],
)
def test_weight_only_fp8_gives_the_tokens_of_the_dequantized_model(
    name: str, generation: str, make: Make
) -> None:
    quantized = make(name)

    found, _ = tokens_on_card(quantized.folder, generation)

    assert found == tokens_on_card(quantized.reference, generation)[0]


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        *SHORT,
        *(
            pytest.param(*item, marks=pytest.mark.slow)
            for item in [
                (form, generation)
                for form in [
                    *("gptq", "gptq, 8 bits", "gptq, desc_act", "gptq, 8 bits, desc_act", "awq"),
                    *("wna16", "wna16, 8 bits", "int-quantized", "bitsandbytes, 8 bits", "nf4"),
                    *("fp8", "fp8, static", "fp8, blocks", "float-quantized"),
                    *("float-quantized, channels", "float-quantized, blocks", STACKING),
                    "float-quantized, weights",
                ]
                for generation in GENERATIONS
                if (form, generation) not in SHORT
            ]
        ),
    ],
)
def test_all_layers_share_their_recipes_and_compile_nothing_after_warm_up(
    name: str, generation: str, tmp_path: Path
) -> None:
    counts = []
    # The first layer's recipe has the embedding too.
    for num_layers in (2, 3):
        folder = tmp_path / str(num_layers)
        made = make_quantized(FORMATS[name], folder, num_hidden_layers=num_layers)
        counts.append(tokens_on_card(made.folder, generation)[1])

    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq, desc_act", "wna16, symmetric", "fp8", "fp8, static"])
def test_layers_compile_without_graph_breaks(name: str, make: Make) -> None:
    execution = ExecutionConfig(mode="torch-compile", compile_fullgraph=True)
    folder = make(name).folder

    found, _ = tokens_on_card(folder, "gaudi2", execution)

    assert found == tokens_on_card(folder, "gaudi2")[0]


@pytest.mark.parametrize(("in_features", "takes"), [(96, True), (80, False)])
def test_weights_whose_groups_do_not_divide_the_rows_are_dequantized(
    in_features: int, takes: bool
) -> None:
    scheme = WeightScheme(bits=4, parts=(), group_size=32, desc_act=True)
    weight = StoredWeight(scheme, in_features, 16, 192, (16,))

    assert can_convert(weight, takes_groups=True) == takes
    assert not can_convert(weight, takes_groups=False)
