"""WeightStreamer: weights of decoder layers in host memory, double-buffered in device memory."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpu.backends.base import Backend, Event
from hpu.offload.host_layers import NUM_SLOTS

Signature = tuple[str, tuple[int, ...], torch.dtype]


def move_to_host(layer: nn.Module, backend: Backend) -> None:
    """Move the parameters of `layer`, which are not loaded yet, to host memory with fast
    uploads."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            host = backend.host_tensor(parameter.numel(), parameter.dtype).view(parameter.shape)
            setattr(module, name, nn.Parameter(host, requires_grad=False))


class WeightStreamer:
    """Decoder layers whose loaded parameters are in host memory. The layers' parameters become
    device tensors at fixed addresses, which captured graphs may read. The offloaded layers with
    even numbers share a weight buffer, the layers with odd numbers another; a buffer holds the
    weights of the layer that `require` or `begin` copied last."""

    def __init__(self, layers: Mapping[int, nn.Module], backend: Backend) -> None:
        """`layers`: offloaded layers in order, by index in the model. The methods number them from
        0."""
        self.indices = tuple(layers)
        self.host_bytes = 0
        self.device_bytes = 0
        self._backend = backend
        self._copies: list[list[tuple[Tensor, Tensor]]] = []
        self._held = [-1] * NUM_SLOTS
        """Number of the layer whose weights each buffer holds; -1: none."""
        sets: list[dict[Signature, nn.Parameter]] = [{} for _ in range(NUM_SLOTS)]
        for number, layer in enumerate(layers.values()):
            self._copies.append(self._bind(layer, sets[number % NUM_SLOTS]))

    def _bind(
        self, layer: nn.Module, owned: dict[Signature, nn.Parameter]
    ) -> list[tuple[Tensor, Tensor]]:
        """Replace the parameters of `layer` by the tensors of a buffer; returns the (device, host)
        copies that fill them."""
        copies = []
        for path, module in layer.named_modules():
            for name, host in list(module.named_parameters(recurse=False)):
                if host.device.type != "cpu":
                    continue
                signature = (f"{path}.{name}", tuple(host.shape), host.dtype)
                if signature not in owned:
                    empty = self._backend.zeros(tuple(host.shape), host.dtype)
                    owned[signature] = nn.Parameter(empty, requires_grad=False)
                    self.device_bytes += host.nbytes
                setattr(module, name, owned[signature])
                copies.append((owned[signature].detach(), host.detach()))
                self.host_bytes += host.nbytes
        return copies

    @property
    def size(self) -> int:
        return len(self._copies)

    def require(self, number: int) -> None:
        """Upload the weights of offloaded layer `number`, unless its buffer holds them. Work
        submitted later reads them."""
        if self._held[number % NUM_SLOTS] != number:
            for target, source in self._copies[number]:
                self._backend.upload(target, source)
            self._held[number % NUM_SLOTS] = number

    def begin(self, number: int, after: Event) -> None:
        """Upload the weights of offloaded layer `number` concurrently with the work after `after`,
        which reads the other buffer."""
        if self._held[number % NUM_SLOTS] != number:
            self._backend.upload_beside(self._copies[number], after)
            self._held[number % NUM_SLOTS] = number
