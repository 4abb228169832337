"""Drafting: builds the parts of a runner that draft and verify, on the host or on a device with its
own memory."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from config.errors import ConfigError
from config.speculation.base import SpeculationMethod
from hpu.launch_inputs import LaunchArrays, LaunchFeature
from hpu.layers.metadata import AttentionInputs
from hpu.models.base import CausalLM
from hpu.runner.batch_state import BatchState
from hpu.runner.captured_functions import CapturedFunctions
from hpu.runner.graph_cache import Forward
from hpu.runner.input_buffers import DecodeLayout, HiddenBuffers, InputLayout
from hpu.runner.kv_cache import KVCache
from hpu.runner.model_runner import ModelRunner, RunnerParts
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.base import AcceptanceCounts
from hpu.spec_decode.device import DeviceSpeculation
from hpu.spec_decode.device_drafter import DeviceModelDrafter
from hpu.spec_decode.device_runner import DeviceSpeculationRunner
from hpu.spec_decode.device_search import KeptDrafts
from hpu.spec_decode.draft_buffers import DraftLayout, PlannedDraftInputs, SampledTokenInputs
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.draft_runner import DraftRunner
from hpu.spec_decode.drafter import select_drafter, select_model_drafter, select_proposer
from hpu.spec_decode.hidden_cache import HiddenCache
from hpu.spec_decode.host import HostSpeculation
from hpu.spec_decode.host_runner import HostSpeculationRunner, PlannedDraftRunner
from hpu.worker.load import LoadedModel


class DraftCaches(NamedTuple):
    """A drafter and its caches, indexed by the target's blocks."""

    drafter: LoadedModel
    model: CausalLM
    kv: KVCache
    hidden: HiddenCache | None
    """Hidden states of the target; None if the drafter does not read them."""

    @property
    def all(self) -> tuple[KVCache | HiddenCache, ...]:
        return (self.kv,) if self.hidden is None else (self.kv, self.hidden)


def make_draft_caches(loaded: LoadedModel, num_blocks: int) -> DraftCaches | None:
    """Create the caches of a drafter for the blocks of the target `loaded`; None without a draft
    model or head."""
    drafter = loaded.drafter
    if drafter is None:
        return None
    model = drafter.model
    assert isinstance(model, CausalLM), "a drafter generates"
    kv = KVCache(
        model,
        drafter.backend,
        num_blocks=num_blocks,
        block_size=drafter.block_size,
        dtype=drafter.kv_cache_dtype,
        clean=drafter.clean_cache_rows,
    )
    hidden = None
    if model.hidden_width:
        hidden = HiddenCache(
            drafter.backend,
            num_blocks=num_blocks,
            block_size=drafter.block_size,
            width=model.hidden_width,
            dtype=drafter.dtype,
        )
    return DraftCaches(drafter, model, kv, hidden)


class Drafting:
    """The parts of a runner that depend on speculation. This base class is for a server without
    speculation."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def keeping_hidden(self, forward: Forward) -> Forward:
        """The target's `forward`, extended to store the hidden states that the drafter reads, if
        the runner does not store them."""
        return forward

    def features(self, batch_state: BatchState) -> tuple[LaunchFeature, ...]:
        """Further inputs of launches."""
        return ()

    def decode_layout(
        self,
        sampler: Sampler,
        features: Sequence[LaunchFeature],
        hidden_buffers: HiddenBuffers | None,
    ) -> InputLayout[LaunchArrays]:
        """Inputs of decodes. Prepares `sampler` for them. `hidden_buffers`: for a pipeline stage
        that receives hidden states. Raises ConfigError for a model whose drafts the device cannot
        verify."""
        count = self._loaded.num_launches
        return DecodeLayout(features, num_sets=count, hidden_buffers=hidden_buffers)

    def runner(self, parts: RunnerParts, count: Callable[[str, float], None]) -> ModelRunner:
        """The runner of the target. `count`: adds to a counter."""
        return ModelRunner(parts)


class SpeculativeDrafting(Drafting):
    """The parts that draft and verify."""

    def __init__(
        self, loaded: LoadedModel, method: SpeculationMethod, caches: DraftCaches | None
    ) -> None:
        """`caches`: caches of the draft model or head; None without either."""
        super().__init__(loaded)
        self._method = method
        self._caches = caches


class HostDrafting(SpeculativeDrafting):
    """Verification on the host, which knows all tokens of earlier launches."""

    def runner(self, parts: RunnerParts, count: Callable[[str, float], None]) -> ModelRunner:
        stage = self._loaded.link.stage
        if not stage.is_last:
            return PlannedDraftRunner(parts)
        speculation = HostSpeculation(
            select_proposer(self._method, self._drafter(parts)),
            parts.batch_state,
            parts.sampler,
            DraftLengths(self._method.max_drafts),
            AcceptanceCounts(count),
            drafts_all_ahead=stage.size > 1,
        )
        hidden = None if self._caches is None else self._caches.hidden
        return HostSpeculationRunner(parts, speculation, hidden)

    def _drafter(self, parts: RunnerParts) -> DraftRunner | None:
        if self._caches is None:
            return None
        drafter = self._caches.drafter
        return select_model_drafter(self._method).runner(
            self._caches.model,
            drafter.backend,
            parts,
            self._caches.kv,
            max_model_len=drafter.max_model_len,
            max_prefill_tokens=drafter.token_budget,
            hidden_cache=self._caches.hidden,
        )


class DeviceDrafting(SpeculativeDrafting):
    """Verification on a device with its own memory."""

    @property
    def _plans_drafts(self) -> bool:
        """Whether the device gets its drafts with the plans. True with pipeline stages if only the
        last stage can draft, because only the last stage has the drafter or the outputs of earlier
        requests."""
        needs_last_stage = self._method.has_drafter or self._method.reads_earlier_outputs
        return needs_last_stage and self._loaded.link.stage.size > 1

    def keeping_hidden(self, forward: Forward) -> Forward:
        # Within `forward`, because the replay of a captured graph runs no other code.
        if self._caches is None or self._caches.hidden is None:
            return forward
        model, cache = self._loaded.model, self._caches.hidden
        assert isinstance(model, CausalLM), "a target generates"

        def keeping(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
            hidden = forward(tokens, inputs)
            kept = model.kept_hidden_states
            cache.write(inputs, hidden if kept is None else kept)
            return hidden

        return keeping

    def features(self, batch_state: BatchState) -> tuple[LaunchFeature, ...]:
        """Sampled tokens on a pipeline stage that does not sample, and drafts if the plans contain
        them."""
        found: list[LaunchFeature] = []
        if not self._loaded.link.stage.is_last:
            found.append(SampledTokenInputs(batch_state, 1 + self._method.max_drafts))
        if self._plans_drafts:
            found.append(PlannedDraftInputs(self._method.max_drafts))
        return tuple(found)

    def decode_layout(
        self,
        sampler: Sampler,
        features: Sequence[LaunchFeature],
        hidden_buffers: HiddenBuffers | None,
    ) -> InputLayout[LaunchArrays]:
        loaded, method = self._loaded, self._method
        vision = loaded.model_config.vision
        if vision is not None and vision.uses_mrope:
            raise ConfigError(
                f"--speculative-config names the method {method.method}, and {loaded.config.model} "
                "has positions with three axes, whose drafts are verified on cpu and not on "
                f"{loaded.backend.name}: leave --speculative-config out"
            )
        width, max_inflight = 1 + method.max_drafts, loaded.config.max_inflight_steps
        sampler.expect_drafts(method.max_drafts, max_inflight)
        # Positions that a drafter recomputes (at most `width`), and the tokens of each launch in
        # flight (at most `width`), including this launch.
        reach = width * (max_inflight + 1)
        if method.has_drafter:
            # Drafts made at the end of a launch follow the tokens that the launch accepts.
            reach += width
        window = -(-reach // loaded.block_size) + 1
        return DraftLayout(width, window, features, hidden_buffers=hidden_buffers)

    def runner(self, parts: RunnerParts, count: Callable[[str, float], None]) -> ModelRunner:
        loaded, method, max_num_reqs = self._loaded, self._method, parts.batch_state.max_num_reqs
        drafter = self._drafter(parts)
        if loaded.link.stage.is_last or not self._plans_drafts:
            search = select_drafter(method).search(
                method,
                loaded.backend,
                max_num_reqs=max_num_reqs,
                max_model_len=loaded.max_model_len,
            )
        else:
            search = KeptDrafts(
                loaded.backend, max_num_reqs=max_num_reqs, max_drafts=method.max_drafts
            )
        speculation = DeviceSpeculation(
            method,
            loaded.backend,
            parts.batch_state,
            max_model_len=loaded.max_model_len,
            search=search,
            drafter=drafter,
            plans_drafts=self._plans_drafts,
        )
        return DeviceSpeculationRunner(parts, speculation, drafter, AcceptanceCounts(count))

    def _drafter(self, parts: RunnerParts) -> DeviceModelDrafter | None:
        if self._caches is None:
            return None
        loaded, drafter = self._loaded, self._caches.drafter
        functions = CapturedFunctions(loaded.backend, parts.graphs, parts.agreement, "drafting")
        return select_model_drafter(self._method).device_drafter(
            self._caches.model,
            functions,
            parts.sampler.fused_greedy,
            max_drafts=self._method.max_drafts,
            max_model_len=drafter.max_model_len,
            is_shorter=drafter.max_model_len < loaded.max_model_len,
            hidden_cache=self._caches.hidden,
        )
