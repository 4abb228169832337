"""SamplerGraphs: head and sampler of a decode as one captured function."""

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
    """Samples the decodes of one batch width."""

    graph: Graph
    stages: Stages

    def run(self, hidden: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) tokens as in SamplerOutput, and (B, 1) the same as the next decode's input, valid
        until the next run. `hidden` (B, 1, hidden), `params` of Sampler.begin_whole."""
        # The runtime copies an input that a graph does not read.
        inputs = (hidden, params) if self.stages.draw else (hidden,)
        tokens, following = self.graph.replay(*inputs)
        return tokens, following


class SamplerGraphs:
    """One graph for each batch width and each of the few sets of stages that `Sampler.whole`
    samples, in the memory reserved for graphs.

    They are captured on a device whose graphs read what they are replayed with. Only decodes with a
    graph of their own use them: the memory layout of their hidden states, which is part of the
    runtime's key, is the same in all of them.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        backend: Backend,
        graphs: GraphCache,
        agreement: Agreement,
    ) -> None:
        """`agreement`: of the ranks that sample."""
        self._model = model
        self._sampler = sampler
        self._backend = backend
        self._functions: dict[Stages, Callable[..., tuple[Tensor, Tensor]]] = {}
        self._captured = CapturedFunctions(backend, graphs, agreement, "sampling")

    def find(self, bucket: Bucket, hidden: Tensor, req_indices: list[int]) -> SamplerGraph | None:
        """The graph that samples these requests of a launch with `hidden`; None if it has none."""
        if bucket[0] != DECODE or not self._backend.rebinds_inputs:
            return None
        stages = self._sampler.stages_of_whole(req_indices)
        if stages is None:
            return None
        width = bucket[1]
        if stages not in self._functions:
            self._functions[stages] = _whole(
                self._model, self._sampler.whole(stages), self._backend.index_dtype
            )

        def inputs() -> tuple[Tensor, ...]:
            return (hidden, self._sampler.params(width)) if stages.draw else (hidden,)

        graph = self._captured.find(
            (width, stages), bucket, self._functions[stages], inputs, frees_intermediates=True
        )
        return None if graph is None else SamplerGraph(graph, stages)


def _whole(
    model: CausalLM, tokens_of: Callable[..., Tensor], index_dtype: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of hidden states (B, 1, hidden), and of parameters if it draws, as
    SamplerGraph.run."""

    def sample(hidden: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        tokens = None if params else model.argmax(hidden)
        if tokens is None:
            tokens = tokens_of(model.logits(hidden), *params)
        tokens = tokens.to(index_dtype)
        # A token of -1 (logits that were not finite) may be read by a step already planned.
        return tokens, tokens.clamp(min=0).unsqueeze(1)

    return sample
