"""Finds the draft checkpoint for a model, and checks that the two are compatible."""

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
            f"--speculative-config names the method {method.method}, and {target.path} has "
            "recurrent layers, whose state cannot be rolled back after rejected drafts: leave "
            "--speculative-config out"
        )


def check_draft(
    config: EngineConfig, method: SpeculationMethod, folder: str, target: ModelConfig
) -> EngineConfig | None:
    """Check that the draft model or head of `method` in `folder` fits the model `target` of
    `config`. Returns the EngineConfig of a draft model, whose checkpoint the caller still has to
    check; None for heads. Raises ConfigError."""
    if method.method in (MEDUSA, MLP_SPECULATOR):
        _check_devices(config, method)
        read_head_sizes(method, folder, target)
        return None
    model_config = draft_facts(config, method, folder, target)
    if method.method != DRAFT_MODEL:
        return None
    return draft_config(config, method, folder, model_config, target)


def draft_facts(
    config: EngineConfig, method: SpeculationMethod, folder: str, target: ModelConfig
) -> ModelConfig:
    """ModelConfig of the draft model or head of `method` in `folder`; for MTP, of the target's
    extra layer. Raises ConfigError if it does not fit the model `target` of `config`."""
    model_config = _mtp_facts(target) if method.method == MTP else read_model_config(folder)
    if model_config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {method.model} has {model_config.vocab_size} tokens in its "
            f"vocabulary, and {target.path} has {target.vocab_size}, they must have the same "
            "vocabulary"
        )
    if method.method != DRAFT_MODEL:
        model_config = _head_facts(config, method, model_config, target)
    if model_config.is_encoder or states_of(model_config):
        what = "is an encoder" if model_config.is_encoder else "has recurrent layers"
        raise ConfigError(
            f"the draft model {method.model} {what}, it must be a decoder whose layers all have a "
            "KV cache"
        )
    _check_devices(config, method)
    return model_config


def _check_devices(config: EngineConfig, method: SpeculationMethod) -> None:
    num_devices, wanted = config.parallel.tensor_parallel_size, method.draft_tensor_parallel_size
    if wanted not in (None, num_devices):
        raise SettingError(
            f"draft_tensor_parallel_size of --speculative-config is {wanted} and "
            f"--tensor-parallel-size is {num_devices}, they must be equal: leave "
            "draft_tensor_parallel_size out"
        )


def draft_config(
    config: EngineConfig,
    method: SpeculationMethod,
    folder: str,
    model_config: ModelConfig,
    target: ModelConfig,
) -> EngineConfig:
    """EngineConfig of the drafter with the ModelConfig `model_config` in `folder`, for the model
    `target` of `config`."""
    longest = config.max_model_len or default_context_length(target)
    return replace(
        config,
        model=folder,
        max_model_len=min(
            longest, max_context_length(model_config), method.max_model_len or longest
        ),
        quantization=None,
        quant_config=None,
        # The whole drafter runs on the last pipeline stage.
        parallel=replace(config.parallel, enable_expert_parallel=False, pipeline_parallel_size=1),
        lora=LoRAConfig(),
        speculation=SpeculationConfig(),
    )


def _mtp_facts(target: ModelConfig) -> ModelConfig:
    """The target's ModelConfig, extended by the MTP layer."""
    if not target.num_mtp_layers:
        raise SettingError(
            f"--speculative-config names the method mtp, and {target.path} has no MTP layer "
            "(num_nextn_predict_layers; MTP layers of GGUF files are not loaded): use another "
            "method"
        )
    if target.is_quantized:
        raise SettingError(
            f"--speculative-config names the method mtp, and the weights of {target.path} are "
            "quantized, MTP is supported for unquantized weights only: use another method"
        )
    return replace(target, num_layers=target.num_layers + 1, num_mtp_layers=0)


def _head_facts(
    config: EngineConfig, method: SpeculationMethod, model_config: ModelConfig, target: ModelConfig
) -> ModelConfig:
    """`model_config` of an EAGLE head or an MTP layer, with the architecture name of its decoder
    layers."""
    name = re.sub("Eagle3?", "", model_config.architecture)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"the draft head {method.model} is a {model_config.architecture}, which is not "
            "supported"
        )
    if model_config.hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft head {method.model} has a hidden_size of {model_config.hidden_size}, and "
            f"{target.path} has {target.hidden_size}, they must be equal"
        )
    if method.method != MTP and model_config.num_layers != 1:
        raise ConfigError(
            f"the draft head {method.model} has {model_config.num_layers} layers, the method "
            f"{method.method} requires 1"
        )
    model_config = replace(model_config, architecture=name, tie_word_embeddings=False)
    if config.parallel.tensor_parallel_size > 1:
        check_split(model_config, config.parallel.tensor_parallel_size)
    return model_config
