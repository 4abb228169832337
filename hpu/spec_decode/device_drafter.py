"""DeviceModelDrafter and its subclasses: launches of a drafter on a device with its own memory,
with their own graphs.

A drafter with a KV cache computes every prompt along with the target, in the same blocks, so that a
cached prefix of the target is also cached for the drafter. To draft, it first recomputes the last
tokens, because the previous decode may have accepted any number of them. No launch waits for the
host.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hpu.layers.metadata import AttentionInputs, DecodeAttentionInputs, PrefillAttentionInputs
from hpu.models.base import CausalLM
from hpu.protocol import Bucket
from hpu.runner.captured_functions import CapturedFunctions
from hpu.runner.input_buffers import LaunchInputs
from hpu.spec_decode.device import DraftBatch
from hpu.spec_decode.draft_head import DraftHead
from hpu.spec_decode.hidden_cache import HiddenCache
from hpu.spec_decode.hidden_heads import HiddenHead

Greedy = Callable[[Tensor], Tensor]
"""(M, V) logits to (M,) tokens of the index type, -1 for non-finite logits."""
Found = tuple[Tensor, ...]
"""(B,) drafts. A head with a KV cache adds (B, 1, hidden), its own hidden states, which replace the
target's in the next launch. A head without a KV cache returns all drafts (B, max_drafts) at
once."""


class DeviceModelDrafter:
    """Drafter with a draft model, which has its own KV cache."""

    shift = 0
    has_cache = True
    """Whether the drafter has a KV cache, which `prefill` fills."""

    def __init__(
        self,
        model: CausalLM,
        graphs: CapturedFunctions,
        greedy: Greedy,
        *,
        max_drafts: int,
        max_model_len: int,
        is_shorter: bool,
        hidden_cache: HiddenCache | None = None,
    ) -> None:
        """`is_shorter`: whether positions of the target can reach `max_model_len`. `hidden_cache`:
        hidden states of the target."""
        self.max_model_len = max_model_len
        # Two rows: the KV of the last draft of the previous launch was not computed, and the draft
        # may have been accepted.
        self.num_rows = 2
        self._model = model
        self._backend = graphs.backend
        self._graphs = graphs
        self._greedy = greedy
        self._max_drafts = max_drafts
        self._is_shorter = is_shorter
        self._hidden_cache = hidden_cache
        self._text: Callable[[PrefillAttentionInputs, int], Tensor] | None = None
        self._inputs: dict[tuple[Bucket, bool], tuple[Tensor, ...]] = {}
        """Input tensors of captured graphs, by (bucket, whether it is the first launch)."""

    def read_text(self, tokens: Callable[[PrefillAttentionInputs, int], Tensor]) -> None:
        """Set the source of prompt tokens: `tokens` maps a prefill and a shift to the tokens (B, Q)
        at its positions + shift."""
        self._text = tokens

    def prefill(self, inputs: LaunchInputs) -> None:
        """Compute the uploaded `inputs` of a prefill. Call it after the target's launch."""
        function = partial(_split, self._prefill, inputs)
        graph = self._graphs.find(
            ("prefill", inputs.bucket), inputs.bucket, function, inputs.capture_inputs
        )
        run = function if graph is None else graph.replay
        with self._backend.recipe:
            run(*inputs.graph_inputs)

    def draft(
        self, bucket: Bucket, first: DraftBatch, follow: Callable[[Tensor], DraftBatch]
    ) -> Tensor:
        """Draft tokens for a decode. See DeviceDrafter.draft."""
        found = self._run(bucket, self._first, first, is_first=True)
        drafts = [found[0].unsqueeze(1)]
        while len(drafts) < self._max_drafts:
            rows = follow(found[0])
            found = self._run(bucket, self._next, (*rows, *found[1:]), is_first=False)
            drafts.append(found[0].unsqueeze(1))
        return torch.cat(drafts, dim=1)

    def _run(
        self,
        bucket: Bucket,
        function: Callable[..., Found],
        inputs: tuple[Tensor, ...],
        *,
        is_first: bool,
    ) -> Found:
        """Launch `function`, as a graph if it is captured. Graph outputs are cloned, because the
        next replay overwrites them."""
        key = bucket, is_first
        graph = self._graphs.find(
            ("draft", *key), bucket, function, lambda: self._own_inputs(key, inputs)
        )
        with self._backend.recipe:
            if graph is None:
                return function(*inputs)
            outputs: Found = graph.replay(*self._own_inputs(key, inputs))
            return tuple(output.clone() for output in outputs)

    def _own_inputs(
        self, key: tuple[Bucket, bool], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Copy `inputs` to the tensors that a graph reads, and return the copies. The runtime does
        not accept views."""
        own = self._inputs.get(key)
        if own is None:
            zeros = self._backend.zeros
            own = self._inputs[key] = tuple(
                zeros(tuple(tensor.shape), tensor.dtype) for tensor in inputs
            )
        for target, source in zip(own, inputs, strict=True):
            target.copy_(source)
        return own

    def _prefill(self, inputs: LaunchInputs, tokens: Tensor, context: AttentionInputs) -> Tensor:
        """Run a prefill to fill the cache. The value of the returned tensor is unused."""
        if tokens.dim() > 2:
            # On later pipeline stages, `tokens` contains hidden states.
            tokens = self._prompt_tokens(context)
        hidden: Tensor = self._model(tokens, self._within(context))
        return hidden.reshape(-1, hidden.shape[-1])[:1].clone()

    def _prompt_tokens(self, context: AttentionInputs) -> Tensor:
        """(B, Q) tokens at the drafter's positions of a prefill."""
        assert isinstance(context, PrefillAttentionInputs) and self._text is not None
        return self._text(context, self.shift)

    def _first(self, tokens: Tensor, *rows: Tensor) -> Found:
        batch = len(tokens) // self.num_rows
        hidden = self._model(tokens, DecodeAttentionInputs.of(rows))
        return (self._choose(hidden.reshape(-1, hidden.shape[-1])[-batch:]),)

    def _next(self, tokens: Tensor, *rows: Tensor) -> Found:
        hidden = self._model(tokens, DecodeAttentionInputs.of(rows))
        return (self._choose(hidden.reshape(-1, hidden.shape[-1])),)

    def _within(self, context: AttentionInputs) -> AttentionInputs:
        """Clamp positions to the drafter's maximum; positions beyond it are not drafted."""
        if not self._is_shorter:
            return context
        assert isinstance(context, PrefillAttentionInputs)
        return context._replace(positions=context.positions.clamp(max=self.max_model_len - 1))

    def _choose(self, hidden: Tensor) -> Tensor:
        """(M, hidden) to the (M,) most likely tokens; 0 for non-finite logits, since drafts are
        verified anyway."""
        model = self._model
        found = model.argmax(hidden)
        if found is None:
            found = self._greedy(model.logits(hidden))
        if isinstance(model, DraftHead):
            found = model.tokens_of(found)
        return found.clamp(min=0).to(self._backend.index_dtype)


class DeviceHeadDrafter(DeviceModelDrafter):
    """Drafter with a head, which has its own KV cache and reads the target's hidden states:
    position i combines the hidden states of token i with token i + 1."""

    shift = 1

    def __init__(self, *args: object, **options: object) -> None:
        """Arguments of DeviceModelDrafter; the model is a DraftHead, and `hidden_cache` is
        required."""
        super().__init__(*args, **options)  # type: ignore[arg-type]
        # Recompute all positions that the previous decode may have accepted: they were drafted from
        # the head's own hidden states, not the target's.
        self.num_rows = 1 + self._max_drafts
        assert isinstance(self._model, DraftHead)
        self._head = self._model

    def _prefill(self, inputs: LaunchInputs, tokens: Tensor, context: AttentionInputs) -> Tensor:
        following = self._prompt_tokens(context)
        known = self._known(following, context)
        out, _ = self._head.draft(following, self._within(context), known)
        return out.reshape(-1, out.shape[-1])[:1].clone()

    def _first(self, tokens: Tensor, *rows: Tensor) -> Found:
        context = DecodeAttentionInputs.of(rows)
        batch = len(tokens) // self.num_rows
        for_logits, following = self._head.draft(tokens, context, self._known(tokens, context))
        return self._choose(for_logits.flatten(0, 1)[-batch:]), following[-batch:]

    def _next(self, tokens: Tensor, *rows: Tensor) -> Found:
        context = DecodeAttentionInputs.of(rows[:-1])
        for_logits, following = self._head.draft(tokens, context, rows[-1])
        return self._choose(for_logits.flatten(0, 1)), following

    def _known(self, tokens: Tensor, context: AttentionInputs) -> Tensor:
        """(B, Q, hidden): the target's hidden states at the slots of a launch, combined by the
        head."""
        assert self._hidden_cache is not None
        hidden = self._head.combine(self._hidden_cache.read(context))
        return hidden.view(*tokens.shape, -1)


class DeviceHiddenHeadDrafter(DeviceModelDrafter):
    """Drafter with a head that reads the hidden states of a single token and has no KV cache."""

    shift = 1
    has_cache = False

    def __init__(self, *args: object, **options: object) -> None:
        """Arguments of DeviceModelDrafter; the model is a HiddenHead, and `hidden_cache` is
        required."""
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.num_rows = 1

    def draft(
        self, bucket: Bucket, first: DraftBatch, follow: Callable[[Tensor], DraftBatch]
    ) -> Tensor:
        inputs = (first.tokens, first.slot_mapping)
        return self._run(bucket, self._first, inputs, is_first=True)[0]

    def _first(self, tokens: Tensor, *rows: Tensor) -> Found:
        head = self._model
        assert isinstance(head, HiddenHead) and self._hidden_cache is not None
        hidden = self._hidden_cache.at(rows[0])
        drafts = head.drafts(hidden, tokens.view(-1), self._max_drafts, self._greedy)
        return (drafts.clamp(min=0).to(self._backend.index_dtype),)


def _split(
    function: Callable[[LaunchInputs, Tensor, AttentionInputs], Tensor],
    inputs: LaunchInputs,
    *tensors: Tensor,
) -> Tensor:
    """Run `function` on tensors shaped like `inputs.graph_inputs`."""
    split = inputs.split(*tensors)
    return function(inputs, split.tokens, split.context)
