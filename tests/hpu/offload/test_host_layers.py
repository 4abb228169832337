"""Choice of the layers that are kept in host memory."""

import pytest

from config.errors import ConfigError
from config.params.offload import OffloadConfig
from hpu.gaudi_devices import GIB
from hpu.offload.host_layers import freed_bytes, host_layers


def chosen(gib: float, layer_gib: list[float]) -> tuple[int, ...]:
    sizes = [int(size * GIB) for size in layer_gib]
    return host_layers(OffloadConfig(cpu_offload_gb=gib), sizes)


def test_an_even_number_of_layers_is_spread_over_the_model() -> None:
    assert chosen(0, [1.0] * 8) == ()
    assert chosen(4, [1.0] * 8) == (0, 2, 4, 6)
    assert chosen(5.9, [1.0] * 9) == (0, 2, 4, 6)
    assert chosen(6, [1.0] * 9) == (0, 1, 3, 4, 6, 7)
    assert chosen(100, [1.0] * 9) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_chosen_layers_fit_the_allowed_memory() -> None:
    sizes = [1.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    layers = chosen(12.5, sizes)

    assert len(layers) == 4 and sum(sizes[index] for index in layers) <= 12.5


@pytest.mark.parametrize(("gib", "num_layers"), [(3.9, 8), (100, 3)])
def test_too_few_layers_are_refused_with_their_sizes(gib: float, num_layers: int) -> None:
    text = f"--cpu-offload-gb is {gib:g} and a layer of the model takes 1.00 GiB, of {num_layers}"
    with pytest.raises(ConfigError, match=text):
        chosen(gib, [1.0] * num_layers)


def test_two_layer_buffers_stay_on_the_device() -> None:
    assert freed_bytes([10] * 6, ()) == 0
    assert freed_bytes([10] * 6, (0, 1, 3, 4)) == 20
    assert freed_bytes([10, 30, 30, 10], (0, 1, 2, 3)) == 20
