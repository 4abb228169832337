"""SamplerGraphs: LM head and sampler of a decode as a single captured function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hpu.backends.base import Backend, Graph
from hpu.distributed.agreement import Agreement
from hpu.models.base import CausalLM
from hpu.protocol import DECODE, Bucket
from hpu.runner.captured_functions import CapturedFunctions
from hpu.runner.graph_cache import GraphCache
from hpu.sampling.params import Stages
from hpu.sampling.sampler import Sampler


class SamplerGraph(NamedTuple):
    """Graph that samples the decodes of one batch width."""

    graph: Graph
    stages: Stages

    def run(self, hidden: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a decode. Returns tokens (B,) (see SamplerOutput) and input tokens (B, 1) of the
        next decode, both valid until the next run. `hidden`: (B, 1, hidden). `params`: from
        Sampler.begin_fused."""
        # Pass no unused input: the runtime would copy it.
        inputs = (hidden, params) if self.stages.draw else (hidden,)
        tokens, following = self.graph.replay(*inputs)
        return tokens, following


class SamplerGraphs:
    """A graph for each batch width and each set of stages that `Sampler.fused_function` supports,
    in the memory reserved for graphs.

    Used only by decodes whose forward pass has a graph: their hidden states have the same memory
    layout, which is part of the runtime's key.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        backend: Backend,
        graphs: GraphCache,
        agreement: Agreement,
    ) -> None:
        """`agreement`: agreement of the ranks that sample."""
        self._model = model
        self._sampler = sampler
        self._backend = backend
        self._functions: dict[Stages, Callable[..., tuple[Tensor, Tensor]]] = {}
        self._captured = CapturedFunctions(backend, graphs, agreement, "sampling")

    def find(self, bucket: Bucket, hidden: Tensor, req_indices: list[int]) -> SamplerGraph | None:
        """Graph that samples these requests of a launch whose output is `hidden`; None: sample
        without a graph."""
        stages = self._sampler.fusable_stages(req_indices) if bucket[0] == DECODE else None
        if stages is None:
            return None
        width = bucket[1]
        if stages not in self._functions:
            self._functions[stages] = _sampling_function(
                self._model, self._sampler.fused_function(stages), self._backend.index_dtype
            )

        def inputs() -> tuple[Tensor, ...]:
            return (hidden, self._sampler.params(width)) if stages.draw else (hidden,)

        graph = self._captured.find(
            (width, stages), bucket, self._functions[stages], inputs, frees_intermediates=True
        )
        return None if graph is None else SamplerGraph(graph, stages)


def _sampling_function(
    model: CausalLM, tokens_of: Callable[..., Tensor], index_dtype: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Build the function to capture. It maps hidden states (B, 1, hidden), and parameters if it
    draws, to the outputs of SamplerGraph.run."""

    def sample(hidden: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        tokens = None if params else model.argmax(hidden)
        if tokens is None:
            tokens = tokens_of(model.logits(hidden), *params)
        tokens = tokens.to(index_dtype)
        # Clamped: a planned step may already read a token of -1 (see SamplerOutput).
        return tokens, tokens.clamp(min=0).unsqueeze(1)

    return sample
