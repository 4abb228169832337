"""RequestStates: recurrent state tensors by request index."""

from hpu.backends.base import Backend
from hpu.models.base import CausalLM


def state_bytes(model: CausalLM, num_states: int) -> int:
    """Bytes of `num_states` states over all layers."""
    return num_states * sum(spec.num_bytes for spec in model.state_specs())


class RequestStates:
    """States of `num_requests` request indices, followed by a state for padding.

    A request keeps its state index while it runs. States are never cleared: the first prefill of a
    request, also after a preemption, uses zero instead of the previous request's state. Steps of
    the previous request that are still in flight run earlier on the device.
    """

    def __init__(self, model: CausalLM, backend: Backend, num_requests: int) -> None:
        self.bytes = state_bytes(model, num_requests + 1)
        self._model = model
        self._num_layers = len(model.state_specs())
        model.bind_states(
            [
                tuple(
                    backend.zeros((num_requests + 1, *shape), dtype)
                    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                )
                for spec in model.state_specs()
            ]
        )

    def close(self) -> None:
        """Free the memory. The model must not run until other states are bound."""
        self._model.bind_states([()] * self._num_layers)
