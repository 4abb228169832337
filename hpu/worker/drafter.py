"""Loads the draft model or head of the configured speculation method."""

import logging
import time
from dataclasses import replace

from config.checkpoint.draft import draft_config, draft_facts, draft_folder
from config.engine import DUMMY, EngineConfig
from config.errors import bytes_text
from config.model.context_length import default_context_length, max_context_length
from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from config.parallel import WHOLE, Stage
from config.speculation.drafter import facts_of
from hpu.backends.base import Backend
from hpu.distributed.process_groups import ProcessGroups
from hpu.model_loader.dummy_weights import fill_dummy
from hpu.model_loader.loader import load_weights
from hpu.models.base import CausalLM, ModelBuild
from hpu.protocol import WarmupProgress
from hpu.quantization.registry import process_weights
from hpu.spec_decode.draft_head import DraftHead
from hpu.spec_decode.drafter import select_model_drafter
from hpu.worker.load import LoadedModel, load, served_dtype

logger = logging.getLogger(__name__)


def load_drafter(
    config: EngineConfig,
    target: ModelConfig,
    pooler: PoolerConfig | None,
    backend: Backend,
    groups: ProcessGroups,
    stage: Stage = WHOLE,
) -> LoadedModel | None:
    """Load this rank's part of the drafter of --speculative-config. Returns None without a drafter,
    for a pooling model, and on a pipeline `stage` before the last (the last stage samples and has
    the hidden states). Raises ConfigError if the drafter does not match the target."""
    method = config.speculation.choose()
    if method is None or not method.has_drafter or pooler is not None or not stage.is_last:
        return None
    folder = draft_folder(config, method) if method.model else config.model
    logger.info("Speculation: the method %s drafts with %s", method.method, folder)
    model_config = draft_facts(config, method, folder, target)
    if facts_of(method).is_whole_model:
        # Without a vision tower: drafts are verified, so the drafter need not see images.
        model_config = replace(model_config, vision=None)
        settings = draft_config(config, method, folder, model_config, target)
        return load(settings, model_config, None, backend, _ignore, None, groups)
    start = time.perf_counter()
    # The head uses the target's dtype, like the hidden states that it reads.
    dtype = served_dtype(config, target, None, backend, groups, stage)
    settings = draft_config(config, method, folder, model_config, target)
    head = select_model_drafter(method).make_head(
        method,
        folder,
        model_config,
        target,
        ModelBuild(
            dtype=dtype,
            device=backend.device,
            max_model_len=settings.max_model_len or max_context_length(model_config),
            group=groups.tensor,
        ),
    )
    if config.load_format == DUMMY:
        fill_dummy((head,), on_progress=_ignore_bytes)
    else:
        load_weights(head, folder, on_progress=_ignore_bytes, group=groups.tensor, is_stage=True)
    process_weights(head, None)
    tensors = (*head.parameters(), *head.buffers())
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    prepared = backend.prepare(head)
    assert prepared is head, "no back end replaces a head"
    logger.info("Weights: %s of the head", bytes_text(weight_bytes))
    return LoadedModel(
        config=settings,
        backend=backend,
        model_config=head.config,
        pooler=None,
        model=head,
        dtype=dtype,
        max_model_len=settings.max_model_len or default_context_length(target),
        block_size=config.cache.block_size or backend.default_block_size,
        weight_bytes=weight_bytes,
        load_s=time.perf_counter() - start,
        groups=groups,
    )


def with_drafter(target: LoadedModel, drafter: LoadedModel) -> LoadedModel:
    """Return `target` with its drafter. Call it before the target's caches are created. Raises
    ConfigError if a head reads hidden states that the target cannot keep."""
    head = drafter.model
    if isinstance(head, DraftHead):
        assert isinstance(target.model, CausalLM), "a target generates"
        head.bind_target(target.model)
        if head.kept_layers:
            target.model.keep_hidden_states(head.kept_layers)
            logger.info(
                "Speculation: the head reads hidden states before the layers %s, so the target's "
                "layers run one by one",
                ", ".join(map(str, head.kept_layers)),
            )
    return replace(target, drafter=drafter)


def keep_for_last_stage(target: LoadedModel) -> LoadedModel:
    """Return `target`, the model of a pipeline stage before the last. If a head on the last stage
    reads hidden states of several layers, the stage also sends these. Call it before graphs are
    captured."""
    config = target.config
    method = config.speculation.choose()
    if method is None or not method.has_drafter or not isinstance(target.model, CausalLM):
        return target
    facts = facts_of(method)
    if facts.num_kept_layers:
        folder, own = draft_folder(config, method), target.model_config
        model_config = draft_facts(config, method, folder, own)
        target.model.keep_hidden_states(facts.kept_layers(model_config, own.num_layers))
    return target


def _ignore(progress: WarmupProgress) -> None:
    """No-op: only the load progress of the target is reported."""


def _ignore_bytes(done: int, total: int) -> None:
    """No-op: only the load progress of the target is reported."""
