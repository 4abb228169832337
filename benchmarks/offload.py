"""Time to first token of conversations that alternate in a cache that holds only a few of them:
with evicted blocks in host memory, in files after a restart, and recomputed.

    python benchmarks/offload.py [--model FOLDER] [--conversations 64] [--tokens 2000] [--fits 8]

Each conversation has one turn, then each has a second turn, which adds tokens to the first.
Requests run alone; the time of a request is the time of a call that generates a single token.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.checkpoint.demo import NAMES
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from gaudiserve import LLM, SamplingParams

BLOCK_SIZE = 32
MORE_TOKENS = 20
"""Number of tokens that the second turn adds."""
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_tokens(
    llm: LLM, prompts: Sequence[list[int]]
) -> tuple[list[float], list[int], list[int]]:
    """(seconds to the first token, first tokens, prompt tokens found in the cache) of prompts in
    sequence."""
    times, tokens, cached = [], [], []
    for prompt in prompts:
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], ONE_TOKEN, use_tqdm=False)
        times.append(time.perf_counter() - start)
        tokens.append(output.outputs[0].token_ids[0])
        cached.append(output.num_cached_tokens or 0)
    return times, tokens, cached


def report(name: str, times: Sequence[float], cached: Sequence[int]) -> float:
    median = statistics.median(times)
    print(
        f"| {name} | {median * 1e3:.0f} | {max(times) * 1e3:.0f} | {statistics.mean(cached):.0f} |",
        flush=True,
    )
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=NAMES[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument(
        "--fits", type=int, default=8, help="number of conversations that the cache holds"
    )
    parser.add_argument("--host-gib", type=float, default=4.0)
    parser.add_argument(
        "--restarted", type=int, default=16, help="number of conversations after a restart"
    )
    args = parser.parse_args()
    rng = random.Random(3)
    first = [
        [rng.randrange(100, 40_000) for _ in range(args.tokens)] for _ in range(args.conversations)
    ]
    second = [entry + [rng.randrange(100, 40_000) for _ in range(MORE_TOKENS)] for entry in first]
    blocks = -(-(args.tokens + MORE_TOKENS + 1) // BLOCK_SIZE)
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": args.fits * blocks,
        "max_model_len": args.tokens + 100,
        "max_num_seqs": 4,
    }
    model = str(resolve(EngineConfig(args.model)))
    print("| second turn | median ms to the first token | maximum | prompt tokens found |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        offload = {**settings, "kv_offloading_size": args.host_gib, "kv_offloading_dir": folder}
        with LLM(model, **offload) as llm:
            times, _, cached = first_tokens(llm, first)
            report("(first turn, with offload)", times, cached)
            times, tokens, cached = first_tokens(llm, second)
            copied = report("host memory", times, cached)
        with LLM(model, **offload) as llm:
            times, again, cached = first_tokens(llm, second[: args.restarted])
            read = report(f"files, {args.restarted} after a restart", times, cached)
    with LLM(model, **settings) as llm:
        # Fill the cache with the last conversations, like a full first turn does.
        first_tokens(llm, first[-args.fits :])
        times, expected, cached = first_tokens(llm, second)
        computed = report("computed again", times, cached)
    print(
        f"\nhost memory: {copied / computed:.3f} of the time that computing again takes; files: "
        f"{read / computed:.3f}"
    )
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    same_read = sum(a == b for a, b in zip(again, expected, strict=False))
    print(f"equal first tokens: {same} of {len(tokens)}, {same_read} of {len(again)} from files")


if __name__ == "__main__":
    main()
