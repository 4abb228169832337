"""Sizes of offloaded KV cache and weights, and settings that exclude them."""

from typing import Any

import pytest

from config.engine import EXTERNAL_LAUNCHER, CacheConfig, EngineConfig
from config.errors import ConfigError
from config.execution import ExecutionConfig
from config.parallel import ParallelConfig
from config.params.lora import LoRAConfig
from config.params.offload import GIB, OffloadConfig

SWAPS = OffloadConfig(swap_space=4)


def test_swap_space_is_per_device_and_the_offloading_size_is_a_total() -> None:
    config = OffloadConfig(
        swap_space=1, kv_offloading_size=6, kv_offloading_dir="kv", kv_offloading_dir_size=8
    )

    assert config.host_bytes(1) == 7 * GIB and config.host_bytes(2) == 4 * GIB
    assert config.file_bytes(2) == 4 * GIB
    assert OffloadConfig(kv_offloading_size=1).file_bytes(1) == 0
    assert config.is_on and not OffloadConfig().is_on


def test_offloading_to_files_requires_host_memory() -> None:
    with pytest.raises(ConfigError, match="is kv and --kv-offloading-size is 0"):
        OffloadConfig(swap_space=1, kv_offloading_dir="kv")


def test_discarded_offloading_files_require_an_offloading_directory() -> None:
    with pytest.raises(ConfigError, match="kv-offloading-dir is not: set"):
        OffloadConfig(kv_offloading_size=1, kv_offloading_delete_files=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quantization": "int8"}, "quantization is int8"),
        ({"model_impl": "transformers"}, "model_impl is transformers"),
        ({"lora": LoRAConfig(enable_lora=True)}, "enable_lora is on"),
        ({"parallel": ParallelConfig(pipeline_parallel_size=2)}, "pipeline_parallel_size is 2"),
        ({"execution": ExecutionConfig(regional_compilation=False)}, "regional_compilation is off"),
    ],
)
def test_cpu_offload_gb_is_refused_if_weights_must_stay_on_the_device(
    settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"cpu_offload_gb is 8 and {why}: change one of the two"):
        EngineConfig("m", offload=OffloadConfig(cpu_offload_gb=8), **settings)


def test_swap_space_is_refused_without_prefix_caching_or_with_external_launcher() -> None:
    with pytest.raises(ConfigError, match="swap_space is 4 and enable_prefix_caching is off"):
        EngineConfig("m", cache=CacheConfig(enable_prefix_caching=False), offload=SWAPS)
    with pytest.raises(ConfigError, match="distributed_executor_backend is external_launcher"):
        EngineConfig("m", executor=EXTERNAL_LAUNCHER, offload=SWAPS)
