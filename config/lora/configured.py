"""Adapters of --lora-modules and --default-mm-loras: their folders, and the optional targets that
the server must reserve."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config.checkpoint.hub import download_files
from config.checkpoint.model_name import is_hub_id
from config.errors import ConfigError, SettingError
from config.lora.adapter import FILES, check_adapter, read_adapter
from config.lora.adapter_folder import CONFIG_FILE, AdapterFolder
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config
from config.params.lora import AUTO, EXTRA_TARGETS, LoRAConfig, NamedAdapter
from config.whole_files import is_present

IMAGE_ADAPTER = "vision-lora"
"""Folder in the checkpoint with the image adapter, for example in Phi-4-multimodal."""


def unused_image_adapter(config: LoRAConfig, checkpoint: str) -> Path | None:
    """Folder of the checkpoint's image adapter; None if there is no such adapter, or if
    --default-mm-loras is set."""
    folder = Path(checkpoint, IMAGE_ADAPTER)
    if config.default_mm_loras or not is_present(folder / CONFIG_FILE):
        return None
    return folder


def check_adapter_paths(config: LoRAConfig) -> None:
    """Raise SettingError for an adapter whose path neither exists on this machine nor is a hub
    id."""
    for adapter in config.adapters:
        if not Path(adapter.path).exists() and not is_hub_id(adapter.path):
            raise SettingError(
                f"{_flag(adapter)} {adapter.name}={adapter.path}: no such file or folder; "
                f"an adapter is a folder with {CONFIG_FILE}, a GGUF file or a hub id"
            )


def check_adapters(config: LoRAConfig, checkpoint: str, download_dir: str | None = None) -> None:
    """Check that the configured adapters fit the checkpoint and the limits. Raises ConfigError.
    `download_dir`: as in configured_adapters."""
    adapters = configured_adapters(config, download_dir)
    if not adapters:
        return
    base = BaseModules(read_model_config(checkpoint))
    targets = extra_targets(config, base, download_dir)
    for adapter in adapters:
        with naming(adapter):
            folder = AdapterFolder(adapter.path, label=adapter.label)
            check_adapter(folder, base, config.max_lora_rank, targets)


@contextmanager
def naming(adapter: NamedAdapter) -> Iterator[None]:
    """Turn a ConfigError into a SettingError with the flag, the name and the path of an adapter in
    front."""
    try:
        yield
    except ConfigError as error:
        path = adapter.label or adapter.path
        raise SettingError(f"{_flag(adapter)} {adapter.name}={path}: {error}") from error


def configured_adapters(
    config: LoRAConfig, download_dir: str | None = None
) -> tuple[NamedAdapter, ...]:
    """The adapters of the two flags, with local folders. Hub adapters are downloaded to
    `download_dir` (None: the hub's own cache). Raises ConfigError."""
    return tuple(
        adapter._replace(path=str(_folder(adapter, download_dir)), label=adapter.path)
        for adapter in config.adapters
    )


def _folder(adapter: NamedAdapter, download_dir: str | None) -> Path:
    folder = Path(adapter.path)
    if folder.exists() or not is_hub_id(adapter.path):
        return folder
    with naming(adapter):
        return download_files(adapter.path, None, download_dir, FILES)


def _flag(adapter: NamedAdapter) -> str:
    return "--default-mm-loras" if adapter.kind else "--lora-modules"


def extra_targets(
    config: LoRAConfig, base: BaseModules, download_dir: str | None = None
) -> tuple[str, ...]:
    """The EXTRA_TARGETS that configured adapters may have weights for. `download_dir`: as in
    configured_adapters. Raises ConfigError."""
    asked = config.lora_extra_targets
    if AUTO not in asked:
        return tuple(kind for kind in EXTRA_TARGETS if kind in asked)
    found: set[str] = set()
    for adapter in configured_adapters(config, download_dir):
        with naming(adapter):
            folder = AdapterFolder(adapter.path, label=adapter.label)
            read = read_adapter(folder, base, config.max_lora_rank)
        found.update(read.extra_targets)
    return tuple(kind for kind in EXTRA_TARGETS if kind in found or kind in asked)
