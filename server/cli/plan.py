"""`gaudiserve plan`: flags and output."""

import argparse
import json
from functools import partial

from config.checkpoint.facts import engine_facts
from config.errors import ConfigError
from config.loading.env import environment
from config.loading.parser import FlagParser, number
from config.loading.sources import Loaded, load
from config.setting import is_count
from engine.reports.doctor import this_machine
from engine.reports.plan import Target, as_json, as_text, make_plan, with_sizes
from engine.reports.presets import card_generation
from server.cli.buckets import add_graph_seconds
from server.cli.flags import command_parser, log_notes


def add_device(group: argparse._ArgumentGroup) -> None:
    """Add `--device` of `plan` and `presets` to a group of flags."""
    group.add_argument(
        "--device",
        choices=("gaudi2", "gaudi3", "hpu"),
        default="gaudi3",
        help="Generation of the cards; hpu: of the cards of this machine [gaudi3]",
    )


def generation_of(device: str) -> str:
    """Generation of the cards that `--device` names. Raises ConfigError for `hpu` unless this
    machine has cards of one known generation."""
    return card_generation(this_machine(environment())) if device == "hpu" else device


def plan_parser() -> FlagParser:
    """Parser with the flags of `serve` and the flags of the command, which may override them."""
    parser = command_parser(
        "gaudiserve plan",
        "Estimate a model's memory on Gaudi cards from its config.json; MODEL may also be a path "
        "of a config.json. Needs no card. Exit status: 0 if the model fits and is served, 1 if "
        "not, 2 for wrong settings.",
    )
    parser.examples = (
        "gaudiserve plan demo",
        "gaudiserve plan /data/model --cards 4 --max-model-len 32K",
        "gaudiserve plan org/name --device gaudi2 --json",
    )
    parser.conflict_handler = "resolve"
    group = parser.add_argument_group("This command")
    add_device(group)
    group.add_argument(
        "--cards",
        type=number(int, minimum=1),
        metavar="N",
        help="Number of cards of an engine (sets --tensor-parallel-size)",
    )
    group.add_argument(
        "--card-gib",
        type=number(above=0),
        metavar="X",
        help="Memory of a card in GiB [the memory of --device]",
    )
    group.add_argument(
        "--lengths",
        metavar="N,N",
        help="Sequence lengths to report [512, 2000, 8000, 32000 and the full context]",
    )
    add_graph_seconds(group)
    group.add_argument("--json", action="store_true", help="Print JSON")
    return parser


def main(argv: list[str]) -> int:
    """Print the plan; returns 0 if the model fits and is served, otherwise 1. Raises
    ConfigError."""
    loaded = load(argv, default_model="demo", parser=plan_parser())
    if num_cards := loaded.arguments.cards:
        return _print_plan_of_cards(argv, num_cards)
    return _print_plan(loaded)


def _print_plan_of_cards(argv: list[str], num_cards: int) -> int:
    words = [*argv, f"--tensor-parallel-size={num_cards}"]
    try:
        return _print_plan(load(words, default_model="demo", parser=plan_parser()))
    except ConfigError as error:
        # Name the flag that the user wrote.
        raise ConfigError(str(error).replace("--tensor-parallel-size", "--cards")) from error


def _print_plan(loaded: Loaded) -> int:
    log_notes(loaded)
    args, engine = loaded.arguments, loaded.engine
    target = Target(
        device=generation_of(args.device),
        card_bytes=None if args.card_gib is None else int(args.card_gib * 2**30),
        lengths=_lengths(args.lengths),
        seconds_per_graph=args.seconds_per_graph,
    )
    model_config = engine_facts(engine, partial(with_sizes, model_impl=engine.model_impl))
    plan = make_plan(model_config, engine, target)
    print(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan))
    return 0 if plan.is_served else 1


def _lengths(text: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in (text or "").split(",")] if text is not None else []
    if not all(is_count(word) for word in words):
        raise ConfigError(
            f"--lengths is {text!r}, it must be comma-separated numbers, like 2000,8000"
        )
    return tuple(int(word) for word in words)
