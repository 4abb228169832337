"""`gaudiserve presets`: flags and output, and the preset that `serve` applies by default."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial

import yaml

from config.checkpoint.facts import model_facts
from config.engine import EngineConfig
from config.errors import CheckpointError, ConfigError, counted
from config.loading.env import chosen_device, environment
from config.loading.parser import FlagParser, number
from config.loading.sources import DEFAULT, Loaded, load
from engine.reports.doctor import this_machine
from engine.reports.plan import Target, as_json, as_text, with_sizes
from engine.reports.presets import KEYS, Preset, free_cards, make_preset
from server.cli.flags import command_parser, log_notes
from server.cli.plan import add_device, generation_of

logger = logging.getLogger(__name__)


def presets_parser() -> FlagParser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve presets",
        "Print settings for a model on Gaudi cards as YAML for --config. Needs no card.",
    )
    parser.examples = (
        "gaudiserve presets /data/model",
        "gaudiserve presets /data/model --cards 2 > serve.yaml",
        "gaudiserve presets org/name --device gaudi2 --json",
    )
    parser.conflict_handler = "resolve"
    group = parser.add_argument_group("This command")
    add_device(group)
    group.add_argument(
        "--cards",
        type=number(int, minimum=1),
        default=1,
        metavar="N",
        help="Number of cards of the host [1]",
    )
    group.add_argument(
        "--json", action="store_true", help="Print JSON: the settings, and the plan of an engine"
    )
    return parser


def main(argv: list[str]) -> int:
    """Print the preset. Raises ConfigError if the model does not fit."""
    loaded = load(argv, default_model="demo", parser=presets_parser())
    log_notes(loaded)
    args = loaded.arguments
    engine = loaded.engine
    preset = _preset(engine, generation_of(args.device), args.cards)
    if args.json:
        settings = config_of(preset, engine.model, engine.revision)
        print(json.dumps({"settings": settings, "plan": as_json(preset.plan)}, indent=2))
    else:
        print(as_yaml(preset, engine.model, engine.revision), end="")
    return 0


def config_of(
    preset: Preset, model: str, revision: str | None = None
) -> dict[str, int | float | str]:
    """Keys of a --config file: model, device and settings."""
    revisions = {"revision": revision} if revision else {}
    return {"model": model, **revisions, "device": "hpu", **preset.settings}


def as_yaml(preset: Preset, model: str, revision: str | None = None) -> str:
    """Model, device and settings as a --config file, with the plan in comments."""
    num_engines = int(preset.settings["data-parallel-size"])
    each = "each" if num_engines > 1 else "with"
    lines = [
        "Computed by `gaudiserve presets`, not measured on a card: "
        f"{counted(preset.num_cards, 'card')}, {counted(num_engines, 'engine')}, {each}:",
        *as_text(preset.plan).splitlines(),
    ]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comments + yaml.safe_dump(config_of(preset, model, revision), sort_keys=False)


def _preset(engine: EngineConfig, device: str, num_cards: int) -> Preset:
    model_config = model_facts(
        engine.model,
        revision=engine.revision,
        cache_dir=engine.cache_dir,
        download_dir=engine.download_dir,
        hf_overrides=engine.hf_overrides,
        complete=partial(with_sizes, model_impl=engine.model_impl),
    )
    target = Target(device=device)
    return make_preset(model_config, engine, target, num_cards, max_model_len=engine.max_model_len)


def with_preset(
    loaded: Loaded, argv: Sequence[str], cards: tuple[str | None, int] | None = None
) -> Loaded:
    """Add the settings of a preset to `loaded` if the device is a Gaudi and no setting of the
    preset was given by flag, variable or file. Logs a line with the settings. `cards`: generation
    and number; None: the free cards of this machine.

    Returns `loaded` unchanged if the cards or the model are unknown, or if the model does not fit:
    the start reports better errors.
    """
    is_given = any(loaded.sources[key][1] != DEFAULT for key in KEYS)
    if chosen_device(loaded.engine.device) != "hpu" or is_given:
        return loaded
    device, num_cards = cards or free_cards(this_machine(environment()))
    if device is None:
        return loaded
    try:
        preset = _preset(loaded.engine, device, num_cards)
    except (ConfigError, CheckpointError) as error:
        logger.info("No preset: %s", error)
        return loaded
    flags = _flags(preset.settings)
    logger.info(
        "Preset for %s, by `gaudiserve presets`: %s; any of these flags turns it off",
        counted(num_cards, f"{device} card"),
        " ".join(flags),
    )
    return load([*argv, *flags], default_model=loaded.engine.model)


def _flags(settings: Mapping[str, int | float | str]) -> list[str]:
    return [f"--{key}={value}" for key, value in settings.items()]
