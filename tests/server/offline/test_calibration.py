"""Calibration files from hand-made measurements."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from server.offline.calibration import (
    Record,
    finish_measures,
    keep_least_losing,
    measure_path,
    repair,
    unify,
    write_configs,
    write_measures,
)

IMPL = "model.layers.0.self_attn.attn.impl"


def scalar(value: float) -> list[list[float]]:
    return [[value]]


def record(**nodes: dict[str, Any]) -> Record:
    return {"GlobalRank": None, "LocalRank": 0, "Mode": "DynamicRange", "Nodes": nodes}


def attention(*, cache: tuple[str, str] = ("k_cache", "v_cache")) -> Record:
    nodes = {
        f"{IMPL}.matmul_qk": {"inputs": [scalar(1.0), scalar(900.0)]},
        f"{IMPL}.matmul_av": {"inputs": [scalar(0.5), scalar(800.0)]},
        **{f"{IMPL}.{name}": {"inputs": [scalar(2.0 + i)]} for i, name in enumerate(cache)},
    }
    return record(**nodes)


def test_attention_products_get_the_measurements_of_the_cache() -> None:
    nodes = repair(attention())["Nodes"]

    assert nodes[f"{IMPL}.matmul_qk"]["inputs"] == [scalar(1.0), scalar(2.0)]
    assert nodes[f"{IMPL}.matmul_av"]["inputs"] == [scalar(0.5), scalar(3.0)]


def test_the_measurement_of_an_mla_cache_applies_to_both_products() -> None:
    latent = attention(cache=("latent_cache_k", "unused"))

    nodes = repair(latent)["Nodes"]

    assert nodes[f"{IMPL}.matmul_qk"]["inputs"][1] == scalar(2.0)
    assert nodes[f"{IMPL}.matmul_av"]["inputs"][1] == scalar(2.0)


def test_without_a_measured_cache_the_measurements_are_unchanged() -> None:
    found = repair(attention(cache=("a", "b")))

    assert found["Nodes"][f"{IMPL}.matmul_qk"]["inputs"][1] == scalar(900.0)


def test_each_rank_gets_the_maximum_of_all_ranks() -> None:
    ranks = [
        record(
            o_proj={
                "inputs": [scalar(a)],
                "outputs": [scalar(b), scalar(c)],
                "params": {"weight": scalar(d)},
            }
        )
        for a, b, c, d in ((1.0, 5.0, 2.0, 0.25), (3.0, 4.0, 6.0, 0.125))
    ]

    node = unify(ranks)["Nodes"]["o_proj"]

    assert node == {
        "inputs": [scalar(3.0)],
        "outputs": [scalar(5.0), scalar(6.0)],
        "params": {"weight": scalar(0.25)},
    }


def test_ranks_that_measured_different_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="measured 1 and 2 modules"):
        unify([record(a={"inputs": []}), record(a={"inputs": []}, b={"inputs": []})])


def test_measurement_files_are_written_for_each_divisor_of_the_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        nodes = {"o_proj": {"inputs": [scalar(rank)], "params": {"weight": scalar(-rank)}}}
        path = measure_path(tmp_path, rank, 4).with_suffix(".json")
        path.write_text(json.dumps(record(**nodes)))

    sizes = finish_measures(tmp_path, 4)

    assert sizes == [1, 2, 4]
    for size in sizes:
        for rank in range(size):
            file = measure_path(tmp_path, rank, size).with_suffix(".npz")
            stored = np.load(file, allow_pickle=True)["arr_0"].item()
            assert stored["LocalRank"] == rank
            (value,) = stored["Nodes"]["o_proj"]["inputs"]
            assert value.tolist() == scalar(3.0)


def test_the_error_names_a_rank_without_measurements(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no measurements were written: .*_0_2\.json"):
        finish_measures(tmp_path, 2)


def test_a_damaged_file_of_measurements_is_named(tmp_path: Path) -> None:
    path = measure_path(tmp_path, 0, 1).with_suffix(".json")
    path.write_text('{"Nodes": ')

    with pytest.raises(ConfigError, match=r"_0_1\.json holds no measurements: .*; measure again"):
        finish_measures(tmp_path, 1)


@pytest.mark.parametrize(("quantizes_cache", "types"), [(True, []), (False, ["VLLMKVCache"])])
def test_measure_and_quantize_configs_differ_in_mode_and_cache(
    tmp_path: Path, quantizes_cache: bool, types: list[str]
) -> None:
    paths = write_configs(
        tmp_path, quantizes_cache=quantizes_cache, skipped=["lm_head"], scale_method="maxabs_pow2"
    )

    measure, quantize = (json.loads(path.read_text()) for path in paths)
    assert (measure["mode"], quantize["mode"]) == ("MEASURE", "QUANTIZE")
    assert measure["blocklist"] == {"types": [], "names": ["lm_head"]}
    assert quantize["blocklist"] == {"types": types, "names": ["lm_head"]}
    assert quantize["scale_method"] == "maxabs_pow2"
    assert measure["dump_stats_path"] == quantize["dump_stats_path"] == f"{tmp_path}/inc_output"


def test_only_the_modules_with_the_smallest_loss_are_quantized(tmp_path: Path) -> None:
    names = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts.moe_op")
    measures = {f"model.layers.{layer}.{name}": {} for layer in (2, 10) for name in names}
    write_measures(measure_path(tmp_path, 0, 1), {"Nodes": {**measures, "lm_head": {}}})
    _, config = write_configs(
        tmp_path, quantizes_cache=True, skipped=["mlp.up"], scale_method="maxabs_hw"
    )

    for with_attention in (False, True):
        keep_least_losing(config, 1, with_attention=with_attention)

        fields = json.loads(config.read_text())
        assert ("VLLMKVCache" in fields["allowlist"]["types"]) == with_attention
        assert fields["blocklist"]["names"][0] == "mlp.up"
        # The compressor reads its file in the same way.
        found = {
            name
            for name in measures
            if any(re.search(field, name) for field in fields["allowlist"]["names"])
            and not any(re.search(field, name) for field in fields["blocklist"]["names"])
        }
        assert found == {
            f"model.layers.2.mlp.{name}" for name in ("gate_up_proj", "experts.moe_op")
        }


def test_a_model_without_the_default_modules_gets_a_hint_to_all_modules(tmp_path: Path) -> None:
    write_measures(measure_path(tmp_path, 0, 1), {"Nodes": {"model.layers.1.mlp.fc1": {}}})
    _, config = write_configs(tmp_path, quantizes_cache=True, skipped=[], scale_method="maxabs_hw")

    with pytest.raises(ConfigError, match=r"0 of 1 measured modules .* with --all-modules"):
        keep_least_losing(config, 1, with_attention=False)


@pytest.mark.parametrize("largest", [0.0, 0.25])
def test_the_error_names_a_layer_that_no_sample_reaches(largest: float, tmp_path: Path) -> None:
    measures = record(
        **{
            "model.layers.1.self_attn.q_proj": {"inputs": [scalar(4.0)]},
            "model.layers.1.self_attn.o_proj": {"inputs": [scalar(largest)]},
            # An expert that no token uses is not an error of the samples.
            "model.layers.1.mlp.experts.moe_op.w2_list.3": {"inputs": [scalar(0.0)]},
        }
    )
    write_measures(measure_path(tmp_path, 0, 1), measures)

    if largest:
        assert finish_measures(tmp_path, 1) == [1]
        return
    with pytest.raises(
        ConfigError, match=r"1 of 3 modules had only zeros as inputs, .*o_proj: .* with images"
    ):
        finish_measures(tmp_path, 1)
