"""OffloadConfig: settings of KV blocks and weights that are offloaded from the device."""

from dataclasses import dataclass

from config.errors import ConfigError
from config.setting import check_settings, setting

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Host memory and files for offloaded KV blocks and weights."""

    swap_space: float = setting(
        0.0,
        "GiB of host memory per device for KV blocks of preempted requests",
        minimum=0,
    )
    kv_offloading_size: float = setting(
        0.0,
        "GiB of host memory per engine for evicted and preempted KV blocks",
        minimum=0,
    )
    kv_offloading_backend: str = setting(
        "native", "Back end that offloads KV blocks", choices=("native",)
    )
    kv_offloading_dir: str | None = setting(
        None,
        "Folder for the blocks of --kv-offloading-size, which a restarted server reuses",
        metavar="DIR",
    )
    kv_offloading_dir_size: float = setting(
        32.0,
        "Maximum GiB per engine in --kv-offloading-dir; least recently used files are deleted",
        minimum=1e-6,
    )
    kv_offloading_delete_files: bool = setting(
        False,
        "Delete the files of --kv-offloading-dir when an engine stops or sleeps",
    )
    cpu_offload_gb: float = setting(
        0.0,
        "GiB of weights per device in host memory; each launch copies them to the device",
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.kv_offloading_dir and not self.kv_offloading_size:
            raise ConfigError(
                f"--kv-offloading-dir is {self.kv_offloading_dir} and --kv-offloading-size is 0: "
                "files need a buffer in host memory, set --kv-offloading-size above 0"
            )
        if self.kv_offloading_delete_files and not self.kv_offloading_dir:
            raise ConfigError(
                "--kv-offloading-delete-files is set and --kv-offloading-dir is not: set "
                "--kv-offloading-dir"
            )

    @property
    def is_on(self) -> bool:
        """Whether KV blocks are offloaded."""
        return self.swap_space > 0 or self.kv_offloading_size > 0

    def host_bytes(self, num_devices: int) -> int:
        """Host memory in bytes for the KV blocks of each of `num_devices` devices."""
        return int((self.swap_space + self.kv_offloading_size / num_devices) * GIB)

    def file_bytes(self, num_devices: int) -> int:
        """File space in bytes for the KV blocks of each of `num_devices` devices."""
        if self.kv_offloading_dir is None:
            return 0
        return int(self.kv_offloading_dir_size / num_devices * GIB)
