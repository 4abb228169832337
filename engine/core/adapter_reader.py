"""AdapterReader: checks the files of adapters before the engine serves them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from config.engine import EngineConfig
from config.errors import ConfigError
from config.lora.adapter import (
    LoRAInfo,
    check_limits,
    lora_info,
    read_adapter,
)
from config.lora.base_modules import BaseModules
from config.lora.configured import configured_adapters, extra_targets
from config.model.read_config import read_model_config
from config.params.lora import NamedAdapter


class AdapterReader:
    """Reads headers and hashes, on the caller's thread or on its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._pool: ThreadPoolExecutor | None = None

    def read(self, adapter: NamedAdapter) -> LoRAInfo:
        """Raises ConfigError for an adapter that cannot be served."""
        if not self._config.lora.enable_lora:
            raise ConfigError("this server serves no adapters: start it with --enable-lora")
        name, path, parent, kind = adapter
        found = read_adapter(Path(path), self._base)
        check_limits(found, self._config.lora.max_lora_rank, self._extra_targets)
        return lora_info(found, name, parent, kind)

    def read_configured(self) -> list[LoRAInfo]:
        """Those of --lora-modules. Raises ConfigError."""
        adapters = configured_adapters(self._config.lora, self._config.download_dir)
        return [self.read(one) for one in adapters]

    @cached_property
    def _base(self) -> BaseModules:
        return BaseModules(read_model_config(self._config.model))

    @cached_property
    def _extra_targets(self) -> tuple[str, ...]:
        return extra_targets(self._config.lora, self._base, self._config.download_dir)

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread for it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._pool.submit(work)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
