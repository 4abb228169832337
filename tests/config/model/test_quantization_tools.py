"""What quantization tools write besides the tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from config.model.json_fields import Fields
from config.model.quantization.base import QuantizationConfig, WeightScheme
from config.model.quantization.registry import is_served, read_quantization

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
ROUND = {"bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
COMPRESSED = {
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def read(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> QuantizationConfig:
    """Quantization settings of a folder with this config.json and these JSON files."""
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    fields = Fields(config, folder / "config.json")
    found = read_quantization(fields)
    assert is_served(fields)
    assert found is not None
    return found


def zeros_offset(scheme: WeightScheme | None) -> int:
    assert scheme is not None
    (zeros,) = [part for part in scheme.parts if part.role == "zeros"]
    return zeros.offset


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [
        ("quantize_config", {**GPTQ, "model_file_base_name": "model"}, "gptq"),
        ("quantize_config", {**AWQ, "quant_method": "awq"}, "awq"),
        ("quant_config", AWQ, "awq"),
    ],
)
def test_settings_in_a_separate_file_are_read(
    name: str, content: dict[str, Any], method: str, tmp_path: Path
) -> None:
    found = read(tmp_path, {}, **{name: content})

    assert found.method == method
    assert {scheme.bits for scheme in found.schemes} == {4}
    assert {scheme.group_size for scheme in found.schemes} == {128}


def test_config_json_takes_precedence_over_other_files(tmp_path: Path) -> None:
    own = {"quantization_config": {**GPTQ, "quant_method": "gptq"}}

    found = read(tmp_path, own, quantize_config={**GPTQ, "bits": 3})

    assert [scheme.bits for scheme in found.schemes] == [4]


def test_errors_name_the_file_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bits .*quantize_config\.json is 3, it must be 4 or 8"):
        read(tmp_path, {}, quantize_config={**GPTQ, "bits": 3})


def test_a_file_without_bits_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text('{"dataset": "c4"}')

    assert read_quantization(Fields({}, tmp_path / "config.json")) is None


@pytest.mark.parametrize("method", [{}, {"quant_method": "compressed-tensors"}])
def test_the_older_field_name_of_compressed_tensors_is_read(
    method: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, {"compression_config": {**COMPRESSED, **method}})

    assert found.method == "compressed-tensors"
    assert found.scheme_of(QUERY) is not None
    assert found.scheme_of("lm_head") is None


@pytest.mark.parametrize("field", ["load_in_4bit", "load_in_8bit"])
def test_early_bitsandbytes_settings_are_recognized_without_quant_method(
    field: str, tmp_path: Path
) -> None:
    assert read(tmp_path, {"quantization_config": {field: True}}).method == "bitsandbytes"


@pytest.mark.parametrize("both", [False, True])
def test_bitsandbytes_needs_exactly_one_width(both: bool, tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": both, "load_in_8bit": both}

    with pytest.raises(ConfigError, match=f"load_in_4bit .* is {both}, it must be {not both}, "):
        read(tmp_path, {"quantization_config": config})


@pytest.mark.parametrize(
    ("order", "desc_act"),
    [("group", True), ("dynamic", True), (True, True), ("weight", False), ("static", False)],
)
def test_every_spelling_of_actorder_is_read(order: Any, desc_act: bool, tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, "actorder": order}}
    config = {**COMPRESSED, "config_groups": {"group_0": group}}

    found = read(tmp_path, {"compression_config": config})

    assert [scheme.desc_act for scheme in found.schemes] == [desc_act]


def test_an_fp8_block_structure_may_be_a_string(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"format": "float-quantized", "config_groups": {"group_0": group}}

    (scheme,) = read(tmp_path, {"compression_config": config}).schemes

    assert scheme.group_size == 64


def transforms(*locations: str) -> dict[str, Any]:
    applied = [{"targets": ["Linear"], "location": location} for location in locations]
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}}


def test_rotations_that_are_fused_into_the_weights_are_accepted(tmp_path: Path) -> None:
    own = transforms("weight_input", "weight_output")

    assert read(tmp_path, {"compression_config": {**COMPRESSED, **own}}).rules


def test_rotations_of_activations_are_refused(tmp_path: Path) -> None:
    own = transforms("weight_output", "input")

    with pytest.raises(ConfigError, match=r"transform_config .* is 'input', it must be weight_i"):
        read(tmp_path, {"compression_config": {**COMPRESSED, **own}})


def test_the_first_pattern_of_dynamic_takes_precedence(tmp_path: Path) -> None:
    dynamic = {
        r"+:.*layers\.0\..*q_proj": {"bits": 8, "group_size": 32},
        r"-:.*layers\.0\.": {},
        r".*down_proj": {"bits": 8},
    }
    own = {"quantization_config": {**GPTQ, "quant_method": "gptq", "dynamic": dynamic}}

    found = read(tmp_path, own)

    query, down = found.scheme_of(QUERY), found.scheme_of(DOWN)
    other = found.scheme_of("model.layers.1.mlp.up_proj")
    assert query is not None
    assert down is not None
    assert other is not None
    assert (query.bits, query.group_size) == (8, 32)
    assert (down.bits, down.group_size) == (8, 128)
    assert (other.bits, other.group_size) == (4, 128)
    assert found.scheme_of("model.layers.0.mlp.up_proj") is None
    # Names in a text model that is part of a multimodal model.
    assert found.scheme_of("layers.0.self_attn.q_proj") == query


@pytest.mark.parametrize(
    ("packing", "offset"),
    [
        ({}, 1),
        ({"packing_format": "auto_round:auto_gptq"}, 1),
        ({"packing_format": "auto_round"}, 0),
        ({"packing_format": "auto_round", "model_free": True}, 1),
        ({"packing_format": "auto_round:gptqmodel"}, 0),
        ({"packing_format": "auto_round:auto_awq"}, 0),
        ({"backend": "autoround:gptq:exllamav2"}, 1),
        ({"backend": "auto_round:exllamav2"}, 0),
        ({"backend": "auto_round:tritonv2"}, 0),
    ],
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_the_packing_of_auto_round_sets_the_zero_point_offset(
    packing: dict[str, Any], offset: int, method: str, tmp_path: Path
) -> None:
    own = {"quantization_config": {**ROUND, **packing, "quant_method": method}}

    found = read(tmp_path, own)

    assert found.method == "auto-round"
    assert zeros_offset(found.scheme_of(QUERY)) == offset
    assert not found.has_head


def test_auto_round_modules_may_have_their_own_settings(tmp_path: Path) -> None:
    extra = {
        r".*layers\.1\..*": {"bits": 8},
        DOWN: {"bits": 16, "data_type": "float"},
        "lm_head": {"bits": 8, "group_size": 64},
    }
    config = {**ROUND, "extra_config": extra, "block_name_to_quantize": "model.layers"}

    found = read(tmp_path, {"quantization_config": {**config, "quant_method": "auto-round"}})

    head, up = found.scheme_of("lm_head"), found.scheme_of("model.layers.1.mlp.up_proj")
    assert found.has_head
    assert head is not None
    assert up is not None
    assert (head.bits, head.group_size) == (8, 64)
    assert (up.bits, up.group_size) == (8, 128)
    assert found.scheme_of(DOWN) is None
    assert found.scheme_of("visual.blocks.0.attn.q_proj") is None


@pytest.mark.parametrize("blocks", ["", " ", ",", [], [""], None])
def test_auto_round_without_names_of_blocks_quantizes_all_blocks(
    blocks: object, tmp_path: Path
) -> None:
    config = {**ROUND, "block_name_to_quantize": blocks, "quant_method": "auto-round"}

    found = read(tmp_path, {"quantization_config": config})

    assert found.scheme_of(QUERY) is not None


def test_auto_round_fp8_blocks_equal_block_fp8(tmp_path: Path) -> None:
    # The form that release 0.16.1 writes.
    config = {
        **ROUND,
        "bits": 8,
        "data_type": "fp",
        "group_size": [128, 128],
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "act_bits": 8,
        "act_data_type": "fp",
        "act_dynamic": True,
        "packing_format": "auto_round:fp8",
        "block_name_to_quantize": "model.layers",
        "extra_config": {DOWN: {"bits": 16, "data_type": "float"}},
        "quant_method": "auto-round",
    }

    found = read(tmp_path, {"quantization_config": config})

    scheme = found.scheme_of(QUERY)
    assert scheme is not None
    assert (scheme.is_float, scheme.group_size) == (True, 128)
    assert [part.suffix for part in scheme.parts] == ["weight", "weight_scale_inv"]
    assert found.method == "auto-round"
    assert found.scheme_of(DOWN) is None
    assert found.scheme_of("lm_head") is None
    del config["weight_block_size"]
    with pytest.raises(ConfigError, match=r"data_type .* is 'fp', it must be 'int'"):
        read(tmp_path, {"quantization_config": config})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits .* is 3, it must be 4 or 8"),
        ({"data_type": "mx_int"}, "data_type .* is 'mx_int', it must be 'int'"),
        ({"data_type": "mx_fp"}, "packing_format .* it must be one of auto_round:llm_compressor"),
        ({"act_bits": 8}, "act_bits .* is 8, it must be 16"),
        ({"super_bits": 6}, "super_bits .* is 6"),
        ({"packing_format": "mlx"}, "packing_format .* is 'mlx', it must be auto_round"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits .* is 8, it must be 4"),
        ({"extra_config": {"lm_head": 8}}, "extra_config .* is 8"),
        ({"extra_config": {"(": {"bits": 8}}}, "extra_config .* is not a valid regular expression"),
        ({"block_name_to_quantize": [[1]]}, r"block_name_to_quantize .* is \[\[1\]\]"),
    ],
)
def test_unsupported_auto_round_formats_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    own = {"quantization_config": {**ROUND, "quant_method": "auto-round", **changes}}

    with pytest.raises(ConfigError, match=message):
        read(tmp_path, own)


@pytest.mark.parametrize("field", ["version", "checkpoint_format"])
def test_other_layouts_of_awq_are_refused(field: str, tmp_path: Path) -> None:
    own = {"bits": 4, "group_size": 128, "quant_method": "awq", field: "gemv"}

    with pytest.raises(ConfigError, match=f"{field} .* is 'gemv', it must be 'gemm'"):
        read(tmp_path, {"quantization_config": own})


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "quant_algo": "FP8",
                    "ignore": ["lm_head", "model.layers.0.self_attn*"],
                    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                }
            },
            {},
        ),
        (
            {},
            {
                "hf_quant_config": {
                    "producer": {"name": "modelopt", "version": "0.29"},
                    "quantization": {
                        "quant_algo": "FP8",
                        "kv_cache_quant_algo": "FP8",
                        "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
                    },
                }
            },
        ),
    ],
    ids=["config.json", "hf_quant_config.json"],
)
def test_modelopt_fp8_is_read_as_static_fp8(
    config: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, config, **files)

    static = {"quant_method": "fp8", "activation_scheme": "static"}
    (expected,) = read(tmp_path, {"quantization_config": static}).schemes
    assert found.method == "modelopt"
    assert found.scheme_of(DOWN) == expected
    assert found.scheme_of(QUERY) is None
    assert found.scheme_of(QUERY.replace(".0.", ".10.")) == expected


def test_modelopt_in_other_formats_is_refused(tmp_path: Path) -> None:
    own = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

    with pytest.raises(ConfigError, match=r"quant_algo .* is 'NVFP4', it must be one of FP8"):
        read(tmp_path, {"quantization_config": own})


def test_modelopt_with_only_the_cache_in_fp8_is_not_quantized(tmp_path: Path) -> None:
    settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))

    assert read_quantization(Fields({}, tmp_path / "config.json")) is None


MX_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
MX_FORMS: dict[str, dict[str, Any]] = {
    "mxfp8": {"weight_block_size": [1, 32], "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]},
    "compressed-tensors": {
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": MX_WEIGHTS}},
    },
    "modelopt": {"quant_algo": "MXFP8"},
    "auto-round": {
        **{"bits": 8, "group_size": 32, "data_type": "mx_fp", "act_bits": 8},
        "packing_format": "auto_round:llm_compressor",
        "extra_config": {DOWN: {"bits": 16}},
    },
}
"""quantization_config of MXFP8 as each tool writes it."""


@pytest.mark.parametrize("method", MX_FORMS)
def test_mxfp8_scales_are_powers_of_two_for_groups_of_32(method: str, tmp_path: Path) -> None:
    config = {"quant_method": method, **MX_FORMS[method]}

    scheme = read(tmp_path, {"quantization_config": config}).scheme_of(QUERY)

    assert scheme is not None
    assert (scheme.is_float, scheme.group_size) == (True, 32)
    is_inverse = method == "mxfp8"
    scales = scheme.parts[1]
    assert scales.suffix == ("weight_scale_inv" if is_inverse else "weight_scale")
    assert scales.dtypes == ("U8", "F8_E8M0")


def test_excluded_modules_of_auto_round_mxfp8_are_not_quantized(tmp_path: Path) -> None:
    config = {"quant_method": "auto-round", **MX_FORMS["auto-round"]}

    assert read(tmp_path, {"quantization_config": config}).scheme_of(DOWN) is None


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("mxfp8", {"weight_block_size": [128, 128]}, r"weight_block_size .* it must be \[1, 32\]"),
        ("mxfp8", {"scale_fmt": "float"}, "scale_fmt .* is 'float', it must be one of ue8m0"),
        ("mxfp8", {"fmt": "e5m2"}, "fmt .* is 'e5m2', it must be one of e4m3"),
        ("mxfp8", {"activation_scheme": "static"}, "activation_scheme .* is 'static'"),
        (
            "mxfp8",
            {"moe_quant_algo": "NVFP4"},
            "moe_quant_algo .* is 'NVFP4', it must be one of MX",
        ),
        ("mxfp8", {"expert_dtype": "fp4"}, "expert_dtype .* is 'fp4', it must be one of fp8"),
        ("fp8", {"moe_quant_algo": "NVFP4"}, "moe_quant_algo .* is 'NVFP4', it must be one of FP8"),
        ("fp8", {"expert_dtype": "fp4"}, "expert_dtype .* is 'fp4', it must be one of fp8"),
        ("fp8", {"scale_fmt": "ue4m3"}, "scale_fmt .* is 'ue4m3', it must be one of float, ue8m0"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, "it must be one of FP8, MXFP8"),
        ("auto-round", {"bits": 4}, "bits .* is 4, it must be 8"),
        ("auto-round", {"group_size": 16}, "group_size .* is 16, it must be 32"),
        ("auto-round", {"act_data_type": "nv_fp"}, "act_data_type .* is 'nv_fp'"),
        ("auto-round", {"extra_config": {DOWN: {"bits": 4}}}, "bits .* is 4, it must be 8"),
        ("compressed-tensors", {"num_bits": 4}, "num_bits .* is 4, it must be 8"),
        ("compressed-tensors", {"group_size": 16}, "group_size .* is 16, it must be 32"),
        ("compressed-tensors", {"strategy": "channel"}, "strategy .* it must be one of group"),
        ("compressed-tensors", {"type": "int"}, "type .* is 'int', it must be one of float"),
    ],
)
def test_other_forms_of_mxfp8_are_refused(
    method: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {"quant_method": method, **MX_FORMS.get(method, {}), **changes}
    if method == "compressed-tensors":
        group = {"targets": ["Linear"], "weights": {**MX_WEIGHTS, **changes}}
        config = {"quant_method": method, **MX_FORMS[method], "config_groups": {"group_0": group}}

    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {"quantization_config": config})


@pytest.mark.parametrize("method", [["gptq"], {"gptq": 4}, 4])
def test_a_method_that_is_not_a_word_is_not_served(method: object, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": method}}

    assert not is_served(Fields(config, tmp_path / "config.json"))
