"""DataParallelConfig: several engines with the same model behind one server."""

from dataclasses import dataclass

from config.errors import ConfigError
from config.setting import check_settings, setting

MAX_ENGINES = 256
"""Maximum number of engines: a request key has 8 bits for the engine
(engine/transport/messages.py)."""


@dataclass(frozen=True, slots=True)
class DataParallelConfig:
    """Number of engines that share the requests, and their hosts."""

    data_parallel_size: int = setting(
        1,
        "Data-parallel engines, each with the whole model",
        minimum=1,
        maximum=MAX_ENGINES,
    )
    data_parallel_size_local: int | None = setting(
        None,
        "Engines on this host; auto: all, or 1 with --data-parallel-rank",
        minimum=1,
    )
    data_parallel_address: str | None = setting(
        None,
        "Address of the API servers' host, for remote engines",
    )
    data_parallel_rpc_port: int = setting(
        29550,
        "First port on --data-parallel-address; each API server uses a port per remote engine",
        minimum=1,
        maximum=65535,
    )
    data_parallel_rank: int | None = setting(
        None,
        "Index of this host's first engine; above 0, the host has no API server",
        aliases=("data-parallel-start-rank",),
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        end = self.first_engine + self.num_local
        if end > self.data_parallel_size:
            raise ConfigError(
                f"data_parallel_rank is {self.first_engine} and data_parallel_size_local is "
                f"{self.num_local}: their sum is {end}, it must be at most data_parallel_size, "
                f"{self.data_parallel_size}"
            )
        if self.num_local < self.data_parallel_size and self.data_parallel_address is None:
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size} and {self.num_local} of these "
                "engines are on this host: set data_parallel_address, where the other hosts "
                "connect"
            )

    @property
    def first_engine(self) -> int:
        """Index of this host's first engine."""
        return self.data_parallel_rank or 0

    @property
    def num_local(self) -> int:
        """Number of engines on this host."""
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return self.data_parallel_size if self.data_parallel_rank is None else 1

    @property
    def num_remote(self) -> int:
        """Number of engines on other hosts."""
        return self.data_parallel_size - self.num_local

    @property
    def has_api_servers(self) -> bool:
        """Whether this host runs the API servers."""
        return self.first_engine == 0
