"""hpu/backends/select.py: a back end for every device of config/devices/."""

import pytest

from config.devices.base import DEVICES
from config.engine import EngineConfig
from config.errors import ConfigError


@pytest.mark.parametrize("device", DEVICES.all)
def test_every_device_has_a_back_end_and_is_a_choice(device: str) -> None:
    assert callable(DEVICES.half(device, "hpu.backends", "BACKENDS"))
    assert EngineConfig("m", device=device).device == device


def test_an_unknown_device_is_refused_with_all_devices() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda, hpu, hpu-emulator"):
        EngineConfig("m", device="tpu")
    with pytest.raises(ConfigError, match="must be one of cpu, cuda, hpu, hpu-emulator"):
        DEVICES.half("tpu", "hpu.backends", "BACKENDS")
