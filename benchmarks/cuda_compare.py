"""The offline LLM compared with transformers on one GPU: same random weights and prompts, greedy,
for several numbers of streams. Run: python benchmarks/cuda_compare.py  (--device cpu --shape tiny
tests the script without a GPU)

`continuous` is transformers' continuous batching (`generate_batch`), `generate` its static batch,
without scheduling or paging. Each side runs in its own process and runs every load twice; the
second run is measured, from the submission of the prompts to the last token. The checkpoint (16 GB
for 8b) is written to a folder in TMPDIR and removed at the end.
"""

import argparse
import contextlib
import datetime
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cuda_decode import SHAPES, device_name, open_device
from config.params.sampling import SamplingParams
from gaudiserve import LLM

SIDES = ("gaudiserve", "continuous", "generate")
Prompts = list[list[int]]
Generate = Callable[[Prompts], int]
"""Function that completes all prompts at once and returns the number of output tokens."""


def write_checkpoint(options: argparse.Namespace, folder: str) -> None:
    """Write a checkpoint of random weights that all sides can load."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = SHAPES[options.shape]
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=options.prompt + options.output + 1,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(options.device):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=getattr(torch, options.dtype))
    model.save_pretrained(folder, max_shard_size="4GB")


def prompts_of(options: argparse.Namespace, count: int, seed: int) -> Prompts:
    """`count` prompts without shared prefixes, the same for every side."""
    rng = random.Random(seed)
    most = SHAPES[options.shape].vocab_size
    return [[rng.randrange(5, most) for _ in range(options.prompt)] for _ in range(count)]


@contextlib.contextmanager
def gaudiserve(options: argparse.Namespace, count: int) -> Iterator[Generate]:
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
    with LLM(
        options.folder,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.prompt + options.output,
        max_num_seqs=count,
        max_num_batched_tokens=max(2048, options.prompt, count),
        skip_tokenizer_init=True,
    ) as llm:

        def generate(prompts: Prompts) -> int:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)

        yield generate


def load_transformers(options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=getattr(torch, options.dtype), device_map=None
    )
    return model.to(options.device).eval()


@contextlib.contextmanager
def continuous(options: argparse.Namespace, count: int) -> Iterator[Generate]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load_transformers(options)
    make_config: Any = GenerationConfig
    generation_config = make_config(max_new_tokens=options.output, do_sample=False, eos_token_id=-1)
    # On a GPU transformers sizes its cache; on a CPU it would use most of the memory.
    blocks = None if options.device == "cuda" else 64
    batching = ContinuousBatchingConfig(num_blocks=blocks)

    def generate(prompts: Prompts) -> int:
        results = model.generate_batch(
            prompts,
            generation_config=generation_config,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        return sum(len(result.generated_tokens) for result in results.values())

    yield generate
    model.destroy_cached_continuous_batching_manager()


@contextlib.contextmanager
def generate(options: argparse.Namespace, count: int) -> Iterator[Generate]:
    model = load_transformers(options)

    def generate(prompts: Prompts) -> int:
        input_ids = torch.tensor(prompts, device=options.device)
        with torch.inference_mode():
            out = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=options.output,
                min_new_tokens=options.output,
                do_sample=False,
                pad_token_id=0,
            )
        if options.device == "cuda":
            torch.cuda.synchronize()
        return int(out.numel() - input_ids.numel())

    yield generate


def run_side(options: argparse.Namespace) -> None:
    """Measure one side; the last line of its output is JSON: tokens/s by number of streams."""
    side = {"gaudiserve": gaudiserve, "continuous": continuous, "generate": generate}[options.side]
    rates = {}
    for count in options.streams:
        with side(options, count) as complete:
            complete(prompts_of(options, count, seed=1))
            start = time.perf_counter()
            tokens = complete(prompts_of(options, count, seed=2))
            seconds = time.perf_counter() - start
        if tokens != count * options.output:
            raise SystemExit(f"{options.side} gave {tokens} tokens, not {count * options.output}")
        rates[count] = tokens / seconds
        # Free the memory of the card for the next load.
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(rates))


def ask_side(side: str, folder: str, arguments: list[str]) -> dict[str, float]:
    """Run a side in its own process."""
    command = [sys.executable, __file__, *arguments, "--side", side, "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{side} ended with {done.returncode}", file=sys.stderr)
        return {}
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = options_of(arguments)
    if options.side:
        run_side(options)
        return
    open_device(options.device).close()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options, folder)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        rates = {side: ask_side(side, folder, arguments) for side in options.sides}
    import transformers

    print(
        f"Output tokens a second, {options.shape} shape in {options.dtype}, {options.prompt} "
        f"prompt and {options.output} output tokens; in brackets the ratio to {options.sides[0]}."
    )
    print(
        f"{device_name(options.device)}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {datetime.date.today()}.\n"
    )
    print("| streams | " + " | ".join(options.sides) + " |")
    print("| ---: |" + " ---: |" * len(options.sides))
    for count in options.streams:
        found = [rates[side].get(str(count)) for side in options.sides]
        cells = [
            "failed" if rate is None else f"{rate:.0f} ({rate / (found[0] or rate):.2f})"
            for rate in found
        ]
        print(f"| {count} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
