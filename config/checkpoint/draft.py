"""Finds the draft checkpoint for a model, and checks that the two are compatible."""

from dataclasses import replace

from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError, SettingError
from config.model.context_length import default_context_length, max_context_length
from config.model.model_config import ModelConfig
from config.model.split import states_of
from config.params.lora import LoRAConfig
from config.params.speculation import SpeculationConfig
from config.progress import Report, unreported
from config.speculation.base import SpeculationMethod
from config.speculation.drafter import facts_of


def draft_folder(
    config: EngineConfig, method: SpeculationMethod, report: Report = unreported
) -> str:
    """Local folder of the draft checkpoint of `method`, downloaded if needed. Raises
    ConfigError."""
    try:
        return resolve(
            replace(
                config,
                model=method.model,
                revision=method.revision,
                quantization=None,
                quant_config=None,
                hf_overrides="",
            ),
            report=report,
        )
    except ConfigError as error:
        raise ConfigError(f"the model of --speculative-config: {error}") from None


def check_target(method: SpeculationMethod, target: ModelConfig) -> None:
    """Raise ConfigError if `target` has recurrent layers, whose state cannot be rolled back."""
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
    `config`. Returns the EngineConfig of a draft model, None for heads. Raises ConfigError."""
    model_config = draft_facts(config, method, folder, target)
    if not facts_of(method).is_whole_model:
        return None
    return draft_config(config, method, folder, model_config, target)


def draft_facts(
    config: EngineConfig, method: SpeculationMethod, folder: str, target: ModelConfig
) -> ModelConfig:
    """ModelConfig of the draft model or head of `method` in `folder`. Raises ConfigError, also if
    it does not fit the model `target` of `config`."""
    _check_devices(config, method)
    num_ranks = config.parallel.tensor_parallel_size
    return facts_of(method).model_config(method, folder, target, num_ranks)


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
