"""`gaudiserve plan`: flags, and what is printed. Knows no sizes."""

import json
import math

from config.errors import ConfigError
from config.loading.parser import Parser, server_parser
from config.loading.sources import load
from config.model.facts import model_facts
from engine.reports.buckets import SECONDS_PER_GRAPH
from engine.reports.plan import KV_WIDTHS, Target, as_json, as_text, make_plan

DEVICES = ("gaudi2", "gaudi3")


def parser() -> Parser:
    """A server's flags, and those of a plan; where both have one, the plan's."""
    made = server_parser(
        "gaudiserve plan",
        "How a model would lie in the memory of Gaudi cards. Needs its config.json and no card.",
    )
    made.conflict_handler = "resolve"
    group = made.add_argument_group("This command")
    group.add_argument(
        "--device", choices=DEVICES, default="gaudi3", help="Generation of the cards [gaudi3]"
    )
    group.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="Cards for one model [1]"
    )
    group.add_argument(
        "--kv-cache-dtype", choices=tuple(KV_WIDTHS), default="auto", help="Of the KV cache [auto]"
    )
    group.add_argument(
        "--card-gib", type=float, metavar="X", help="Memory of a card, if not the generation's"
    )
    group.add_argument(
        "--lengths",
        metavar="N,N",
        help="Tokens of sequences to count; none: 512, 2000, 8000, 32000 and a full context",
    )
    group.add_argument(
        "--seconds-per-graph",
        type=float,
        default=SECONDS_PER_GRAPH,
        metavar="X",
        help=f"Warm-up time of one graph, for the estimate [{SECONDS_PER_GRAPH:g}]",
    )
    group.add_argument("--json", action="store_true", help="Print JSON")
    return made


def main(argv: list[str]) -> int:
    """Print a plan; 0 if it fits, 1 if not. Raises ConfigError for a wrong flag or model."""
    made = parser()
    found = made.parse_all(argv)
    engine = load(argv, default_model="demo", parser=made).engine
    target = Target(
        device=found.device,
        num_cards=found.tensor_parallel_size,
        kv_dtype=found.kv_cache_dtype,
        card_bytes=_card_bytes(found.card_gib),
        lengths=_lengths(found.lengths),
        seconds_per_graph=_above_zero("seconds-per-graph", found.seconds_per_graph),
    )
    facts = model_facts(engine.model, revision=engine.revision, cache_dir=engine.cache_dir)
    plan = make_plan(facts, engine, target)
    print(json.dumps(as_json(plan), indent=2) if found.json else as_text(plan))
    return 0 if plan.card.fits else 1


def _card_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(_above_zero("card-gib", gib) * 2**30)


def _above_zero(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value:g}, it must be above 0")
    return value


def _lengths(text: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in (text or "").split(",")] if text is not None else []
    if not all(word.isdigit() for word in words):
        raise ConfigError(
            f"lengths is {text!r}, it must be numbers with commas between, like 2000,8000"
        )
    return tuple(int(word) for word in words)
