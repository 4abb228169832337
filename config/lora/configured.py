"""The adapters of --lora-modules: where they are, and what a server must reserve for them."""

from pathlib import Path

from config.checkpoint.hub import download_files, is_hub_id
from config.errors import ConfigError
from config.lora.adapter import FILES, read_adapter
from config.lora.base_modules import BaseModules
from config.params.lora import AUTO, EXTRA_TARGETS, LoRAConfig, NamedAdapter


def configured_adapters(
    config: LoRAConfig, download_dir: str | None = None
) -> tuple[NamedAdapter, ...]:
    """The adapters of --lora-modules with their folders; those of the hub are downloaded to
    `download_dir` (None: the hub's own cache). Raises ConfigError."""
    return tuple(one._replace(path=str(_folder(one.path, download_dir))) for one in config.adapters)


def _folder(path: str, download_dir: str | None) -> Path:
    folder = Path(path)
    if folder.exists() or not is_hub_id(path):
        return folder
    try:
        return download_files(path, None, download_dir, FILES)
    except ConfigError as error:
        raise ConfigError(f"an adapter of --lora-modules: {error}") from error


def extra_targets(
    config: LoRAConfig, base: BaseModules, download_dir: str | None = None
) -> tuple[str, ...]:
    """The EXTRA_TARGETS that adapters may have weights for. `download_dir`: as in
    configured_adapters. Raises ConfigError."""
    asked = config.lora_extra_targets
    if AUTO not in asked:
        return tuple(kind for kind in EXTRA_TARGETS if kind in asked)
    adapters = [
        read_adapter(Path(one.path), base) for one in configured_adapters(config, download_dir)
    ]
    found = {kind for adapter in adapters for kind in adapter.extra_targets}
    return tuple(kind for kind in EXTRA_TARGETS if kind in found or kind in asked)
