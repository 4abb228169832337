"""Tokens per second with and without speculation, offline. For a machine without a Gaudi.

    python benchmarks/speculation.py [--model demo] [--drafts 8] [--out FILE.json]
    python benchmarks/speculation.py --draft-model FOLDER --drafts 4 --only draft

Workloads: edits and quotes of a text in the prompt, greedily with one stream
(`benchmarks/quoting.json`, which `benchmarks/quoting.py` sends to any server); and random prompts
with drafts that are always wrong, with 1 and 32 streams. The engines without and with speculation
alternate. Run nothing else at the same time.

With --draft-model, the workloads also include the prompts of benchmarks/truncated_draft.py, which
makes such a folder, with one stream, and random prompts, for which the draft model is always wrong.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.asked import quoting_messages
from benchmarks.truncated_draft import NUM_TOKENS, PROMPTS
from config.checkpoint.demo import fetch_demo
from config.params.sampling import SamplingParams
from config.speculation.base import SpeculationMethod
from gaudiserve import LLM
from hpu.spec_decode.base import Proposal, Proposer, Tokens
from hpu.spec_decode.drafter import select_proposer
from hpu.worker import drafting


class WrongProposer:
    """Proposer of drafts that are always wrong, with the confidence of a long match."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        return

    def remove_request(self, req_index: int) -> None:
        return

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        return [Proposal([self._rng.randrange(1000, 9000)] * limit, 8) for limit in limits]

    def measure(self, max_num_seqs: int) -> None:
        return None


def propose_wrong(method: SpeculationMethod, launcher: object) -> Proposer:
    """Replacement of `select_proposer` that returns a WrongProposer."""
    return WrongProposer()


def make(model: str, drafts: int, *, is_wrong: bool = False, drafter: str = "") -> LLM:
    flags: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": False}
    if drafts:
        method = {"method": "draft_model", "model": drafter} if drafter else {"method": "ngram"}
        flags["speculative_config"] = {**method, "num_speculative_tokens": drafts}
    with patch.object(drafting, "select_proposer", propose_wrong if is_wrong else select_proposer):
        return LLM(model, **flags)


def quote(llm: LLM) -> tuple[int, float]:
    """(tokens, seconds) of all prompts in sequence."""
    tokens, start = 0, time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=256)
    chats: Any = quoting_messages()
    for messages in chats:
        (output,) = llm.chat([messages], params, use_tqdm=False)
        tokens += len(output.outputs[0].token_ids)
    return tokens, time.perf_counter() - start


def answer(llm: LLM) -> tuple[int, float]:
    """(tokens, seconds) of the first four PROMPTS in sequence."""
    tokens, start = 0, time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for prompt in PROMPTS[:4]:
        messages: Any = [{"role": "user", "content": prompt}]
        (output,) = llm.chat([messages], params, use_tqdm=False)
        tokens += len(output.outputs[0].token_ids)
    return tokens, time.perf_counter() - start


def stream(llm: LLM, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """(tokens, seconds) of random prompts at once."""
    rng = random.Random(2)
    prompts = [[rng.randrange(1000, 9000) for _ in range(64)] for _ in range(num_streams)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--only", default="", help="run the workloads whose names contain this")
    parser.add_argument("--draft-model", default="", help="folder of a draft model to measure")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = fetch_demo(progress=False) if args.model == "demo" else args.model
    workloads: dict[str, tuple[dict[str, Any], Callable[[LLM], tuple[int, float]]]] = {
        "edits and quotes, 1 stream": ({}, quote),
        "wrong proposals, 1 stream": ({"is_wrong": True}, lambda llm: stream(llm, 1, 256)),
        "wrong proposals, 32 streams": ({"is_wrong": True}, lambda llm: stream(llm, 32, 64)),
    }
    if args.draft_model:
        drafter = {"drafter": args.draft_model}
        workloads["draft model, 1 stream"] = (drafter, answer)
        for count, tokens in ((1, 256), (32, 64)):
            workloads[f"draft model, random prompts, {count} streams"] = (
                drafter,
                lambda llm, count=count, tokens=tokens: stream(llm, count, tokens),  # type: ignore[misc]
            )
    plain = make(model, 0)
    results: dict[str, dict[str, float]] = {}
    for name, (flags, run) in workloads.items():
        if args.only not in name:
            continue
        other = make(model, args.drafts, **flags)
        rates: dict[str, list[float]] = {"without": [], "with": []}
        for turn in range(args.turns + 1):
            for key, llm in (("without", plain), ("with", other)):
                tokens, seconds = run(llm)
                # The first turn warms up.
                if turn:
                    rates[key].append(tokens / seconds)
        medians = {key: statistics.median(values) for key, values in rates.items()}
        medians["ratio"] = medians["with"] / medians["without"]
        results[name] = medians
        print(name, {key: round(value, 3) for key, value in medians.items()}, flush=True)
        # A single slow turn points to the machine, several slow turns of an engine to the engine.
        print({key: [round(rate, 1) for rate in found] for key, found in rates.items()})
        print(other._client.stats.spec_decode)
        other.close()
    plain.close()
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
