"""Finds the checkpoint that drafts tokens for a model, and checks that it fits the model."""

import re
from dataclasses import replace

from config.checkpoint.resolve import resolve
from config.checkpoint.weight_maps.hidden_heads import read_head_sizes
from config.engine import DUMMY, EngineConfig
from config.errors import ConfigError, SettingError
from config.model.architectures import ARCHITECTURES
from config.model.context_length import default_context_length, max_context_length
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.model.split import check_split, states_of
from config.params.lora import LoRAConfig
from config.params.speculation import (
    DRAFT_MODEL,
    MEDUSA,
    MLP_SPECULATOR,
    MTP,
    SpeculationConfig,
    SpeculationMethod,
)
from config.progress import Report, unreported


def draft_folder(
    config: EngineConfig, method: SpeculationMethod, report: Report = unreported
) -> str:
    """Local folder of the draft checkpoint of `method`, downloaded if needed. Raises
    ConfigError."""
    try:
        return resolve(
            method.model,
            revision=method.revision,
            cache_dir=config.cache_dir,
            download_dir=config.download_dir,
            dtype=config.dtype,
            has_weights=config.load_format != DUMMY,
            report=report,
        )
    except ConfigError as error:
        raise ConfigError(f"the model of --speculative-config: {error}") from None


def check_target(method: SpeculationMethod, target: ModelConfig) -> None:
    """Raise ConfigError for a target model that cannot verify drafts."""
    if states_of(target):
        raise SettingError(
            f"--speculative-config names the method {method.method}, and {target.path} has layers "
            "with a state, from which rejected drafts cannot be removed: leave "
            "--speculative-config out"
        )


def check_draft(
    config: EngineConfig, method: SpeculationMethod, folder: str, target: ModelConfig
) -> EngineConfig | None:
    """Check that the draft model or head of `method` in `folder` fits the model `target` of
    `config`. Returns the settings of a draft model, whose checkpoint is still to be checked; None
    for heads. Raises ConfigError."""
    if method.method in (MEDUSA, MLP_SPECULATOR):
        _check_devices(config, method)
        read_head_sizes(method, folder, target)
        return None
    facts = draft_facts(config, method, folder, target)
    if method.method != DRAFT_MODEL:
        return None
    return draft_config(config, method, folder, facts, target)


def draft_facts(
    config: EngineConfig, method: SpeculationMethod, folder: str, target: ModelConfig
) -> ModelConfig:
    """Facts of the draft model or head of `method` in `folder`, or for MTP of the target's extra
    layer. Raises ConfigError if they do not fit the model `target` of `config`."""
    facts = _mtp_facts(target) if method.method == MTP else read_model_config(folder)
    if facts.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {method.model} has {facts.vocab_size} tokens in its vocabulary, and "
            f"{target.path} has {target.vocab_size}: drafts are tokens of the same vocabulary"
        )
    if method.method != DRAFT_MODEL:
        facts = _head_facts(config, method, facts, target)
    if facts.encoder is not None or states_of(facts):
        what = "is an encoder" if facts.encoder is not None else "has layers with a state"
        raise ConfigError(
            f"the draft model {method.model} {what}: drafts come from decoders whose layers all "
            "cache keys and values"
        )
    _check_devices(config, method)
    return facts


def _check_devices(config: EngineConfig, method: SpeculationMethod) -> None:
    num_devices, wanted = config.parallel.tensor_parallel_size, method.draft_tensor_parallel_size
    if wanted not in (None, num_devices):
        raise SettingError(
            f"draft_tensor_parallel_size of --speculative-config is {wanted} and "
            f"--tensor-parallel-size is {num_devices}: the draft model is divided among the same "
            "devices; leave it out"
        )


def draft_config(
    config: EngineConfig,
    method: SpeculationMethod,
    folder: str,
    facts: ModelConfig,
    target: ModelConfig,
) -> EngineConfig:
    """Settings of the drafter with the facts `facts` in `folder`, for the model `target` of
    `config`."""
    longest = config.max_model_len or default_context_length(target)
    return replace(
        config,
        model=folder,
        max_model_len=min(longest, max_context_length(facts), method.max_model_len or longest),
        quantization=None,
        quant_config=None,
        # The drafter is whole on the last pipeline stage.
        parallel=replace(config.parallel, enable_expert_parallel=False, pipeline_parallel_size=1),
        lora=LoRAConfig(),
        speculation=SpeculationConfig(),
    )


def _mtp_facts(target: ModelConfig) -> ModelConfig:
    """The target's facts, extended by the layer after its last layer."""
    if not target.num_mtp_layers:
        raise SettingError(
            f"--speculative-config names the method mtp, and {target.path} has no layer for it "
            "(num_nextn_predict_layers)"
        )
    if target.is_quantized:
        raise SettingError(
            f"--speculative-config names the method mtp, and the weights of {target.path} are "
            "quantized: its layer for drafts is served in 16 or 32 bits only"
        )
    return replace(target, num_layers=target.num_layers + 1, num_mtp_layers=0)


def _head_facts(
    config: EngineConfig, method: SpeculationMethod, facts: ModelConfig, target: ModelConfig
) -> ModelConfig:
    """`facts` of an EAGLE head, with the architecture of its layers."""
    name = re.sub("Eagle3?", "", facts.architecture)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"the head {method.model} is a {facts.architecture}, whose layers are not built in"
        )
    if facts.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the head {method.model} has a hidden_size of {facts.hidden_size}, and {target.path} "
            f"has {target.hidden_size}"
        )
    if method.method != MTP and facts.num_layers != 1:
        raise ConfigError(
            f"the head {method.model} has {facts.num_layers} layers, the method {method.method} "
            "has 1"
        )
    facts = replace(facts, architecture=name, tie_word_embeddings=False)
    if config.parallel.tensor_parallel_size > 1:
        check_split(facts, config.parallel.tensor_parallel_size)
    return facts
