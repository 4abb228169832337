"""Selects the layers that --cpu-offload-gb keeps in host memory. Pure functions."""

from collections.abc import Sequence

from config.errors import ConfigError, bytes_text
from config.params.offload import OffloadConfig
from hpu.gaudi_devices import GIB

NUM_SLOTS = 2
"""Weight buffers on the device for offloaded layers (double buffering): one is computed with while
the next is filled."""

MIN_HOST_LAYERS = 2 * NUM_SLOTS
"""Minimum number of offloaded layers: with fewer layers, hardly any device memory is freed."""


def host_layers(config: OffloadConfig, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """Indices of the layers whose weights are kept in host memory; `layer_bytes`: bytes of each
    layer. The first layer is offloaded, and the others are spread over the model, so that copies
    overlap with resident layers. The number is even, so that the first offloaded layer of the next
    launch uses a different buffer than the last offloaded layer of this launch. Raises ConfigError
    if too few layers fit."""
    if not config.cpu_offload_gb:
        return ()
    largest, num_layers = max(layer_bytes), len(layer_bytes)
    count = min(int(config.cpu_offload_gb * GIB) // largest, num_layers)
    count -= count % NUM_SLOTS
    if count < MIN_HOST_LAYERS:
        raise ConfigError(
            f"--cpu-offload-gb is {config.cpu_offload_gb:g} and a layer of the model takes "
            f"{bytes_text(largest)}, of {num_layers} layers: it must be enough for "
            f"{MIN_HOST_LAYERS} layers, since the weights of {NUM_SLOTS} are on the device at a "
            "time; 0 keeps all layers on the device"
        )
    return tuple(index * num_layers // count for index in range(count))


def freed_bytes(layer_bytes: Sequence[int], chosen: Sequence[int]) -> int:
    """Device bytes saved: the size of the `chosen` layers minus the buffers that they share."""
    if not chosen:
        return 0
    own = [layer_bytes[index] for index in chosen]
    return sum(own) - NUM_SLOTS * max(own)
