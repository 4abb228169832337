"""Arguments of an engine process, and the endpoints at which it connects to front ends and to the
DPCoordinator."""

from dataclasses import replace
from pathlib import Path

import msgspec

from config.data_parallel import DataParallelConfig
from config.engine import EngineConfig
from config.errors import ConfigError
from config.log import DEFAULT, LogConfig
from engine.transport.channels import endpoint
from hpu.protocol import SINGLE_RANK, Ranks

CONFIG_ERROR_EXIT = 2
"""Exit code after a ConfigError that is neither a CheckpointError nor a ProfileWritten."""
PROFILE_EXIT = 5
"""Exit code after a ProfileWritten."""

MAX_PORT = 65535

ONE_ENGINE = DataParallelConfig()


class EngineOrders(msgspec.Struct, frozen=True):
    """Arguments of an engine process."""

    config: EngineConfig
    directory: str
    num_front_ends: int
    token: str
    """Token with which this engine authenticates to front ends and to the DPCoordinator."""
    engine: int = 0
    """Data-parallel index of this engine."""
    log: LogConfig = DEFAULT
    remote_token: str = ""
    """Token with which engines on other hosts authenticate to this engine's DPCoordinator."""
    ready_fd: int = -1
    """Inherited descriptor for `mark_ready`; -1: the engine is not restarted."""
    is_restart: bool = False
    """Whether this engine replaces an engine that was ready with the same settings."""

    @property
    def own_directory(self) -> str:
        """Directory for the sockets of this engine's workers. Socket names are equal in all
        engines, so each engine has its own directory."""
        return str(Path(self.directory, f"e{self.engine}")) if self.engine else self.directory

    @property
    def own_config(self) -> EngineConfig:
        """`config` with a profiler trace path that is unique to this engine."""
        configured = self.config.execution.profiler
        if not self.engine or configured in (None, "auto"):
            return self.config
        path = Path(configured)
        trace = str(path.with_suffix(f".engine{self.engine}{path.suffix}"))
        return replace(self.config, execution=replace(self.config.execution, profiler=trace))

    def endpoint(self, index: int) -> str:
        """Endpoint at which front end `index` listens for this engine."""
        return front_end_endpoint(self.directory, index, self.engine, self.config.data_parallel)

    def hub_endpoint(self, engine: int) -> str:
        """Endpoint at which the DPCoordinator listens for `engine`. Raises ConfigError if the port
        exceeds 65535."""
        parallel = self.config.data_parallel
        if parallel.has_api_servers and engine < parallel.num_local:
            return endpoint(self.directory, f"st{engine}.sock")
        # The hub uses the ports after the last front end's ports.
        return _remote_endpoint(self.num_front_ends, engine, parallel)

    @property
    def ranks(self) -> Ranks:
        """Ranks of this engine in the group of engines that share experts; SINGLE_RANK if the
        engines share no experts. Raises ConfigError if the port exceeds 65535."""
        num_engines, parallel = self.config.num_coupled_engines, self.config.data_parallel
        if num_engines == 1:
            return SINGLE_RANK
        meeting = f"file://{self.directory}/all_ranks"
        if parallel.num_remote:
            # The hub's port for engine 0 is free: engine 0 runs on the hub's host and uses a Unix
            # socket.
            meeting = _remote_endpoint(self.num_front_ends, 0, parallel)
        return Ranks(
            self.config.parallel.world_size,
            0,
            meeting,
            engine=self.engine,
            num_engines=num_engines,
        )


def front_end_endpoint(
    directory: str,
    index: int,
    engine: int = 0,
    data_parallel: DataParallelConfig = ONE_ENGINE,
) -> str:
    """Endpoint at which front end `index` listens for engine `engine`: a socket in `directory`, or
    a TCP port for engines on other hosts. Raises ConfigError if the port exceeds 65535."""
    if data_parallel.has_api_servers and engine < data_parallel.num_local:
        return endpoint(directory, f"fe{index}-{engine}.sock" if engine else f"fe{index}.sock")
    return _remote_endpoint(index, engine, data_parallel)


def _remote_endpoint(index: int, engine: int, data_parallel: DataParallelConfig) -> str:
    """Endpoint for engine `engine` at port group `index` of the host with the API servers."""
    first, size = data_parallel.data_parallel_rpc_port, data_parallel.data_parallel_size
    port = first + index * size + engine
    if port > MAX_PORT:
        raise ConfigError(
            f"engine {engine} needs port {port}, the last port is {MAX_PORT}: lower "
            "--data-parallel-rpc-port"
        )
    return f"tcp://{data_parallel.data_parallel_address}:{port}"
