"""Weights of decoder layers in host memory, which take two sets of device memory by turns."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpu.backends.base import Backend, Event
from hpu.offload.host_layers import NUM_SLOTS

Signature = tuple[str, tuple[int, ...], torch.dtype]


def move_to_host(layer: nn.Module, backend: Backend) -> None:
    """Put the parameters of `layer`, empty as they are, in host memory that uploads read fast."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            host = backend.host_tensor(parameter.numel(), parameter.dtype).view(parameter.shape)
            setattr(module, name, nn.Parameter(host, requires_grad=False))


class WeightRing:
    """Layers whose filled parameters are in host memory. From now on their parameters are device
    tensors at fixed addresses, which captured graphs may read: those of every second layer are the
    same, and hold the weights of the layer that `require` or `begin` has copied last."""

    def __init__(self, layers: Mapping[int, nn.Module], backend: Backend) -> None:
        """`layers` by their indices in the model, in order."""
        self.indices = tuple(layers)
        self.host_bytes = 0
        self.device_bytes = 0
        self._backend = backend
        self._copies: list[list[tuple[Tensor, Tensor]]] = []
        self._held = [-1] * NUM_SLOTS
        """The layer, by its number in the ring, whose weights a set holds."""
        sets: list[dict[Signature, nn.Parameter]] = [{} for _ in range(NUM_SLOTS)]
        for number, layer in enumerate(layers.values()):
            self._copies.append(self._bind(layer, sets[number % NUM_SLOTS]))

    def _bind(
        self, layer: nn.Module, owned: dict[Signature, nn.Parameter]
    ) -> list[tuple[Tensor, Tensor]]:
        """Replace the parameters of `layer` with those of a set, and return the copies."""
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
        """How many layers take turns."""
        return len(self._copies)

    def require(self, number: int) -> None:
        """Work that is submitted from now on finds the weights of layer `number` of the ring."""
        if self._held[number % NUM_SLOTS] != number:
            for target, source in self._copies[number]:
                self._backend.upload(target, source)
            self._held[number % NUM_SLOTS] = number

    def begin(self, number: int, after: Event) -> None:
        """As `require`, copied beside the work behind `after`, which reads the other set."""
        if self._held[number % NUM_SLOTS] != number:
            self._backend.upload_beside(self._copies[number], after)
            self._held[number % NUM_SLOTS] = number
