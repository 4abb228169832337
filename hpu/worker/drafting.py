"""Builds the drafting and verification components, for the host or for a device with its own
memory."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from config.errors import ConfigError
from config.speculation.base import SpeculationMethod
from hpu.distributed.agreement import Agreement
from hpu.launch_inputs import LaunchFeature
from hpu.layers.metadata import AttentionInputs
from hpu.models.base import CausalLM
from hpu.quantization.kv_cache import zero_non_finite
from hpu.runner.batch_state import BatchState
from hpu.runner.captured_functions import CapturedFunctions
from hpu.runner.draft_buffers import DraftLayout, PlannedDraftInputs, SampledTokenInputs
from hpu.runner.drafting.device_drafter import DeviceModelDrafter
from hpu.runner.drafting.device_runner import DeviceSpeculationRunner
from hpu.runner.drafting.draft_runner import DraftRunner
from hpu.runner.drafting.hidden_cache import HiddenCache
from hpu.runner.drafting.host_runner import HostSpeculationRunner, PlannedDraftRunner
from hpu.runner.graph_cache import Forward
from hpu.runner.input_buffers import HiddenBuffers
from hpu.runner.kv_cache import KVCache
from hpu.runner.model_runner import ModelRunner, RunnerParts
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.base import AcceptanceCounts
from hpu.spec_decode.device import DeviceSpeculation
from hpu.spec_decode.device_search import KeptDrafts
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.drafter import select_drafter, select_model_drafter, select_proposer
from hpu.spec_decode.speculation import Speculation
from hpu.worker.load import LoadedModel


class DraftCaches(NamedTuple):
    """A drafter's caches, indexed by the target's blocks."""

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
        clean=zero_non_finite if drafter.kv_cache_format is None else drafter.kv_cache_format.clean,
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
    return DraftCaches(kv, hidden)


def keeping_hidden(loaded: LoadedModel, caches: DraftCaches | None, forward: Forward) -> Forward:
    """Extend the target's `forward` to store hidden states, because the replay of a captured graph
    runs no other code. Returns `forward` itself on a host, whose runner stores them, and if the
    drafter reads none."""
    if caches is None or caches.hidden is None or loaded.backend.shares_host_memory:
        return forward
    model, cache = loaded.model, caches.hidden
    assert isinstance(model, CausalLM), "a target generates"

    def keeping(tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        hidden = forward(tokens, inputs)
        kept = model.kept_hidden_states
        cache.write(inputs, hidden if kept is None else kept)
        return hidden

    return keeping


def draft_features(loaded: LoadedModel, batch_state: BatchState) -> tuple[LaunchFeature, ...]:
    """Further inputs of decodes that verify drafts on a device: sampled tokens on a pipeline stage
    that does not sample, and drafts if the plans contain them."""
    method = _device_method(loaded)
    if method is None:
        return ()
    found: list[LaunchFeature] = []
    if not loaded.link.stage.is_last:
        found.append(SampledTokenInputs(batch_state, 1 + method.max_drafts))
    if _plans_drafts(loaded, method):
        found.append(PlannedDraftInputs(method.max_drafts))
    return tuple(found)


def draft_layout(
    loaded: LoadedModel,
    sampler: Sampler,
    features: Sequence[LaunchFeature],
    hidden_buffers: HiddenBuffers | None,
) -> DraftLayout | None:
    """Inputs of decodes that verify drafts on a device; None for other decodes. Prepares `sampler`
    for drafts. `hidden_buffers`: for a pipeline stage that receives hidden states. Raises
    ConfigError for a model with M-RoPE on such a device."""
    method = _device_method(loaded)
    if method is None:
        return None
    vision = loaded.model_config.vision
    if vision is not None and vision.uses_mrope:
        raise ConfigError(
            f"--speculative-config names the method {method.method}, and {loaded.config.model} "
            "has positions with three axes, whose drafts are verified on cpu and not on "
            f"{loaded.backend.name}: leave --speculative-config out"
        )
    width, max_inflight = 1 + method.max_drafts, loaded.config.max_inflight_steps
    sampler.expect_drafts(method.max_drafts, max_inflight)
    # Positions that a drafter recomputes (at most `width`), and the tokens of each launch in flight
    # (at most `width`), including this launch.
    reach = width * (max_inflight + 1)
    if method.has_drafter:
        # Drafts made at the end of a launch follow the tokens that the launch accepts.
        reach += width
    window = -(-reach // loaded.block_size) + 1
    return DraftLayout(width, window, features, hidden_buffers=hidden_buffers)


def _device_method(loaded: LoadedModel) -> SpeculationMethod | None:
    """Method whose drafts are verified on a device with its own memory."""
    return None if loaded.backend.shares_host_memory else loaded.config.speculation.choose()


def _plans_drafts(loaded: LoadedModel, method: SpeculationMethod) -> bool:
    """Whether a device gets its drafts with the plans. True with pipeline stages if only the
    last stage can draft, because only the last stage has the drafter or the outputs of earlier
    requests."""
    needs_last_stage = method.has_drafter or method.reads_earlier_outputs
    return needs_last_stage and loaded.link.stage.size > 1


def make_model_runner(
    loaded: LoadedModel,
    parts: RunnerParts,
    caches: DraftCaches | None,
    count: Callable[[str, float], None],
) -> ModelRunner:
    """Create the runner of the target `loaded`, which verifies drafts if speculation is configured.
    `count`: adds to a counter."""
    method = loaded.config.speculation.choose()
    if method is None:
        return ModelRunner(parts)
    counts = AcceptanceCounts(count)
    if loaded.backend.shares_host_memory:
        return _host_runner(loaded, parts, method, caches, counts)
    batch_state, stage = parts.batch_state, loaded.link.stage
    drafter = _device_drafter(loaded, method, caches, parts)
    plans_drafts = _plans_drafts(loaded, method)
    if stage.is_last or not plans_drafts:
        search = select_drafter(method).search(
            method,
            loaded.backend,
            max_num_reqs=batch_state.max_num_reqs,
            max_model_len=loaded.max_model_len,
        )
    else:
        search = KeptDrafts(
            loaded.backend, max_num_reqs=batch_state.max_num_reqs, max_drafts=method.max_drafts
        )
    speculation = DeviceSpeculation(
        method,
        loaded.backend,
        counts,
        max_num_reqs=batch_state.max_num_reqs,
        max_model_len=loaded.max_model_len,
        block_size=loaded.block_size,
        pad_block=batch_state.pad_block,
        search=search,
        drafter=drafter,
        plans_drafts=plans_drafts,
    )
    return DeviceSpeculationRunner(parts, speculation, drafter)


def _host_runner(
    loaded: LoadedModel,
    parts: RunnerParts,
    method: SpeculationMethod,
    caches: DraftCaches | None,
    counts: AcceptanceCounts,
) -> ModelRunner:
    stage = loaded.link.stage
    if not stage.is_last:
        return PlannedDraftRunner(parts)
    drafter = _draft_runner(loaded.drafter, method, caches, parts)
    speculation = Speculation(
        select_proposer(method, drafter),
        parts.batch_state,
        parts.sampler,
        DraftLengths(method.max_drafts, costs=None),
        counts,
        drafts_all_ahead=stage.size > 1,
    )
    return HostSpeculationRunner(parts, speculation, None if caches is None else caches.hidden)


def _draft_runner(
    drafter: LoadedModel | None,
    method: SpeculationMethod,
    caches: DraftCaches | None,
    parts: RunnerParts,
) -> DraftRunner | None:
    if drafter is None or caches is None:
        return None
    assert isinstance(drafter.model, CausalLM), "a drafter generates"
    return select_model_drafter(method).runner(
        drafter.model,
        drafter.backend,
        parts.batch_state,
        caches.kv,
        parts.sampler.greedy,
        Agreement(drafter.groups.stage_host),
        max_model_len=drafter.max_model_len,
        max_prefill_tokens=drafter.token_budget,
        hidden_cache=caches.hidden,
    )


def _device_drafter(
    loaded: LoadedModel,
    method: SpeculationMethod,
    caches: DraftCaches | None,
    parts: RunnerParts,
) -> DeviceModelDrafter | None:
    drafter = loaded.drafter
    if drafter is None or caches is None:
        return None
    assert isinstance(drafter.model, CausalLM), "a drafter generates"
    functions = CapturedFunctions(loaded.backend, parts.graphs, parts.agreement, "drafting")
    return select_model_drafter(method).device_drafter(
        drafter.model,
        loaded.backend,
        functions,
        parts.sampler.fused_greedy,
        max_drafts=method.max_drafts,
        max_model_len=drafter.max_model_len,
        is_shorter=drafter.max_model_len < loaded.max_model_len,
        hidden_cache=caches.hidden,
    )
