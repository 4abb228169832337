"""Checks before any process starts: the device against installed packages, the context length
against the checkpoint. Imports no torch and opens no device."""

import importlib
import importlib.metadata
from dataclasses import replace
from pathlib import Path

from config.checkpoint.draft import check_draft, check_target, draft_folder
from config.checkpoint.operations import check_operations
from config.checkpoint.shapes import check_weights
from config.checkpoint.tied_head import check_tied_head
from config.devices.base import DEVICES, Installed
from config.engine import AT_LOAD, DUMMY, EngineConfig
from config.errors import ConfigError, SettingError
from config.loading.env import is_installed
from config.model.architectures import decoder_spec, is_native
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
from config.model.quantization.base import QUANTIZATION_FORMATS
from config.model.quantization.inc import INC, MODULE, PACKAGE, read_quant_config
from config.model.read_config import read_model_config
from config.model.split import check_split, check_stages, indexer_of
from config.version import install_command

EMULATOR_MAX_MODEL_LEN = 512
"""Default limit of max_model_len on the emulated card: its warm-up computes every bucket of every
length on the host, which takes hours for 8192 tokens."""


def check_device(device: str) -> None:
    """Raise ConfigError for a device that is not available on this machine."""
    if not is_installed("torch"):
        raise ConfigError(f"torch is not installed here; on a CPU: {install_command('cpu')}")
    if device == "auto":
        return
    if problem := DEVICES[device].problem(Installed(is_installed, _torch_version())):
        raise ConfigError(problem)


def check_checkpoint(config: EngineConfig, folder: str) -> None:
    """Raise ConfigError for a model that cannot be served with `config`."""
    facts, pooler = check_model_config(config, folder)
    if config.load_format == DUMMY:
        check_limits(facts)
    else:
        check_weights(facts, pooler)
        if pooler is None:
            check_tied_head(facts)
    # After the weights, which bound the number of layers.
    _check_block_size(config, facts)
    method = config.speculation.choose()
    if method is None:
        return
    if pooler is None:
        check_target(method, facts)
    if method.has_drafter:
        draft = draft_folder(config, method) if method.model else folder
        own = check_draft(config, method, draft, facts)
        if own is not None:
            check_checkpoint(own, draft)


def check_model_config(
    config: EngineConfig, folder: str
) -> tuple[ModelConfig, PoolerConfig | None]:
    """Like check_checkpoint, but without the weights, which may not be downloaded yet."""
    facts = read_model_config(folder)
    pooler = choose_pooler(config, facts)
    is_built_in = pooler is not None or is_native(facts, config.model_impl)
    is_known = is_built_in or _is_in_transformers(facts)
    if not is_known and facts.fields.raw.get("auto_map"):
        raise ConfigError(
            f"{folder} is a {facts.architecture}, which is neither built in nor in transformers: "
            "its code is in the checkpoint (auto_map in config.json), and such code is never run"
        )
    if facts.encoder is None and (is_built_in or not is_known):
        # Check only the architecture's name: num_layers may be 10^9, which the weights will
        # disprove.
        decoder_spec(
            replace(facts, num_layers=0, layer_types=(), rope_layers=()), has_head=pooler is None
        )
    if is_built_in:
        check_operations(facts)
        _check_ranks(config, facts, is_pooling=pooler is not None)
    choose_context(config, facts, pooler)
    chosen_quantization(config.quantization, facts)
    if config.quantization == INC:
        _check_compressor(config, facts, is_built_in=is_built_in and pooler is None)
    if facts.quantization is not None and not is_built_in:
        raise ConfigError(
            f"{facts.fields.file} has quantized weights ({facts.quantization.method}), which are "
            f"served of built-in models only, and the code of this {facts.architecture} is that of "
            "transformers"
        )
    if facts.quantization is not None and facts.encoder is not None:
        raise ConfigError(
            f"{facts.fields.file} has quantized weights ({facts.quantization.method}), which are "
            f"not served of encoders"
        )
    if config.quantization in AT_LOAD and pooler is not None:
        raise ConfigError(
            f"quantization is {config.quantization}, and {folder} is served for pooling, where "
            "weights are not quantized"
        )
    if config.quantization == "gguf" and not (Path(folder) / BLOCKS).is_file():
        raise ConfigError(
            f"quantization is gguf, and {folder} was made from no GGUF file: give one as the model"
        )
    return facts, pooler


def chosen_quantization(requested: str | None, facts: ModelConfig) -> str | None:
    """The value of --quantization; without the flag, the checkpoint's method. Raises ConfigError if
    the flag contradicts the checkpoint."""
    own = None if facts.quantization is None else facts.quantization.method
    if requested is None or requested == own:
        return own
    file = facts.fields.file
    if own is not None:
        raise SettingError(
            f"quantization is {requested}, and {file} says that the weights are quantized by "
            f"{own}: leave --quantization out"
        )
    if requested in QUANTIZATION_FORMATS.all:
        raise SettingError(
            f"quantization is {requested}, and {file} has no quantization_config: the weights are "
            "not quantized; leave --quantization out"
        )
    return requested


def _check_compressor(config: EngineConfig, facts: ModelConfig, *, is_built_in: bool) -> None:
    if not is_built_in:
        raise ConfigError(
            f"quantization is {INC}, and {facts.path} is not a decoder that is built in: the "
            "compressor quantizes no others"
        )
    if config.cache.kv_cache_dtype not in (AUTO, FP8_INC):
        raise SettingError(
            f"quantization is {INC} and --kv-cache-dtype is {config.cache.kv_cache_dtype}: the "
            f"compressor caches in {FP8_INC}"
        )
    if config.cache.calculate_kv_scales:
        raise SettingError(
            f"quantization is {INC} and --calculate-kv-scales is set: the compressor has scales of "
            "its own"
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
            f"quantization is {INC}, and Intel Neural Compressor is not installed here: "
            f"pip install {PACKAGE}"
        )


def _check_block_size(config: EngineConfig, facts: ModelConfig) -> None:
    """Raise ConfigError if the block size differs from the block size of the model's indexer."""
    size = config.cache.block_size
    if not size or not is_native(facts, config.model_impl):
        return
    indexer = indexer_of(facts)
    if indexer and size != indexer.block_size:
        raise SettingError(
            f"--block-size is {size}, and the indexer of {facts.path} chooses blocks of "
            f"{indexer.block_size} keys: leave --block-size out"
        )


def _check_ranks(config: EngineConfig, facts: ModelConfig, *, is_pooling: bool) -> None:
    """Raise ConfigError if the ranks cannot divide the model. The worker checks models that are not
    built in, whose layers are not known here."""
    parallel, num_engines = config.parallel, config.num_coupled_engines
    if num_engines > 1 and is_pooling:
        raise SettingError(
            f"{facts.path} is served for pooling, and --enable-expert-parallel with "
            f"--data-parallel-size {num_engines} distributes experts over engines that generate: "
            "leave --enable-expert-parallel out"
        )
    if parallel.tensor_parallel_size > 1 or num_engines > 1:
        check_split(
            replace(facts, architecture=causal_name(facts.architecture)) if is_pooling else facts,
            parallel.tensor_parallel_size,
            distributes_experts=parallel.enable_expert_parallel and not is_pooling,
            num_engines=num_engines,
        )
    if not is_pooling:
        check_stages(facts, parallel.pipeline_parallel_size)


def _is_in_transformers(facts: ModelConfig) -> bool:
    """Whether the installed transformers has a class for the architecture. The worker checks the
    rest."""
    # Imported here because it takes half a second and few models need it. It imports no torch.
    return facts.architecture in dir(importlib.import_module("transformers"))


def choose_context(config: EngineConfig, facts: ModelConfig, pooler: PoolerConfig | None) -> int:
    """The maximum number of tokens of a sequence: max_model_len, or else the checkpoint's limit. A
    pooling model computes a text in one step, so the limit is at most max_num_batched_tokens, if
    it is set; by default the limit is at most that of sentence-transformers. Raises ConfigError."""
    is_emulated = config.device == "hpu-emulator"
    longest = choose_max_model_len(
        config.max_model_len,
        facts,
        is_emulated=is_emulated,
        allows_longer=config.allow_long_max_model_len,
    )
    if pooler is None:
        return longest
    budget = config.scheduler.max_num_batched_tokens
    if config.max_model_len is None:
        longest = min(longest, pooler.max_tokens or longest)
        return longest if budget is None else min(longest, budget)
    if budget is not None and longest > budget:
        raise SettingError(
            f"--max-model-len is {longest} and --max-num-batched-tokens is {budget}: a pooling "
            f"model reads a text in one step, so set --max-num-batched-tokens to {longest} or more"
        )
    return longest


def choose_max_model_len(
    requested: int | None,
    facts: ModelConfig,
    *,
    is_emulated: bool = False,
    allows_longer: bool = False,
) -> int:
    """The requested length, or else the checkpoint's default, on the emulated card at most
    EMULATOR_MAX_MODEL_LEN. Raises ConfigError for a length above the checkpoint's maximum, unless
    `allows_longer` and positions are computed."""
    longest = max_context_length(facts)
    if requested is None:
        default = default_context_length(facts)
        return min(default, EMULATOR_MAX_MODEL_LEN) if is_emulated else default
    if requested <= longest:
        return requested
    if facts.encoder is not None:
        raise SettingError(
            f"--max-model-len is {requested}, the checkpoint has vectors for {longest} positions "
            f"and none for later ones: set --max-model-len to {longest} or less"
        )
    if not allows_longer:
        raise SettingError(
            f"--max-model-len is {requested}, the checkpoint was made for "
            f"{describe_context_length(facts)}: set --max-model-len to {longest} or less, or allow "
            "it with --allow-long-max-model-len"
        )
    if requested > MAX_POSITION:
        raise SettingError(f"--max-model-len is {requested}, it must be at most {MAX_POSITION}")
    return requested


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
