"""Selects the layers that --cpu-offload-gb keeps in host memory. Pure arithmetic."""

from collections.abc import Sequence

from config.errors import ConfigError, bytes_text
from config.params.offload import OffloadConfig
from hpu.gaudi_devices import GIB

NUM_SLOTS = 2
"""Sets of device memory for offloaded layers (double buffering): a set is computed while the next
set is copied."""

MIN_HOST_LAYERS = 2 * NUM_SLOTS
"""Minimum number of offloaded layers: fewer layers would hardly free device memory."""


def host_layers(config: OffloadConfig, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """Indices of the layers whose weights are kept in host memory; `layer_bytes`: bytes of each
    layer. The first layer is offloaded, and the others are spread over the model, so that resident
    layers overlap with copies. The number is even: the first offloaded layer of the next launch
    then uses the set that the last offloaded layer of this launch does not use. Raises ConfigError
    if too few layers fit."""
    if not config.cpu_offload_gb:
        return ()
    largest, num_layers = max(layer_bytes), len(layer_bytes)
    count = min(int(config.cpu_offload_gb * GIB) // largest, num_layers)
    count -= count % NUM_SLOTS
    if count < MIN_HOST_LAYERS:
        raise ConfigError(
            f"--cpu-offload-gb is {config.cpu_offload_gb:g} and a layer of the model takes "
            f"{bytes_text(largest)}, of {num_layers} layers: it must hold at least "
            f"{MIN_HOST_LAYERS} layers, since the weights of {NUM_SLOTS} are on the device at a "
            "time"
        )
    return tuple(index * num_layers // count for index in range(count))


def freed_bytes(layer_bytes: Sequence[int], chosen: Sequence[int]) -> int:
    """Device bytes saved: the `chosen` layers minus the sets of device memory that they share."""
    if not chosen:
        return 0
    own = [layer_bytes[index] for index in chosen]
    return sum(own) - NUM_SLOTS * max(own)
