"""`gaudiserve bench throughput` and `gaudiserve bench latency`: measure a model in this process,
without HTTP. Flags and JSON keys have the same names as in vLLM's commands."""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from config import log
from config.checkpoint.demo import NAMES
from config.errors import ConfigError
from config.loading.parser import FlagParser, number
from config.loading.sources import load
from config.params.sampling import SamplingParams
from config.progress import CountBar
from server.cli.bench.options import check_dataset
from server.cli.bench.workload import (
    WORDS,
    BenchRequest,
    Shape,
    read_sharegpt,
    sharegpt_requests,
    token_requests,
)
from server.cli.flags import command_parser, log_notes
from server.cli.selftest import served
from server.offline.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)

THROUGHPUT = """\
Measure how many requests and tokens per second a model computes in this process, without HTTP: all
requests are queued at the start. The flags are those of `vllm bench throughput`."""
LATENCY = """\
Measure how long a batch of requests takes from the prompts to the last token, in this process,
without HTTP. The flags are those of `vllm bench latency`."""


def throughput_parser() -> FlagParser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser("gaudiserve bench throughput", THROUGHPUT)
    parser.examples = (
        "gaudiserve bench throughput --num-prompts 64",
        "gaudiserve bench throughput /data/model --input-len 1024 --max-num-seqs 64",
    )
    add = parser.add_argument_group("This command").add_argument
    add(
        "--num-prompts",
        type=_count(1),
        default=100,
        metavar="N",
        help="Number of requests [%(default)s]",
    )
    add(
        "--dataset-name",
        choices=("random", "sharegpt"),
        default="random",
        help="Random tokens, or conversations of --dataset-path [%(default)s]",
    )
    add("--dataset-path", metavar="FILE", help="JSON file of conversations, for sharegpt")
    add(
        *("--input-len", "--random-input-len"),
        type=_count(1),
        metavar="N",
        help="Tokens of a prompt [128]",
    )
    add(
        *("--output-len", "--random-output-len"),
        type=_count(1),
        metavar="N",
        help="Tokens of an answer [128; with sharegpt the length of the conversation's answer]",
    )
    add(
        "--random-range-ratio",
        type=number(minimum=0, maximum=1),
        default=0.0,
        metavar="R",
        help="Draw the lengths from (1 - R) to (1 + R) times these lengths [%(default)g]",
    )
    add("--n", type=_count(1), default=1, metavar="N", help="Answers to each prompt [%(default)s]")
    _add_common(parser)
    return parser


def latency_parser() -> FlagParser:
    """Parser with the flags of the command and the flags of `serve`."""
    parser = command_parser("gaudiserve bench latency", LATENCY)
    parser.examples = (
        "gaudiserve bench latency --batch-size 1",
        "gaudiserve bench latency /data/model --input-len 1024 --output-len 16 --num-iters 5",
    )
    add = parser.add_argument_group("This command").add_argument
    add(
        "--input-len",
        type=_count(1),
        default=32,
        metavar="N",
        help="Tokens of a prompt [%(default)s]",
    )
    add(
        "--output-len",
        type=_count(1),
        default=128,
        metavar="N",
        help="Tokens of an answer [%(default)s]",
    )
    add(
        "--batch-size",
        type=_count(1),
        default=8,
        metavar="N",
        help="Requests of a batch [%(default)s]",
    )
    add("--n", type=_count(1), default=1, metavar="N", help="Answers to each prompt [%(default)s]")
    add(
        "--num-iters-warmup",
        type=_count(0),
        default=10,
        metavar="N",
        help="Warm-up batches, not counted [%(default)s]",
    )
    add(
        "--num-iters",
        type=_count(1),
        default=30,
        metavar="N",
        help="Measured batches [%(default)s]",
    )
    _add_common(parser)
    return parser


def _count(minimum: int) -> Callable[[str], object]:
    return number(int, minimum=minimum)


def _add_common(parser: FlagParser) -> None:
    group = parser.add_argument_group("Result")
    group.add_argument(
        "--output-json", metavar="FILE", help="JSON file to write the results to, with vLLM's keys"
    )


def throughput(argv: Sequence[str]) -> int:
    """Run `bench throughput`; returns 0. Raises ConfigError, for example for invalid flags, and the
    errors of LLM.generate."""
    llm, options = _opened(argv, throughput_parser())
    with llm:
        requests = _requests(llm, options)
        params = [_params(request.output_len, options.n) for request in requests]
        start = time.perf_counter()
        outputs = llm.generate([_prompt(request) for request in requests], params)
        seconds = time.perf_counter() - start
    num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    total = num_prompt + num_output
    print(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, {total / seconds:.2f} total "
        f"tokens/s, {num_output / seconds:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {num_prompt}\nTotal num output tokens:  {num_output}"
    )
    _write(
        options.output_json,
        {
            "elapsed_time": seconds,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / seconds,
            "tokens_per_second": total / seconds,
        },
    )
    return 0


def latency(argv: Sequence[str]) -> int:
    """Run `bench latency`; returns 0. Raises ConfigError, for example for invalid flags, and the
    errors of LLM.generate."""
    llm, options = _opened(argv, latency_parser())
    with llm:
        shape = Shape(options.batch_size, options.input_len, options.output_len)
        prompts = [_prompt(each) for each in token_requests(shape, _vocabulary(llm))]
        params = _params(options.output_len, options.n)
        for _ in CountBar(range(options.num_iters_warmup), desc="Warmup iterations", disable=None):
            llm.generate(prompts, params, use_tqdm=False)
        latencies = []
        for _ in CountBar(range(options.num_iters), desc="Bench iterations", disable=None):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - start)
    percentiles = dict(
        zip(map(str, PERCENTILES), np.percentile(latencies, PERCENTILES).tolist(), strict=True)
    )
    mean = float(np.mean(latencies))
    print(f"Avg latency: {mean:.4f} seconds")
    for percentile, value in percentiles.items():
        print(f"{percentile}% percentile latency: {value:.4f} seconds")
    _write(
        options.output_json,
        {"avg_latency": mean, "latencies": latencies, "percentiles": percentiles},
    )
    return 0


def _opened(argv: Sequence[str], parser: FlagParser) -> tuple[LLM, argparse.Namespace]:
    loaded = load(argv, default_model=NAMES[0], parser=parser)
    options = loaded.arguments
    _check(options, loaded.engine.max_model_len)
    log.setup("bench")
    log_notes(loaded)
    return LLM.of(served(loaded, loaded, parser)), options


def _check(options: argparse.Namespace, max_model_len: int | None) -> None:
    is_random = getattr(options, "dataset_name", "random") == "random"
    if hasattr(options, "dataset_name"):
        check_dataset(options)
    total = (options.input_len or 128) + (options.output_len or 128)
    if is_random and max_model_len and total > max_model_len:
        raise ConfigError(
            f"--input-len and --output-len are {total} tokens together, --max-model-len is "
            f"{max_model_len}: lower the first two, or raise --max-model-len"
        )
    if options.output_json and not Path(options.output_json).parent.is_dir():
        raise ConfigError(
            f"--output-json is {options.output_json}, whose folder does not exist: create it"
        )


def _requests(llm: LLM, options: argparse.Namespace) -> list[BenchRequest]:
    shape = Shape(
        options.num_prompts,
        options.input_len or 128,
        options.output_len or 128,
        options.random_range_ratio,
    )
    if options.dataset_name == "random":
        return token_requests(shape, _vocabulary(llm))
    tokenizer = llm.get_tokenizer()

    async def count(text: str) -> int:
        return len(tokenizer.encode_now(text, False))

    turns = read_sharegpt(options.dataset_path)
    return asyncio.run(sharegpt_requests(turns, shape, options.output_len, count))


def _vocabulary(llm: LLM) -> list[int]:
    return sorted(set(llm.get_tokenizer().encode_now(" ".join(WORDS), False)))


def _prompt(request: BenchRequest) -> str | dict[str, list[int]]:
    if isinstance(request.prompt, str):
        return request.prompt
    return {"prompt_token_ids": request.prompt}


def _params(output_len: int, n: int) -> SamplingParams:
    """Parameters for exactly `output_len` tokens, sampled as in vLLM's commands."""
    return SamplingParams(
        n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=output_len, detokenize=False
    )


def _write(path: str | None, results: dict[str, object]) -> None:
    if not path:
        return
    try:
        Path(path).write_text(json.dumps(results, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
