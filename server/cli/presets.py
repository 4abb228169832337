"""`gaudiserve presets`: flags and output, and the preset that `serve` applies by default."""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from config.checkpoint.facts import engine_facts
from config.errors import CheckpointError, ConfigError, counted
from config.loading.env import PREFIX, chosen_device, environment
from config.loading.flags import FLAGS
from config.loading.parser import FlagParser, number
from config.loading.sources import DEFAULT, Loaded, load
from config.whole_files import write_whole
from engine.reports.doctor import this_machine
from engine.reports.plan import Target, as_json, as_text, with_sizes
from engine.reports.presets import KEYS, Preset, free_cards, make_preset
from server.cli.flags import command_parser, log_notes
from server.cli.plan import add_device, generation_of

logger = logging.getLogger(__name__)

_OWN_VARIABLES = (f"variable {PREFIX}", "variable VLLM_")
_SECRETS = frozenset(flag.key for flag in FLAGS if flag.setting.is_secret)


def presets_parser() -> FlagParser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve presets",
        "Print settings for a model on Gaudi cards as YAML for --config. Needs no card. Exit "
        "status: 0, 1 for a model that cannot be read or is not served, 2 for wrong settings and "
        "for a model that does not fit.",
    )
    parser.examples = (
        "gaudiserve presets /data/model",
        "gaudiserve presets /data/model --host-cards 2 -o serve.yaml",
        "gaudiserve presets org/name --device gaudi2 --json",
    )
    parser.conflict_handler = "resolve"
    group = parser.add_argument_group("This command")
    add_device(group)
    # --cards is the older name, which counts the cards of an engine in `gaudiserve plan`.
    for name, text in (
        ("--host-cards", "Number of cards of the host [1]"),
        ("--cards", argparse.SUPPRESS),
    ):
        group.add_argument(
            name,
            dest="host_cards",
            type=number(int, minimum=1),
            default=1,
            metavar="N",
            help=text,
        )
    group.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="Write to FILE, not to the standard output; an existing file is replaced",
    )
    group.add_argument(
        "--json", action="store_true", help="Print JSON: the settings, and the plan of an engine"
    )
    return parser


def main(argv: list[str]) -> int:
    """Print the preset, or write it to a file. Raises ConfigError, for example if the model does
    not fit."""
    loaded = load(argv, default_model="demo", parser=presets_parser())
    log_notes(loaded)
    args = loaded.arguments
    preset = _preset(loaded, generation_of(args.device), args.host_cards)
    if args.json:
        settings = config_of(preset, loaded)
        text = json.dumps({"settings": settings, "plan": as_json(preset.plan)}, indent=2) + "\n"
    else:
        text = as_yaml(preset, loaded)
    if args.output is None:
        print(text, end="")
    else:
        _write(args.output, text)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None


def config_of(preset: Preset, loaded: Loaded) -> dict[str, object]:
    """Keys of a --config file: model, device, the preset, and all other settings that a source of
    `loaded` sets, except secrets and variables that other programs also read."""
    return {
        "model": loaded.engine.model,
        "device": "hpu",
        **preset.settings,
        **{
            key: list(value) if isinstance(value, tuple) else value
            for key, value in _given(loaded).items()
            if key not in ("model", "device", *KEYS, *_SECRETS)
            and value is not None
            and not _is_of_this_machine(loaded.sources[key][1])
        },
    }


def as_yaml(preset: Preset, loaded: Loaded) -> str:
    """Settings as a --config file, with the plan in comments."""
    num_engines = preset.num_engines
    each = "each" if num_engines > 1 else "with"
    lines = [
        "Computed by `gaudiserve presets`, not measured on a card: "
        f"{counted(preset.num_cards, 'card')}, {counted(num_engines, 'engine')}, {each}:",
        *as_text(preset.plan).splitlines(),
    ]
    if unused := preset.num_unused:
        lines.insert(
            1,
            f"{counted(unused, 'card')} of {preset.num_cards} {'is' if unused == 1 else 'are'} not "
            f"used: an engine takes {counted(preset.cards_per_engine, 'card')}",
        )
    if secrets := _SECRETS & _given(loaded).keys():
        lines.append(f"Not written, a secret: {', '.join(sorted(secrets))}")
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comments + yaml.safe_dump(config_of(preset, loaded), sort_keys=False)


def _given(loaded: Loaded) -> dict[str, Any]:
    return {key: value for key, (value, source) in loaded.sources.items() if source != DEFAULT}


def _is_of_this_machine(source: str) -> bool:
    """Whether `source` is a variable that other programs also read, such as OMP_NUM_THREADS. A
    server reads it on its own host."""
    return source.startswith("variable ") and not source.startswith(_OWN_VARIABLES)


def _preset(loaded: Loaded, device: str, num_cards: int) -> Preset:
    engine = loaded.engine
    model_config = engine_facts(engine, partial(with_sizes, model_impl=engine.model_impl))
    given = _given(loaded).keys() & set(KEYS)
    return make_preset(model_config, engine, Target(device=device), num_cards, given)


def with_preset(
    loaded: Loaded, argv: Sequence[str], cards: tuple[str | None, int] | None = None
) -> Loaded:
    """Add the settings of a preset to `loaded` if the device is hpu. Settings that a flag, variable
    or file sets are kept, and the others fit them. Logs a line with the settings. `cards`:
    generation and number; None: the free cards of this machine.

    Returns `loaded` unchanged if every setting of a preset is given, if the cards or the model are
    unknown, if the model does not fit (the start reports better errors), or if other hosts have
    engines, which could choose other settings.
    """
    given = _given(loaded)
    if chosen_device(loaded.engine.device) != "hpu" or given.keys() >= set(KEYS):
        return loaded
    data = loaded.engine.data_parallel
    if data.num_remote:
        logger.info(
            "No preset: %d of %d engines are on other hosts",
            data.num_remote,
            data.data_parallel_size,
        )
        return loaded
    device, num_cards = cards or free_cards(this_machine(environment()))
    if device is None:
        return loaded
    try:
        preset = _preset(loaded, device, num_cards)
    except (ConfigError, CheckpointError) as error:
        logger.info("No preset: %s", error)
        return loaded
    flags = _flags({key: value for key, value in preset.settings.items() if key not in given})
    kept = _flags({key: given[key] for key in KEYS if key in given})
    logger.info(
        "Preset for %s, by `gaudiserve presets`: %s; given: %s",
        counted(num_cards, f"{device} card"),
        " ".join(flags),
        " ".join(kept) or "none",
    )
    return load([*argv, *flags], default_model=loaded.engine.model)


def _flags(settings: Mapping[str, int | float | str]) -> list[str]:
    return [f"--{key}={value}" for key, value in settings.items()]
