"""Makes a draft model out of the demo model: its first layers, trained on the demo model's answers.

    python benchmarks/truncated_draft.py FOLDER [--layers 2] [--seconds 200]
    python benchmarks/speculation.py --draft-model FOLDER --only draft

Embedding and head are unchanged. The drafter learns the answers to PROMPTS, which the benchmark
sends again: the measured ratio holds for a drafter that fits its workload, not for other texts.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.params.sampling import SamplingParams
from gaudiserve import LLM

PROMPTS = (
    "Describe a harbour in the morning.",
    "Explain why the sky is blue.",
    "Write a short letter to a friend about a garden.",
    "List five uses of a brick.",
    "What is a hash table?",
    "Tell a story about a clock that runs backwards.",
    "How is bread baked?",
    "Compare trains and ships.",
)
NUM_TOKENS = 160


def answers() -> list[tuple[list[int], list[int]]]:
    """Tokens of each prompt with its template, and of the greedy answer."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM("demo", max_model_len=2048, enable_prefix_caching=False) as llm:
        messages: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(messages, params, use_tqdm=False)
    return [(list(o.prompt_token_ids or ()), list(o.outputs[0].token_ids)) for o in outputs]


def truncated(num_layers: int) -> Any:
    """The first layers of the demo model, in float32."""
    folder = resolve(EngineConfig("demo", dtype="float32"))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, num_hidden_layers=num_layers
    )
    return model.requires_grad_(False)


def train(model: Any, texts: list[tuple[list[int], list[int]]], seconds: float) -> None:
    """Fit the layers and the last norm to the answers of `texts` for `seconds` seconds."""
    trained = [*model.model.layers.parameters(), *model.model.norm.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    # Train only with the logits of the tokens that occur; other tokens are rarely the most likely.
    used = torch.tensor(sorted({token for _, answer in texts for token in answer}))
    rng, end_s = random.Random(1), time.perf_counter() + seconds
    order, step = list(range(len(texts))), 0
    while time.perf_counter() < end_s:
        rng.shuffle(order)
        for index in order:
            prompt, answer = texts[index]
            # Include some random other tokens, so that they stay unlikely.
            others = torch.randint(model.config.vocab_size, (2000,))
            classes = torch.cat((used, others[~torch.isin(others, used)]))
            targets = torch.searchsorted(used, torch.tensor(answer))
            tokens = torch.tensor([prompt + answer[:-1]])
            hidden = model.model(tokens).last_hidden_state[0, len(prompt) - 1 :]
            logits = hidden @ model.lm_head.weight[classes].t()
            loss = functional.cross_entropy(logits, targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
        if step % (10 * len(texts)) == 0:
            agreed = (logits.argmax(-1) == targets).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, {agreed:.0%} agree", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    model, texts = truncated(args.layers), answers()
    train(model, texts, args.seconds)
    model.to(torch.bfloat16).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
