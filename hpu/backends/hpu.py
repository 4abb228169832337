"""Creates the back end of Gaudi cards or of an emulated card. Imports only the runtime that it
uses."""

from config.engine import EngineConfig
from config.loading import env
from config.progress import OnStep
from hpu.backends.base import Backend
from hpu.distributed.process_groups import Ranks


def _gaudi(config: EngineConfig, ranks: Ranks, on_step: OnStep) -> Backend:
    from hpu.doctor.cards import find_cards
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
    from hpu.backends.gaudi import CardFacts, GaudiBackend

    return GaudiBackend(
        config.execution,
        choice,
        seed=config.seed,
        ranks=ranks,
        guards_off=config.warmup.full_guards_off,
        facts=CardFacts(
            driver=driver_version(machine) or "",
            multiplies_float32=all(card.multiplies_float32 for card in find_cards(machine).cards),
            explain=lambda text: explain(text, machine),
        ),
    )


def _emulated(config: EngineConfig, ranks: Ranks, on_step: OnStep) -> Backend:
    from hpu.backends.gaudi import CardFacts, CardHooks, GaudiBackend
    from hpu.emulator.install import install
    from hpu.emulator.settings import EmulatorConfig

    settings = config.emulator
    # A copy: changes that the runtime makes must not outlive the emulated card.
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
            ranks=ranks,
            guards_off=config.warmup.full_guards_off,
            facts=CardFacts(
                software=emulator.device.config.release,
                multiplies_float32=emulator.device.config.multiplies_float32,
            ),
            hooks=CardHooks(
                on_warmup_begin=emulator.begin_warmup,
                on_warmup_end=emulator.end_warmup,
                on_close=emulator.uninstall,
            ),
        )
    except BaseException:
        emulator.uninstall()
        raise


BACKENDS = {"hpu": _gaudi, "hpu-emulator": _emulated}
