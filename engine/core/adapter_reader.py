"""AdapterReader: checks the files of adapters before the engine serves them."""

from concurrent.futures import Future
from functools import cached_property

from config.engine import EngineConfig
from config.errors import ConfigError
from config.fair_threads import FairThreads, client_of_task
from config.lora.adapter import load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.lora.configured import configured_adapters, extra_targets, naming
from config.lora.info import LoRAInfo
from config.model.read_config import read_model_config
from config.params.lora import NamedAdapter

MAX_PENDING = 64
"""Maximum number of adapters that wait or are read; a client below its fair share may exceed it."""


class AdapterReader:
    """Reads and checks adapters, on the calling thread or on its own thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._threads = FairThreads(1, "adapters", max_calls=MAX_PENDING, nouns="adapters")

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
        """The adapters of --lora-modules and --default-mm-loras. Raises ConfigError."""
        adapters = configured_adapters(self._config.lora, self._config.download_dir)
        infos = []
        for adapter in adapters:
            with naming(adapter):
                infos.append(self.read(adapter))
        return infos

    @cached_property
    def _base(self) -> BaseModules:
        return BaseModules(read_model_config(self._config.model))

    @cached_property
    def _extra_targets(self) -> tuple[str, ...]:
        return extra_targets(self._config.lora, self._base, self._config.download_dir)

    def submit(self, adapter: NamedAdapter, client: str) -> "Future[LoRAInfo]":
        """Read an adapter on the reader's thread, queued fairly among clients. Raises Overloaded.
        Cancel the future to remove the adapter from the queue."""
        with client_of_task(client):
            return self._threads.submit(self.read, adapter)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
