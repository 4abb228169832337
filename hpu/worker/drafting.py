"""Builds the drafting and verification components: on the host, or on a device with its own
memory."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from config.errors import ConfigError
from config.params.speculation import NGRAM, SUFFIX, SpeculationMethod
from hpu.distributed.agreement import Agreement
from hpu.layers.metadata import AttentionInputs
from hpu.models.base import CausalLM
from hpu.models.draft.heads import DraftHead
from hpu.protocol import PREFILL, Bucket
from hpu.quantization.kv_cache import zero_non_finite
from hpu.runner.batch_state import BatchState
from hpu.runner.captured_functions import CapturedFunctions
from hpu.runner.draft_buffers import DraftBuffers
from hpu.runner.drafting.device_drafter import DEVICE_DRAFTERS, DeviceDrafter
from hpu.runner.drafting.draft_runner import DRAFT_RUNNERS, DraftRunner
from hpu.runner.drafting.hidden_cache import HiddenCache
from hpu.runner.graph_cache import Forward, GraphCache
from hpu.runner.input_buffers import HiddenBuffers, InputBuffers
from hpu.runner.kv_cache import KVCache
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.acceptance_counts import AcceptanceCounts
from hpu.spec_decode.device import DeviceSpeculation
from hpu.spec_decode.device_search import KeptDrafts, NgramSearch, TextSearch
from hpu.spec_decode.device_suffix import SuffixSearch
from hpu.spec_decode.draft_lengths import DraftLengths
from hpu.spec_decode.select import select_proposer
from hpu.spec_decode.speculation import Speculation
from hpu.worker.load import LoadedModel


class DraftCaches(NamedTuple):
    """A drafter's caches, indexed by the target's blocks."""

    kv: KVCache
    hidden: HiddenCache | None
    """Hidden states of the target; None: the drafter does not read them."""

    @property
    def all(self) -> tuple[KVCache | HiddenCache, ...]:
        """The caches that exist."""
        return (self.kv,) if self.hidden is None else (self.kv, self.hidden)


class Speculations(NamedTuple):
    """Speculation components of a runner: `on_host` or `on_device`, or neither without
    speculation."""

    on_host: Speculation | None = None
    on_device: DeviceSpeculation | None = None
    drafter: DeviceDrafter | None = None
    hidden_cache: HiddenCache | None = None
    """Cache that the runner fills with the target's hidden states; None: not needed, or filled by
    the graphs (`keeping_hidden`)."""


def make_draft_caches(loaded: LoadedModel, num_blocks: int) -> DraftCaches | None:
    """Caches for the blocks of the target `loaded`; None without a draft model or head."""
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
    """The target's `forward`, extended to store hidden states. Needed with captured graphs, because
    a replay runs no other code."""
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


def with_draft_buffers(
    loaded: LoadedModel,
    make: Callable[..., InputBuffers],
    sampler: Sampler,
    hidden_buffers: HiddenBuffers | None,
) -> Callable[..., InputBuffers]:
    """Wrap `make`, the factory of input buffers: on a device with speculation, decodes get
    DraftBuffers. `hidden_buffers`: for a pipeline stage that receives hidden states."""
    method = loaded.config.speculation.choose()
    if method is None or loaded.backend.shares_host_memory:
        return make
    vision = loaded.facts.vision
    if vision is not None and vision.uses_mrope:
        raise ConfigError(
            f"--speculative-config names the method {method.method}, and {loaded.config.model} has "
            f"positions with three axes: its drafts are verified on cpu, not on "
            f"{loaded.backend.name}"
        )
    stage = loaded.link.stage
    width, max_inflight = 1 + method.max_drafts, loaded.config.max_inflight_steps
    sampler.expect_drafts(method.max_drafts, max_inflight)
    # The previous launch may have accepted anything from no drafts to all drafts; a drafter looks
    # back equally far.
    reach = width * (max_inflight + 1)
    if method.has_drafter:
        # It may draft after the tokens accepted by a launch when this launch ends.
        reach += width
    window = -(-reach // loaded.block_size) + 1
    make_decode = partial(
        DraftBuffers,
        width=width,
        window=window,
        has_adapters=loaded.lora is not None,
        hidden_buffers=hidden_buffers,
        learns=not stage.is_last,
        plans_drafts=_plans_drafts(loaded, method),
    )
    drafter = loaded.drafter
    if drafter is not None and (isinstance(drafter.model, DraftHead) or not stage.is_first):
        # The drafter reads the tokens of each request.
        make = partial(make, names_requests=True)

    def made(bucket: Bucket, *args: Any, **flags: Any) -> InputBuffers:
        return (make if bucket[0] == PREFILL else make_decode)(bucket, *args, **flags)

    return made


def _plans_drafts(loaded: LoadedModel, method: SpeculationMethod) -> bool:
    """Whether a device gets its drafts with the plans. True with pipeline stages if only the last
    stage can draft: it has the drafter, or it alone has the tokens of earlier requests."""
    reads_earlier = method.method == SUFFIX and method.suffix.max_cached_requests > 0
    return (method.has_drafter or reads_earlier) and loaded.link.stage.size > 1


def make_speculations(
    loaded: LoadedModel,
    caches: DraftCaches | None,
    batch_state: BatchState,
    sampler: Sampler,
    graphs: GraphCache,
    count: Callable[[str, float], None],
) -> Speculations:
    """Components that make and verify drafts for the target `loaded`. `count` adds to a counter."""
    method = loaded.config.speculation.choose()
    if method is None:
        return Speculations()
    counts = AcceptanceCounts(count)
    stage = loaded.link.stage
    if loaded.backend.shares_host_memory:
        if not stage.is_last:
            # The plans contain the drafts to verify.
            return Speculations()
        runner = _draft_runner(loaded.drafter, caches, batch_state, sampler)
        proposer = select_proposer(method, runner)
        lengths = DraftLengths(method.max_drafts, costs=None)
        on_host = Speculation(
            proposer, batch_state, sampler, lengths, counts, drafts_all_ahead=stage.size > 1
        )
        return Speculations(on_host, hidden_cache=None if caches is None else caches.hidden)
    drafter = _device_drafter(loaded, method, caches, sampler, graphs)
    plans_drafts = _plans_drafts(loaded, method)
    search: TextSearch
    if method.method == NGRAM:
        search = NgramSearch(method)
    elif method.method == SUFFIX and (stage.is_last or not plans_drafts):
        search = SuffixSearch(
            method,
            loaded.backend,
            max_num_reqs=batch_state.max_num_reqs,
            max_model_len=loaded.max_model_len,
        )
    else:
        search = KeptDrafts(
            loaded.backend, max_num_reqs=batch_state.max_num_reqs, max_drafts=method.max_drafts
        )
    on_device = DeviceSpeculation(
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
    return Speculations(on_device=on_device, drafter=drafter)


def _draft_runner(
    drafter: LoadedModel | None,
    caches: DraftCaches | None,
    batch_state: BatchState,
    sampler: Sampler,
) -> DraftRunner | None:
    if drafter is None or caches is None:
        return None
    assert isinstance(drafter.model, CausalLM), "a drafter generates"
    return DRAFT_RUNNERS[drafter.draft_method](
        drafter.model,
        drafter.backend,
        batch_state,
        caches.kv,
        sampler.greedy,
        Agreement(drafter.groups.stage_host),
        max_model_len=drafter.max_model_len,
        max_prefill_tokens=drafter.config.scheduler.token_budget(),
        hidden_cache=caches.hidden,
    )


def _device_drafter(
    loaded: LoadedModel,
    method: SpeculationMethod,
    caches: DraftCaches | None,
    sampler: Sampler,
    graphs: GraphCache,
) -> DeviceDrafter | None:
    drafter = loaded.drafter
    if drafter is None or caches is None:
        return None
    assert isinstance(drafter.model, CausalLM), "a drafter generates"
    functions = CapturedFunctions(
        loaded.backend, graphs, Agreement(loaded.groups.stage_host), "drafting"
    )
    return DEVICE_DRAFTERS[drafter.draft_method](
        drafter.model,
        loaded.backend,
        functions,
        sampler.fused_greedy,
        max_drafts=method.max_drafts,
        max_model_len=drafter.max_model_len,
        is_shorter=drafter.max_model_len < loaded.max_model_len,
        hidden_cache=caches.hidden,
    )
