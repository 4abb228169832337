"""Selects the Backend for a device name. Imports only the selected backend."""

from config.engine import EngineConfig
from config.loading import env
from config.progress import OnStep, unreported_step
from hpu.backends.base import Backend
from hpu.distributed.process_groups import SINGLE_RANK, Ranks


def select_backend(
    config: EngineConfig, ranks: Ranks = SINGLE_RANK, on_step: OnStep = unreported_step
) -> Backend:
    """The named backend; for `auto`, a Gaudi if its runtime is installed, else the CPU. An NVIDIA
    GPU, which is for development, must be named. The returned backend has joined the other `ranks`
    of the model. `on_step` is called during its preparation.

    Raises ConfigError if the machine has no such device or the device cannot be used.
    """
    device = env.chosen_device(config.device)
    if device == "hpu":
        return _gaudi(config, ranks)
    if device == "hpu-emulator":
        return _emulated(config, ranks)
    if device == "cuda":
        from hpu.backends.cuda import CudaBackend

        return CudaBackend(ranks)
    from hpu.backends.cpu import CpuBackend
    from hpu.native.library import kernel_folder

    folder = kernel_folder(config.cache_dir) if config.cpu_kernels == "auto" else None
    return CpuBackend(
        config.num_threads,
        folder,
        int8_activations=config.cpu_int8_activations,
        ranks=ranks,
        on_step=on_step,
    )


def _gaudi(config: EngineConfig, ranks: Ranks) -> Backend:
    from hpu.doctor.errors import explain
    from hpu.doctor.machine import Machine
    from hpu.doctor.preflight import check_start
    from hpu.doctor.software import driver_version

    machine = Machine(environment=env.environment())
    # The number of cards on this host is unknown if a local rank is given.
    num_cards = ranks.world_size if ranks.local_rank is None else 1
    check_start(machine, num_cards=num_cards, rank=ranks.device_index)
    choice = env.hpu_mode(config)
    env.set_missing(env.hpu_environment(config))
    from hpu.backends.gaudi import GaudiBackend

    return GaudiBackend(
        config.execution,
        choice,
        seed=config.seed,
        guards_off=config.warmup.full_guards_off,
        driver=driver_version(machine) or "",
        ranks=ranks,
        explain=lambda text: explain(text, machine),
    )


def _emulated(config: EngineConfig, ranks: Ranks) -> Backend:
    from hpu.backends.gaudi import GaudiBackend
    from hpu.emulator.install import install
    from hpu.emulator.settings import EmulatorConfig

    settings = config.emulator
    # Copied: changes by the runtime must not outlive the emulated card.
    variables = {**env.environment(), **env.hpu_environment(config)}
    emulator = install(
        EmulatorConfig(
            generation=settings.card,
            memory_bytes=settings.memory_bytes,
            strict=settings.is_strict,
            compile_delay_s=settings.compile_delay_s,
            late_copy_s=settings.late_copy_s,
            faults=frozenset(settings.faults),
        ),
        variables,
    )
    try:
        return GaudiBackend(
            config.execution,
            env.hpu_mode(config),
            seed=config.seed,
            guards_off=config.warmup.full_guards_off,
            software=emulator.device.config.release,
            ranks=ranks,
            on_warmup_end=emulator.end_warmup,
            on_warmup_begin=emulator.begin_warmup,
            on_close=emulator.uninstall,
        )
    except BaseException:
        emulator.uninstall()
        raise
