"""The compressor's configuration: checks before a worker starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

from config.engine import CacheConfig, EngineConfig
from config.errors import ConfigError
from config.model.quantization.inc import read_quant_config
from config.startup_checks import check_model_config


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "quant.json"
    path.write_text(json.dumps({"dump_stats_path": str(folder / "stats"), **fields}))
    return path


def test_measurement_files_are_named_by_rank(tmp_path: Path) -> None:
    config = read_quant_config(str(written(tmp_path, mode="QUANTIZE")))

    assert config.measure_file(1, 4) == tmp_path / "stats_hooks_maxabs_1_4.npz"
    assert not config.measures


def test_all_ranks_may_share_one_measurement_file(tmp_path: Path) -> None:
    path = written(tmp_path, mode="measure", seperate_measure_files="False", observer="save")
    config = read_quant_config(str(path))

    assert config.measure_file(1, 4) == tmp_path / "stats_hooks_save.npz"
    assert config.measures


def test_the_error_names_a_missing_measurement_file_and_the_configuration(tmp_path: Path) -> None:
    config = read_quant_config(str(written(tmp_path, mode="QUANTIZE")))
    (tmp_path / "stats_hooks_maxabs_0_2.npz").touch()

    with pytest.raises(
        ConfigError, match=r"quant\.json .*stats_hooks_maxabs_1_2\.npz does not exist"
    ):
        config.check_files(2)


@pytest.mark.parametrize(
    "fields",
    [{"mode": "MEASURE"}, {"scale_method": "unit_scale"}, {"dynamic_quantization": "True"}],
)
def test_measuring_and_scale_methods_without_statistics_need_no_measurement_files(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    read_quant_config(str(written(tmp_path, **fields))).check_files(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"quant\.json, the file of --quant-config or QUANT_CONFIG, is not JSON"),
        ("[]", r"quant\.json, the file of --quant-config or QUANT_CONFIG, is not a JSON object"),
        ('{"mode": "SERVE"}', r"mode in .*quant\.json is 'SERVE', it must be MEASURE or QUANTIZE"),
        ('{"dump_stats_path": 3}', r"dump_stats_path in .*quant\.json is 3, it must be a path"),
    ],
)
def test_an_invalid_configuration_is_refused_with_its_path(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "quant.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_quant_config(str(path))


def test_a_missing_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither QUANT_CONFIG nor --quant-config"):
        read_quant_config(None)
    with pytest.raises(ConfigError, match=r"none\.json, .* QUANT_CONFIG: No such file"):
        read_quant_config(str(tmp_path / "none.json"))


def test_the_compressor_needs_a_gaudi() -> None:
    with pytest.raises(ConfigError, match=r"inc and device is cpu: .* on hpu only"):
        EngineConfig("m", quantization="inc", device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"))


def refusal(folder: Path, quant_config: Path, **settings: Any) -> str:
    config = EngineConfig(
        str(folder),
        quantization="inc",
        device="hpu-emulator",
        quant_config=str(quant_config),
        **settings,
    )
    with pytest.raises(ConfigError) as caught:
        check_model_config(config, str(folder))
    return str(caught.value)


def test_the_start_checks_the_configuration_and_the_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = written(tmp_path, mode="QUANTIZE")
    monkeypatch.setattr("config.startup_checks.is_installed", lambda name: False)

    assert "hooks_maxabs_0_1.npz does not exist" in refusal(folder, quantize)
    fp8 = CacheConfig(kv_cache_dtype="fp8")
    assert "--kv-cache-dtype is fp8, the compressor" in refusal(folder, quantize, cache=fp8)
    own = CacheConfig(kv_cache_dtype="fp8_inc", calculate_kv_scales=True)
    assert "--calculate-kv-scales is set: leave" in refusal(folder, quantize, cache=own)
    (tmp_path / "stats_hooks_maxabs_0_1.npz").touch()
    assert refusal(folder, quantize).endswith("pip install neural-compressor-pt")
    measure = written(tmp_path, mode="MEASURE")
    assert "add --skip-warmup and --enforce-eager" in refusal(folder, measure)
