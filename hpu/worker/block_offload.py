"""BlockOffload: KV blocks that a worker has offloaded to host memory and files."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from config.checkpoint.safetensors_files import weight_files
from config.engine import DUMMY
from config.errors import ConfigError, bytes_text
from config.version import VERSION
from hpu.host import usable_memory
from hpu.layers.attention import PagedAttention
from hpu.offload.block_copies import BlockCopies, layout_of
from hpu.offload.block_files import HEADER_BYTES, BlockFiles, NoFiles, acquire, remove_others
from hpu.offload.host_blocks import MIN_SLOTS, HostBlocks
from hpu.protocol import (
    HASH_BYTES,
    BlocksFetched,
    FetchBlocks,
    OffloadFacts,
    Ranks,
    StepPlan,
)
from hpu.runner.step_runner import Offload
from hpu.worker.load import LoadedModel

logger = logging.getLogger(__name__)

MEASURED_COPIES = 3


class BlockOffload(Offload):
    """Copies KV blocks as step plans request, and reads and writes block files in the
    background."""

    def __init__(
        self,
        loaded: LoadedModel,
        caches: list[Tensor],
        ranks: Ranks,
        make_copies: Callable[[Sequence[Tensor], int, HostBlocks, NoFiles], BlockCopies],
    ) -> None:
        """`caches`: all tensors indexed by block. `make_copies`: creates the copies of `caches`
        with their block size. Raises ConfigError if the memory or the folder cannot be used.
        Collective: all ranks of the model call it together."""
        super().__init__()
        config, backend, agreement = loaded.config.offload, loaded.backend, loaded.agreement
        num_devices = ranks.world_size
        layout = layout_of(caches, loaded.block_size)
        slot_bytes = self._slot_bytes = layout.slot_bytes
        self._num_slots = agreement.least(config.host_bytes(num_devices) // slot_bytes)
        needed, free = self._num_slots * slot_bytes, usable_memory()[0]
        if self._num_slots < MIN_SLOTS:
            raise ConfigError(
                f"--kv-offloading-size and --swap-space give {config.host_bytes(num_devices)} "
                f"bytes for each device, enough for {self._num_slots} KV blocks of {slot_bytes} "
                f"bytes: raise them to {MIN_SLOTS * slot_bytes} bytes for each device or more "
                "(both are in GiB)"
            )
        if needed > free:
            raise ConfigError(
                f"--kv-offloading-size and --swap-space take {bytes_text(needed)} of host memory "
                f"for each device, {bytes_text(free)} are free"
            )
        pool = backend.host_tensor(needed, torch.uint8)
        self._agreement = agreement
        self._memory = HostBlocks(pool.view(self._num_slots, slot_bytes))
        self._corrupt: dict[int, list[int]] = {}
        """Non-empty StepResult.corrupt_loads, by step."""
        self._num_filled = 0
        """Number of leading slots that may contain data: the engine takes unused slots in ascending
        order."""
        self._deletes_files = config.kv_offloading_delete_files
        self._max_files = 0
        """Maximum number of files; 0: blocks are not kept in files."""
        self._files = NoFiles()
        if config.kv_offloading_dir is not None:
            file_bytes = slot_bytes + HEADER_BYTES
            self._max_files = max(config.file_bytes(num_devices) // file_bytes, 1)
            parent = Path(config.kv_offloading_dir)
            folder, lock = _acquire_folder(loaded, layout.widths, ranks, parent)
            self._files = BlockFiles(folder, lock, self._memory, lambda: self.on_fetched())
        self._copies = make_copies(caches, loaded.block_size, self._memory, self._files)
        self._synchronize = backend.synchronize
        logger.info(
            "KV offload: %d blocks in %s of host memory%s",
            self._num_slots,
            bytes_text(needed),
            f", {self._max_files} in {config.kv_offloading_dir}" if self._max_files else "",
        )

    def start(self, pad_block: int) -> OffloadFacts:
        """Compile the copies, measure a load, and agree with the other ranks on the capacities and
        on the blocks in files. Collective."""
        self._copies.warm_up()
        times = []
        for _ in range(MEASURED_COPIES):
            start = time.perf_counter()
            self._copies.load([0], [pad_block])
            self._synchronize()
            times.append(time.perf_counter() - start)
        nanoseconds = self._agreement.largest(int(min(times) * 1e9))
        max_files = self._agreement.least(self._max_files)
        hashes = self._agreed_hashes()
        if hashes:
            logger.info("KV offload: %d blocks found in files", len(hashes))
        return OffloadFacts(
            self._num_slots,
            nanoseconds / 1e9,
            max_files,
            b"".join(hashes),
            self._agreement.total(self._slot_bytes),
        )

    def _agreed_hashes(self) -> list[bytes]:
        """Hashes of the blocks that all ranks have in files. Other files are deleted."""
        if not self._max_files:
            return []
        own = self._files.hashes
        raw = self._agreement.of_first(b"".join(own))
        listed = [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
        known = set(own)
        are_here = self._agreement.all_of([block_hash in known for block_hash in listed])
        found = [
            block_hash for block_hash, is_here in zip(listed, are_here, strict=True) if is_here
        ]
        self._files.drop(known.difference(found))
        return found

    def apply(self, plan: StepPlan) -> None:
        if plan.stored_blocks:
            self._num_filled = max(self._num_filled, max(plan.stored_slots) + 1)
            self._copies.store(plan.step, plan.stored_blocks, plan.stored_slots, plan.stored_hashes)
        if plan.loaded_blocks:
            self._copies.settle(plan.loaded_slots)
            if corrupt := self._memory.corrupt(plan.loaded_slots):
                logger.warning(
                    "%d KV blocks in host memory have a wrong checksum: they are computed again",
                    len(corrupt),
                )
                self._corrupt[plan.step] = corrupt
            self._copies.load(plan.loaded_slots, plan.loaded_blocks)

    def land(self, step: int) -> list[int]:
        self._copies.land(step)
        return self._corrupt.pop(step, [])

    def fetch(self, message: FetchBlocks) -> None:
        self._num_filled = max(self._num_filled, max(message.slots) + 1)
        self._copies.settle(message.slots)
        self._files.fetch(message)

    def take_fetched(self) -> list[BlocksFetched]:
        return self._files.take_fetched()

    def drop_files(self, hashes: list[bytes]) -> None:
        self._files.drop(hashes)

    def close(self) -> None:
        """Stop the copies and clear the used memory, so that no prompts remain in freed pages.
        Files are kept, unless configured to be deleted."""
        self._copies.close()
        self._files.close(deletes=self._deletes_files)
        # Clear only filled slots: the system allocates pages at the first write to a slot.
        self._memory.rows[: self._num_filled].fill(0)
        self._num_filled = 0


def check_offload(loaded: LoadedModel) -> None:
    """Raise ConfigError if offloading is configured and the model's blocks cannot be offloaded."""
    if not loaded.config.offload.is_on:
        return
    name = "--kv-offloading-size" if loaded.config.offload.kv_offloading_size else "--swap-space"
    what = loaded.config.model
    if loaded.is_pooling:
        raise ConfigError(
            f"{name} is set, and {what} is served for pooling, which has 0 KV blocks: leave it out"
        )
    if loaded.has_states:
        raise ConfigError(
            f"{name} is set, and {what} has recurrent layers, whose states are not in KV blocks: "
            "leave it out"
        )


def _acquire_folder(
    loaded: LoadedModel, widths: tuple[int, ...], ranks: Ranks, parent: Path
) -> tuple[Path, int]:
    """Folder for this rank's files, and its lock. The folder name is a digest of everything that
    determines block contents besides the block's hash, and a number: engines of a server do not
    share files, and each uses the first free number. Unused folders with another digest are
    removed."""
    text = json.dumps(_identity(loaded, widths), sort_keys=True, default=str)
    name = f"kv-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    remove_others(parent, name)
    count = loaded.config.data_parallel.data_parallel_size
    folders = [parent / name / f"{number}-rank-{ranks.rank}" for number in range(count)]
    agreement, number, lock = loaded.agreement, 0, -1
    if agreement.is_first:
        number, lock = acquire(folders)
    number = int.from_bytes(agreement.of_first(number.to_bytes(2, "little")), "little")
    if not agreement.is_first:
        _, lock = acquire(folders[number : number + 1])
    return folders[number], lock


def _identity(loaded: LoadedModel, widths: tuple[int, ...]) -> dict[str, object]:
    config, drafter = loaded.config, loaded.drafter
    return {
        "version": VERSION,
        "model": _model(loaded),
        "seed": config.seed if config.load_format == DUMMY else 0,
        "drafter": None if drafter is None else _model(drafter),
        "quantization": [config.quantization, _stamp(config.quant_config)],
        "model_impl": config.model_impl,
        "device": [
            loaded.backend.name,
            loaded.backend.card,
            config.cpu_kernels,
            config.cpu_int8_activations,
        ],
        "dtype": [loaded.dtype, loaded.kv_cache_dtype],
        "format": None if loaded.kv_cache_format is None else loaded.kv_cache_format.name,
        "scales": _scales(loaded),
        "layout": [loaded.block_size, widths],
        "rope": [loaded.max_model_len],
        "ranks": [config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size],
    }


def _model(loaded: LoadedModel) -> list[object]:
    """The facts and the weights of a model or a drafter."""
    facts = asdict(loaded.model_config)
    # The raw fields, because json would write the object with its address.
    facts["fields"] = loaded.model_config.fields.raw
    del facts["path"], facts["generation_defaults"]
    return [facts, _weights(loaded.config.model, loaded.config.load_format)]


def _weights(model: str, load_format: str) -> list[object]:
    """Name, size and modification time of each weight file; the load format for random weights."""
    path = Path(model)
    if load_format == DUMMY:
        return [load_format]
    files = [path] if path.is_file() else weight_files(path)
    return [_stamp(str(file)) for file in files]


def _stamp(path: str | None) -> object:
    if path is None:
        return None
    found = Path(path).stat()
    return [Path(path).name, found.st_size, found.st_mtime_ns]


def _scales(loaded: LoadedModel) -> str:
    """Digest of the KV-cache scales of all layers, which may have been calculated."""
    digest = hashlib.sha256()
    for module in loaded.modules:
        for submodule in module.modules():
            if isinstance(submodule, PagedAttention):
                for scale in submodule.kv_scales:
                    if scale is not None:
                        digest.update(np.asarray(scale.detach().float().cpu()).tobytes())
    return digest.hexdigest()
