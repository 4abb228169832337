"""`gaudiserve calibrate`: flags, and the steps of a calibration."""

import argparse
import contextlib
import logging
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config import log, progress
from config.errors import CheckpointError, ConfigError, GaudiserveError, counted
from config.loading.env import is_installed
from config.loading.parser import FlagParser, number
from config.model.kv_cache_dtype import AUTO, FP8_INC
from config.model.quantization.inc import INC, MODULE, PACKAGE, VARIABLE
from config.params.sampling import SamplingParams
from server.cli.samples import Sample, read_samples
from server.offline.calibration import finish_measures, keep_least_losing, write_configs
from server.offline.llm import LLM

DEFAULT_SAMPLES = 512
DEFAULT_ANSWER = 32
CHECKED_SAMPLES = 4
"""Number of prompts that the quantized model answers as a check."""

DESCRIPTION = """\
Prepare a model for FP8 on Gaudi with Intel Neural Compressor (pip install neural-compressor-pt).

The model answers your samples in bfloat16 while the largest inputs of each matrix multiplication
are measured. Then the model is quantized once with scales computed from these inputs. DIR gets the
measurements, the scales, maxabs_measure.json and maxabs_quant.json, the file to serve with.
"""
EPILOG = """\
FILE holds samples of what users will send. Each line of a .jsonl file is a string, or an object
with `prompt`, `text` or `messages` (a conversation, rendered with the chat template). Each line of
any other file is a text. A few hundred samples are enough.
"""


def calibrate_parser() -> FlagParser:
    parser = FlagParser(
        prog="gaudiserve calibrate",
        usage="gaudiserve calibrate MODEL --data FILE -o DIR [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        is_raw=True,
    )
    parser.examples = (
        "gaudiserve calibrate meta-llama/Llama-3.1-8B-Instruct --data samples.jsonl -o llama-fp8",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Model folder or Hugging Face id, in bfloat16 or float16")
    add("--data", required=True, metavar="FILE", help="File of samples")
    add(
        "-o", "--output", required=True, metavar="DIR", help="Folder for all files that are written"
    )
    add(
        "-tp",
        "--tensor-parallel-size",
        type=number(int, minimum=1),
        default=1,
        metavar="N",
        help="Cards that hold the model; the result can be served on this number of cards and its "
        "divisors [1]",
    )
    add(
        "--max-samples",
        type=number(int, minimum=1),
        default=DEFAULT_SAMPLES,
        metavar="N",
        help=f"Maximum samples, read from the start of FILE [{DEFAULT_SAMPLES}]",
    )
    add(
        "--max-tokens",
        type=number(int, minimum=2),
        default=DEFAULT_ANSWER,
        metavar="N",
        help=f"Tokens of each answer, since decodes are measured too [{DEFAULT_ANSWER}]",
    )
    add(
        "--max-model-len",
        type=number(int, minimum=2),
        metavar="N",
        help="Maximum tokens of a sample with its answer; a longer sample is an error [the model's "
        "limit]",
    )
    add(
        "--kv-cache-dtype",
        choices=(FP8_INC, AUTO),
        default=AUTO,
        help=f"{FP8_INC}: attention and KV cache in FP8; auto: KV cache in bfloat16 [auto]",
    )
    add(
        "--all-modules",
        action="store_true",
        help="Quantize all linear layers and attention; without this flag, only the gate and up "
        "projections of MLPs, and the experts, of all but the last layer, which cost a small model "
        "the least accuracy",
    )
    add(
        "--skip",
        action="append",
        default=[],
        metavar="NAME",
        help="Do not quantize modules with NAME in their path, such as lm_head; may be repeated",
    )
    add(
        "--scale-method",
        default="maxabs_hw",
        metavar="NAME",
        help="The compressor's scale_method [maxabs_hw: scales without extra cost on the card]",
    )
    add(
        "--device",
        choices=("auto", "hpu", "hpu-emulator"),
        default="auto",
        help="Device to run on; hpu-emulator needs no card, but is slow and only for tests [auto]",
    )
    return parser


def main(argv: list[str]) -> int:
    """Measure, repair, unify and quantize; the last output line shows the command to serve. Raises
    ConfigError and CheckpointError."""
    args = calibrate_parser().parse_all(argv)
    if not is_installed(MODULE):
        raise ConfigError(f"Intel Neural Compressor is not installed here: pip install {PACKAGE}")
    log.setup("calibrate", log.LogConfig("error"))
    logging.getLogger(progress.__name__).setLevel(logging.INFO)
    with _failures(args.output):
        return _calibrate(args)


def _calibrate(args: argparse.Namespace) -> int:
    samples = read_samples(Path(args.data), args.max_samples)
    folder, num_ranks = Path(args.output), args.tensor_parallel_size
    try:
        folder.mkdir(parents=True, exist_ok=True)
        measure_config, quantize_config = write_configs(
            folder,
            quantizes_cache=args.kv_cache_dtype == FP8_INC,
            skipped=args.skip,
            scale_method=args.scale_method,
        )
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    _say(f"1/3 measure: {counted(len(samples), 'sample')} on {counted(num_ranks, 'card')}")
    with _model(args, measure_config) as llm:
        _answer(llm, samples, args.max_tokens)
    _say("2/3 repair and unify the measurements")
    sizes = finish_measures(folder, num_ranks)
    if not args.all_modules:
        keep_least_losing(quantize_config, num_ranks, with_attention=args.kv_cache_dtype == FP8_INC)
    _say("3/3 quantize, and answer with the quantized model")
    with _model(args, quantize_config) as llm:
        _answer(llm, samples[:CHECKED_SAMPLES], args.max_tokens)
    _say(f"{folder} serves with {' or '.join(map(str, sizes))} cards:")
    flags = [args.model, "--quantization", INC, "--kv-cache-dtype", args.kv_cache_dtype]
    if num_ranks > 1:
        flags += ["--tensor-parallel-size", str(num_ranks)]
    if args.device != "auto":
        flags += ["--device", args.device]
    print(f"{VARIABLE}={shlex.quote(str(quantize_config))} gaudiserve serve {shlex.join(flags)}")
    return 0


def _model(args: argparse.Namespace, config: Path) -> LLM:
    """Load the model with a worker process per rank: INC keeps its measurements in module globals,
    and the Gaudi runtime uses a single card per process."""
    flags: dict[str, Any] = {
        "device": args.device,
        "quantization": INC,
        "quant_config": str(config),
        "kv_cache_dtype": args.kv_cache_dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "distributed_executor_backend": "mp",
        # No warm-up and no graphs: INC would measure their launches too.
        "warmup": "skip",
        "enforce_eager": True,
    }
    if args.max_model_len is not None:
        flags["max_model_len"] = args.max_model_len
    return LLM(args.model, **flags)


def _answer(llm: LLM, samples: list[Sample], max_tokens: int) -> None:
    # Without ignore_eos, an early end would leave few tokens to measure.
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    texts = [sample for sample in samples if isinstance(sample, str)]
    conversations = [sample for sample in samples if not isinstance(sample, str)]
    if texts:
        llm.generate(texts, params)
    if conversations:
        llm.chat(conversations, params)


@contextlib.contextmanager
def _failures(output: str) -> Iterator[None]:
    """Convert GaudiserveError and OSError to CheckpointError: the command prints one line and exits
    with 1."""
    try:
        yield
    except CheckpointError:
        raise
    except GaudiserveError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{output}: {error.strerror or error}") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
