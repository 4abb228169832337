"""Which layers --cpu-offload-gb keeps in host memory. Pure arithmetic."""

from collections.abc import Sequence

from config.errors import ConfigError
from config.params.offload import OffloadConfig
from hpu.gaudi_devices import GIB

NUM_SLOTS = 2
"""Sets of device memory that such layers take by turns: one is computed, the next one copied."""

MIN_HOST_LAYERS = 2 * NUM_SLOTS
"""Fewer would hardly free any memory of the device."""


def host_layers(config: OffloadConfig, layer_bytes: Sequence[int]) -> tuple[int, ...]:
    """The indices of the layers, of `layer_bytes` each, whose weights are in host memory. The first
    layer is one of them, and the others are spread over the model, so that resident layers give
    copies time. Their number is even: the first one of the next launch then takes the set that the
    last one of this launch does not use. Raises ConfigError for too few."""
    if not config.cpu_offload_gb:
        return ()
    largest, num_layers = max(layer_bytes), len(layer_bytes)
    count = min(int(config.cpu_offload_gb * GIB) // largest, num_layers)
    count -= count % NUM_SLOTS
    if count < MIN_HOST_LAYERS:
        raise ConfigError(
            f"--cpu-offload-gb is {config.cpu_offload_gb:g} and a layer of the model takes "
            f"{largest / GIB:.3g} GiB, of {num_layers} layers: it must hold at least "
            f"{MIN_HOST_LAYERS} layers, since the weights of {NUM_SLOTS} are on the device at a "
            "time"
        )
    return tuple(index * num_layers // count for index in range(count))


def freed_bytes(layer_bytes: Sequence[int], chosen: Sequence[int]) -> int:
    """What the device does not hold: `chosen` less the sets of memory that they take by turns."""
    if not chosen:
        return 0
    own = [layer_bytes[index] for index in chosen]
    return sum(own) - NUM_SLOTS * max(own)
