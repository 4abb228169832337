"""Weight offloading (--cpu-offload-gb): weights are kept in host memory, and each launch copies
them to the device."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.model.architectures import decoder_spec, is_native
from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from hpu.backends.base import Backend
from hpu.distributed.process_groups import ProcessGroup
from hpu.model_loader.size_estimate import layer_bytes
from hpu.models.base import LoadableModel
from hpu.models.decoder import Decoder
from hpu.offload.host_layers import freed_bytes, host_layers
from hpu.offload.weight_streamer import WeightStreamer, move_to_host

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsInHostMemory:
    """Selection of the layers whose weights are kept in host memory."""

    backend: Backend
    layers: tuple[int, ...]
    freed_bytes: int
    """Bytes of device memory saved."""

    def place_layer(self, index: int, layer: nn.Module) -> None:
        """PlaceLayer callback of Decoder: moves offloaded layers to host memory."""
        if index in self.layers:
            move_to_host(layer, self.backend)

    def make_ring(self, decoder: LoadableModel) -> WeightStreamer | None:
        """Create the WeightStreamer of the offloaded layers of a loaded decoder; None without such
        layers. Call it before the back end prepares the decoder."""
        if not self.layers:
            return None
        assert isinstance(decoder, Decoder), "others are refused"
        own = decoder.layers
        ring = WeightStreamer({index: own[index] for index in self.layers}, self.backend)
        logger.info(
            "Weights: %d of %d layers stay in host memory, %s; each launch copies them "
            "through %s of the device",
            len(self.layers),
            len(own),
            bytes_text(ring.host_bytes),
            bytes_text(ring.device_bytes),
        )
        return ring


def weights_in_host_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    backend: Backend,
    pooler: PoolerConfig | None,
    dtype: torch.dtype,
    group: ProcessGroup,
) -> WeightsInHostMemory:
    """Select the offloaded layers of a model of `dtype`, sharded across the tensor-parallel
    `group`. Raises ConfigError if --cpu-offload-gb is set and does not fit the model."""
    if not config.offload.cpu_offload_gb:
        return WeightsInHostMemory(backend, (), 0)
    what = f"--cpu-offload-gb is {config.offload.cpu_offload_gb:g} and"
    refusals = {
        "is served for pooling": pooler is not None,
        "is quantized": model_config.quantization is not None,
        "takes images": model_config.vision is not None,
        "runs on the transformers implementation": not is_native(model_config, config.model_impl),
    }
    for why, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(
                f"{what} {model_config.path} {why}, so its weights stay on the device: set it to 0"
            )
    spec = decoder_spec(model_config)
    if spec.mla is not None or spec.states:
        raise ConfigError(
            f"{what} {model_config.path} has latent attention or recurrent layers, so its weights "
            "stay on the device: set it to 0"
        )
    sizes = layer_bytes(model_config, num_cards=group.size, width=dtype.itemsize)
    layers = host_layers(config.offload, sizes)
    return WeightsInHostMemory(backend, layers, freed_bytes(sizes, layers))
