"""AdapterReader: checks the files of adapters before the engine serves them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from config.engine import EngineConfig
from config.errors import ConfigError, Overloaded
from config.lora.adapter import load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.lora.configured import configured_adapters, extra_targets
from config.lora.info import LoRAInfo
from config.model.read_config import read_model_config
from config.params.lora import NamedAdapter

MAX_PENDING = 64
"""Maximum number of adapters that wait to be read."""


class AdapterReader:
    """Reads and checks adapters, on the caller's thread or on a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._pool: ThreadPoolExecutor | None = None
        self._room = threading.BoundedSemaphore(MAX_PENDING)

    def read(self, adapter: NamedAdapter) -> LoRAInfo:
        """Read and check an adapter. Raises ConfigError if it cannot be served."""
        if not self._config.lora.enable_lora:
            raise ConfigError("this server serves no adapters: start it with --enable-lora")
        folder = AdapterFolder(adapter.path, adapter.root, adapter.label)
        loaded = load_adapter(
            folder, self._base, self._config.lora.max_lora_rank, self._extra_targets
        )
        return loaded.info(adapter.name, adapter.base_model_name, adapter.kind)

    def read_configured(self) -> list[LoRAInfo]:
        """The adapters of --lora-modules. Raises ConfigError."""
        adapters = configured_adapters(self._config.lora, self._config.download_dir)
        return [self.read(one) for one in adapters]

    @cached_property
    def _base(self) -> BaseModules:
        return BaseModules(read_model_config(self._config.model))

    @cached_property
    def _extra_targets(self) -> tuple[str, ...]:
        return extra_targets(self._config.lora, self._base, self._config.download_dir)

    def submit(self, adapter: NamedAdapter, on_done: Callable[["Future[LoRAInfo]"], None]) -> None:
        """Read an adapter on the reader's thread and call `on_done` there. Raises Overloaded."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        if not self._room.acquire(blocking=False):
            raise Overloaded(f"{MAX_PENDING} adapters wait to be read, at most {MAX_PENDING} may")

        def done(future: "Future[LoRAInfo]") -> None:
            self._room.release()
            on_done(future)

        self._pool.submit(self.read, adapter).add_done_callback(done)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
