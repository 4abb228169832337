"""Accuracy and speed of quantized weights and KV caches: perplexity on a text and tokens/s of a
single stream, each variant in its own process.

    python benchmarks/perplexity.py demo --variants none int8 int4 --markdown OUT.md
    python benchmarks/perplexity.py demo --variants none --dtype float32 bfloat16
    python benchmarks/perplexity.py demo --variants none --kv-cache-dtype auto int8 fp8

The first variant is the baseline. For the speed, run nothing else at the same time.
"""

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import machine
from config.errors import ConfigError
from config.model.kv_cache_dtype import AUTO, KV_CACHE_DTYPES
from gaudiserve import LLM, SamplingParams
from server.offline.perplexity import TEXT, WINDOW, Reading, read, windows

PROMPT_TOKENS = 16
NONE = "none"
VARIANTS = (NONE, "int8", "int4", "gguf")


@dataclass(frozen=True)
class Measured:
    """Results of a variant."""

    variant: str
    dtype: str
    kv_cache_dtype: str
    reading: Reading
    weight_bytes: int
    tokens_per_s: float


def tokens_per_s(llm: LLM, text: str, num_tokens: int, rounds: int) -> float:
    """Output tokens per second of a greedy request with a short prompt; the time includes its
    prefill. Median of `rounds` rounds after a warm-up round."""
    prompt = windows(llm, text, PROMPT_TOKENS)[0]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return num_tokens / statistics.median(seconds[1:])


def measure(
    variant: str,
    dtype: str,
    kv_cache_dtype: str,
    text: str,
    options: argparse.Namespace,
    flags: dict[str, Any],
) -> Measured:
    """Measure one variant. Raises ConfigError if it is not supported."""
    flags = {**flags, "kv_cache_dtype": kv_cache_dtype}
    if variant != NONE:
        flags = {**flags, "quantization": variant}
    length = max(options.window + 1, PROMPT_TOKENS + options.tokens)
    with LLM(options.model, dtype=dtype, max_model_len=length, **flags) as llm:
        reading = read(llm, text, options.window)
        rate = tokens_per_s(llm, text, options.tokens, options.rounds)
        return Measured(variant, dtype, kv_cache_dtype, reading, llm.weight_bytes, rate)


def measure_all(options: argparse.Namespace, text: str) -> list[Measured]:
    """Measure each variant in its own process, so that memory is free; unsupported variants are
    reported and skipped."""
    found = []
    for case in itertools.product(options.variants, options.dtype, options.kv_cache_dtype):
        named = ", ".join(case)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            work = alone.submit(measure, *case, text, options, dict(options.set))
            try:
                figures = work.result()
            except ConfigError as error:
                _log(f"{named}: {error}")
                continue
        found.append(figures)
        _log(f"{named}: perplexity {figures.reading.perplexity:.4f}")
    return found


def rows(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """Rows of the table; ratios are relative to the first of `found`."""
    table = []
    for entry in found:
        numbers = asdict(entry)
        del numbers["reading"]
        numbers["perplexity"] = entry.reading.perplexity
        numbers["ratio"] = entry.reading.perplexity / found[0].reading.perplexity
        numbers["agreement"] = entry.reading.agreement(found[0].reading)
        table.append(numbers)
    return table


def markdown(found: Sequence[Measured], options: argparse.Namespace) -> str:
    """The table, with date and machine."""
    num_tokens = len(found[0].reading.logprobs)
    lines = [
        f"# Perplexity of {options.model}, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/perplexity.py`, {machine()}.",
        f"{num_tokens} tokens of `{options.text.name}` in windows of {options.window}; speed of "
        f"one stream of {options.tokens} tokens, median of {options.rounds}.",
        "",
        "| weights | dtype | KV cache | perplexity | times the first | same likeliest token "
        "| MB of weights | tokens/s | times the first |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['variant']} | {row['dtype']} | {row['kv_cache_dtype']} | {row['perplexity']:.3f} "
        f"| {row['ratio']:.4f} | {row['agreement']:.1%} | {row['weight_bytes'] / 1e6:.1f} "
        f"| {row['tokens_per_s']:.1f} | {row['tokens_per_s'] / found[0].tokens_per_s:.2f} |"
        for row in rows(found)
    ]
    return "\n".join(lines) + "\n"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _setting(argument: str) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=VALUE")
    return name.replace("-", "_"), value


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo", help="folder, .gguf file or hub id")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=KV_CACHE_DTYPES,
        default=[AUTO],
        metavar="DTYPE",
        help="data type of the KV cache",
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of the timed stream")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of the timed stream")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any flag of the server, for all variants; may be repeated",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    found = measure_all(options, options.text.read_text(encoding="utf-8"))
    if not found:
        return 1
    table = markdown(found, options)
    print(table, end="")
    if options.markdown:
        options.markdown.write_text(table)
    if options.json:
        facts = {"date": datetime.date.today().isoformat(), "machine": machine()}
        facts |= {"model": options.model, "window": options.window}
        options.json.write_text(json.dumps({**facts, "variants": rows(found)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
