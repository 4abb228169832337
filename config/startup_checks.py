"""Checks of installed packages for the device, and of the settings against the checkpoint and its
drafter. Imports no torch and opens no device."""

import importlib
from dataclasses import replace
from pathlib import Path

from config.checkpoint.draft import check_draft, check_target, draft_folder
from config.checkpoint.operations import check_operations
from config.checkpoint.shapes import check_weights
from config.checkpoint.tied_head import check_tied_head
from config.devices.base import DEVICES, Installed
from config.engine import DUMMY, OF_CHECKPOINTS, EngineConfig
from config.errors import ConfigError, SettingError
from config.loading.env import is_installed
from config.model.architectures import ARCHITECTURES, decoder_spec, is_native
from config.model.context_length import (
    default_context_length,
    describe_context_length,
    max_context_length,
)
from config.model.family_fields import causal_name
from config.model.kv_cache_dtype import AUTO, FP8_INC
from config.model.model_config import (
    BLOCKS,
    MAX_POSITION,
    ModelConfig,
    check_limits,
)
from config.model.pooler import PoolerConfig, choose_pooler
from config.model.quantization.inc import INC, MODULE, PACKAGE, read_quant_config
from config.model.quantization.registry import (
    KERNELS,
    SCHEMES_AT_LOAD,
    config_at_load,
    read_quantization,
)
from config.model.read_config import read_model_config
from config.model.split import check_split, check_stages, indexer_of
from config.version import install_command, installed_version

EMULATOR_MAX_MODEL_LEN = 512
"""Maximum default of max_model_len on the emulated card: its warm-up runs every bucket of every
length on the host, which takes hours for 8192 tokens."""


def check_device(device: str) -> None:
    """Raise ConfigError if the installed software does not support `device`. Does not look for the
    hardware."""
    if not is_installed("torch"):
        if device == "auto" or DEVICES[device].uses_cores:
            raise ConfigError(f"torch is not installed here; on a CPU: {install_command('cpu')}")
        raise ConfigError("torch is not installed here: install the device's torch")
    if device == "auto":
        return
    if problem := DEVICES[device].problem(Installed(is_installed, installed_version("torch"))):
        raise ConfigError(problem)


def check_checkpoint(config: EngineConfig, folder: str) -> None:
    """Check the settings in `config` against the model in `folder`, its weights and its drafter.
    Raises ConfigError."""
    model_config, pooler = check_model_config(config, folder)
    if config.load_format == DUMMY:
        check_limits(model_config)
    else:
        check_weights(model_config, pooler)
        if pooler is None:
            check_tied_head(model_config)
    # After the check of the weights, which limits the number of layers.
    _check_block_size(config, model_config)
    method = config.speculation.choose()
    if method is None:
        return
    if pooler is None:
        check_target(method, model_config)
    if method.has_drafter:
        draft = draft_folder(config, method) if method.model else folder
        own = check_draft(config, method, draft, model_config)
        if own is not None:
            check_checkpoint(own, draft)


def check_model_config(
    config: EngineConfig, folder: str
) -> tuple[ModelConfig, PoolerConfig | None]:
    """ModelConfig of the model, and PoolerConfig if it is served for pooling. Raises ConfigError
    like check_checkpoint, but checks neither the block size nor drafts nor weights, which may not
    be downloaded yet."""
    model_config = read_model_config(folder)
    pooler = choose_pooler(config, model_config)
    is_pooling = pooler is not None
    is_built_in = is_pooling or is_native(model_config, config.model_impl)
    is_known = is_built_in or _is_in_transformers(model_config)
    if not is_known and model_config.fields.raw.get("auto_map"):
        raise ConfigError(
            f"{folder} is a {model_config.architecture}, which has neither a native "
            "implementation nor one in transformers: its code is in the checkpoint (auto_map in "
            "config.json), and code in a checkpoint is never run"
        )
    if not model_config.is_encoder and (is_built_in or not is_known):
        # Check the architecture without layers: num_layers may claim 10^9.
        decoder_spec(
            replace(model_config, num_layers=0, layer_types=(), rope_layers=()),
            has_head=not is_pooling,
        )
    if is_built_in:
        check_operations(model_config)
        _check_ranks(config, model_config, is_pooling=is_pooling)
    choose_context(config, model_config, pooler)
    chosen_quantization(config.quantization, model_config, config.device)
    if config.device != "auto":
        check_format_at_load(config.quantization, model_config, config.device)
    if config.quantization == INC:
        _check_compressor(config, model_config, is_built_in=is_built_in and not is_pooling)
    _check_quantized(model_config, is_built_in=is_built_in)
    if quantizes_at_load(config.quantization, model_config) and is_pooling:
        raise ConfigError(
            f"--quantization is {config.quantization}, and {folder} is served for pooling, for "
            "which quantization is not supported: leave quantization out"
        )
    if config.quantization == "gguf" and not (Path(folder) / BLOCKS).is_file():
        raise ConfigError(
            f"--quantization is gguf, and {folder} was not made from a GGUF file: set --model to a "
            "GGUF file"
        )
    return model_config, pooler


def _check_quantized(model_config: ModelConfig, *, is_built_in: bool) -> None:
    if model_config.quantization is None:
        return
    weights = (
        f"{model_config.fields.file} has quantized weights ({model_config.quantization.method})"
    )
    if not is_built_in:
        raise ConfigError(
            f"{weights}, which require a native implementation, and {model_config.architecture} "
            "runs on the transformers implementation: use a checkpoint with unquantized weights"
        )
    if model_config.is_encoder:
        raise ConfigError(
            f"{weights}, which are not supported for encoders: use a checkpoint with unquantized "
            "weights"
        )


def unserved_weights(model_config: ModelConfig, model_impl: str) -> str:
    """Why a server refuses the checkpoint's quantized weights; empty if it does not.
    `model_config` may have been read with `allow_quantized`."""
    family = ARCHITECTURES.get(causal_name(model_config.architecture))
    is_built_in = model_config.is_encoder or is_native(model_config, model_impl)
    try:
        if model_config.quantization is None:
            known = family.quantizations if family else ()
            read_quantization(model_config.fields, known)
        _check_quantized(model_config, is_built_in=is_built_in)
    except ConfigError as error:
        return str(error)
    return ""


def chosen_quantization(
    requested: str | None, model_config: ModelConfig, device: str = "auto"
) -> str | None:
    """The method that has quantized the checkpoint, otherwise `requested`, the value of
    --quantization; None if `requested` only names the method of weights that the model's family
    reads itself. Raises ConfigError if `requested` contradicts the checkpoint; the error suggests
    only formats that `device` supports."""
    own = None if model_config.quantization is None else model_config.quantization.method
    declared = own or model_config.other_quantization
    if requested in (None, declared) or declared in KERNELS.get(str(requested), ()):
        return own
    file = model_config.fields.file
    is_format = requested in OF_CHECKPOINTS or requested in KERNELS
    if declared and (own or is_format):
        raise SettingError(
            f"--quantization is {requested}, and {file} has weights quantized by {declared}: leave "
            "--quantization out"
        )
    if is_format and requested not in SCHEMES_AT_LOAD:
        raise SettingError(
            f"--quantization is {requested}, and {file} has no quantization_config: the weights "
            "are not quantized; leave --quantization out, or quantize them while loading "
            f"(--quantization {' or '.join(_schemes_at_load(device))})"
        )
    return requested


def _schemes_at_load(device: str) -> list[str]:
    """Formats to which `device` can quantize weights while loading; all formats for auto."""
    return [
        name
        for name, scheme in SCHEMES_AT_LOAD.items()
        if device in ("auto", "cpu") or not scheme.is_flat
    ]


def quantizes_at_load(requested: str | None, model_config: ModelConfig) -> bool:
    """Whether this server quantizes the weights while loading, or keeps the blocks of a GGUF file;
    a compressor quantizes them afterwards."""
    return not model_config.quantization and requested not in (None, INC)


def check_format_at_load(requested: str | None, model_config: ModelConfig, device: str) -> None:
    """Raise SettingError if --quantization quantizes weights while loading to a format for which
    `device` has no quantized matmul."""
    if not quantizes_at_load(requested, model_config) or requested not in SCHEMES_AT_LOAD:
        return
    if SCHEMES_AT_LOAD[requested].is_flat and device != "cpu":
        raise SettingError(
            f"--quantization is {requested} and the device is {device}: the weights of "
            f"{model_config.fields.file} are quantized to {requested} on cpu only; use "
            f"{' or '.join(_schemes_at_load(device))}"
        )


def facts_at_load(requested: str | None, model_config: ModelConfig) -> ModelConfig:
    """`model_config` with the quantization that SCHEMES_AT_LOAD gives the weights while loading, if
    any; for estimates of sizes."""
    if not quantizes_at_load(requested, model_config) or requested not in SCHEMES_AT_LOAD:
        return model_config
    return replace(model_config, quantization=config_at_load(requested))


def _check_compressor(
    config: EngineConfig, model_config: ModelConfig, *, is_built_in: bool
) -> None:
    if not is_built_in:
        raise ConfigError(
            f"--quantization is {INC}, and {model_config.path} is served for pooling or runs on "
            "the transformers implementation, for which the compressor is not supported: leave "
            "--quantization out"
        )
    if config.cache.kv_cache_dtype not in (AUTO, FP8_INC):
        raise SettingError(
            f"--quantization is {INC} and --kv-cache-dtype is {config.cache.kv_cache_dtype}, the "
            f"compressor supports {FP8_INC} only"
        )
    if config.cache.calculate_kv_scales:
        raise SettingError(
            f"--quantization is {INC} and --calculate-kv-scales is set: leave "
            "--calculate-kv-scales out, the compressor has its own scales"
        )
    quant_config = read_quant_config(config.quant_config)
    if quant_config.measures and (config.warmup.mode != "skip" or not config.enforce_eager):
        raise SettingError(
            f"mode in {quant_config.path} is MEASURE: warm-up and captured graphs would be "
            "measured, too; add --skip-warmup and --enforce-eager, or use `gaudiserve calibrate`"
        )
    quant_config.check_files(config.parallel.tensor_parallel_size)
    if not is_installed(MODULE):
        raise ConfigError(
            f"--quantization is {INC}, and Intel Neural Compressor is not installed here: "
            f"pip install {PACKAGE}"
        )


def _check_block_size(config: EngineConfig, model_config: ModelConfig) -> None:
    size = config.cache.block_size
    if not size or not is_native(model_config, config.model_impl):
        return
    indexer = indexer_of(model_config)
    if indexer and size != indexer.block_size:
        raise SettingError(
            f"--block-size is {size}, and the indexer of {model_config.path} selects blocks of "
            f"{indexer.block_size} keys: leave --block-size out"
        )


def _check_ranks(config: EngineConfig, model_config: ModelConfig, *, is_pooling: bool) -> None:
    parallel, num_engines = config.parallel, config.num_coupled_engines
    if num_engines > 1 and is_pooling:
        raise SettingError(
            f"{model_config.path} is served for pooling, and --enable-expert-parallel with "
            f"--data-parallel-size {num_engines} distributes experts over engines that generate: "
            "leave --enable-expert-parallel out"
        )
    if parallel.tensor_parallel_size > 1 or num_engines > 1:
        check_split(
            replace(model_config, architecture=causal_name(model_config.architecture))
            if is_pooling
            else model_config,
            parallel.tensor_parallel_size,
            distributes_experts=parallel.enable_expert_parallel and not is_pooling,
            num_engines=num_engines,
        )
    if not is_pooling:
        check_stages(model_config, parallel.pipeline_parallel_size)


def _is_in_transformers(model_config: ModelConfig) -> bool:
    # Imported here because the import takes half a second, and few models need it. It does not
    # import torch.
    return model_config.architecture in dir(importlib.import_module("transformers"))


def choose_context(
    config: EngineConfig, model_config: ModelConfig, pooler: PoolerConfig | None
) -> int:
    """The maximum number of tokens of a sequence: max_model_len, or the default of
    choose_max_model_len. A pooling model computes a text in one step, so its limit is at most
    max_num_batched_tokens, if set; its default is also at most the limit of sentence-transformers.
    Raises SettingError."""
    is_emulated = config.device == "hpu-emulator"
    longest = choose_max_model_len(
        config.max_model_len,
        model_config,
        is_emulated=is_emulated,
        allows_longer=config.allow_long_max_model_len,
    )
    if pooler is None:
        config.scheduler.check_whole_prompts(longest)
        return longest
    budget = config.scheduler.max_num_batched_tokens
    if config.max_model_len is None:
        longest = min(longest, pooler.max_tokens or longest)
        return longest if budget is None else min(longest, budget)
    if budget is not None and longest > budget:
        raise SettingError(
            f"--max-model-len is {longest} and --max-num-batched-tokens is {budget}: a pooling "
            f"model computes each input in one step, so set --max-num-batched-tokens to {longest} "
            "or more"
        )
    return longest


def choose_max_model_len(
    requested: int | None,
    model_config: ModelConfig,
    *,
    is_emulated: bool = False,
    allows_longer: bool = False,
) -> int:
    """The requested length, or the checkpoint's default, which is at most EMULATOR_MAX_MODEL_LEN on
    the emulated card. Raises SettingError for a length above the checkpoint's maximum, unless
    `allows_longer` is set and the model is a decoder; even then, at most MAX_POSITION."""
    longest = max_context_length(model_config)
    if requested is None:
        default = default_context_length(model_config)
        return min(default, EMULATOR_MAX_MODEL_LEN) if is_emulated else default
    if requested <= longest:
        return requested
    if model_config.is_encoder:
        raise SettingError(
            f"--max-model-len is {requested}, the checkpoint has position embeddings for "
            f"{longest} positions only: set --max-model-len to {longest} or less"
        )
    if not allows_longer:
        raise SettingError(
            f"--max-model-len is {requested}, the checkpoint was made for "
            f"{describe_context_length(model_config)}: set --max-model-len to {longest} or less, "
            "or allow it with --allow-long-max-model-len"
        )
    if requested > MAX_POSITION:
        raise SettingError(f"--max-model-len is {requested}, it must be at most {MAX_POSITION}")
    return requested
