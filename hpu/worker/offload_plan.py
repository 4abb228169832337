"""Capacity of KV offloading (--kv-offloading-size and related flags), computed before loading."""

from typing import NamedTuple

from config.params.offload import OffloadConfig
from hpu.offload.block_files import HEADER_BYTES
from hpu.offload.host_blocks import MIN_SLOTS, staging_bytes


class OffloadTiers(NamedTuple):
    """Capacity per device. Each device stores its part of every block of the engine."""

    staging_bytes: int
    """Bytes of the staging buffers, which a device with its own memory needs."""
    host_bytes: int
    host_blocks: int
    file_bytes: int
    file_blocks: int
    only_preempted: bool
    """Whether only blocks of preempted requests are offloaded."""

    @property
    def fits(self) -> bool:
        """Whether the host memory is sufficient to start a server."""
        return self.host_blocks >= MIN_SLOTS


def offload_tiers(config: OffloadConfig, block_bytes: int, num_devices: int) -> OffloadTiers | None:
    """Offload capacity; None without offloading. `block_bytes`: size of a block's part on each of
    the `num_devices` devices of an engine."""
    if not config.is_on:
        return None
    host = config.host_bytes(num_devices) // block_bytes
    file_bytes = block_bytes + HEADER_BYTES
    files = config.file_bytes(num_devices) // file_bytes
    if config.kv_offloading_dir is not None:
        files = max(files, 1)
    return OffloadTiers(
        staging_bytes(block_bytes),
        host * block_bytes,
        host,
        files * file_bytes,
        files,
        config.kv_offloading_size == 0,
    )
