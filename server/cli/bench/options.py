"""Flags of `gaudiserve bench serve` and their validation."""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from config.errors import ConfigError
from config.json_text import Json, json_problem, parse_json
from config.loading.parser import FlagParser, number
from config.loading.vllm_flags import absence
from server.cli.bench.openai import PATHS
from server.cli.bench.report import METRICS, PERCENTILES

DESCRIPTION = """\
Measure an OpenAI-compatible server under load: time to first token, inter-token latency, time per
output token, end-to-end latency, throughput. Closed loop: --max-concurrency requests are always
running. Open loop: --request-rate requests start per second (a Poisson process), whether or not
earlier requests have finished. The flags are those of `vllm bench serve`."""

BACKENDS = {"openai": "completions", "vllm": "completions", "openai-chat": "chat"}
"""Name of a vLLM backend -> its endpoint."""

SAMPLING = (
    *("top-p", "top-k", "min-p", "frequency-penalty", "presence-penalty"),
    *("repetition-penalty", "logprobs"),
)

_COUNTED = "the server's /tokenize counts the tokens"
_WITHOUT_EFFECT = {"tokenizer": "NAME", "tokenizer-mode": "MODE"}
_SWITCHES_WITHOUT_EFFECT = ("trust-remote-code", "skip-tokenizer-init")

_ABSENT = (
    (
        "save-result save-detailed append-result result-dir result-filename label metadata",
        "--json FILE writes the report with all settings",
    ),
    ("goodput plot-* timeline-itl-thresholds", "it can be computed from the report of --json"),
    ("ramp-up-* self-timed probe-request-rate", "--request-rate is constant"),
    ("profile", "the routes of --enable-dev-endpoints start and stop a trace"),
    ("use-beam-search", '--extra-body adds other fields to requests, such as {"n": 2}'),
    ("lora-modules lora-assignment", "--model names what is loaded"),
    (
        "custom-* hf-* sonnet-* burstgpt-* spec-bench-* prefix-repetition-* blazedit-* asr-* "
        "random-mm-* random-batch-size disable-shuffle oversample stream enable-multimodal-*",
        "the data sets are random and sharegpt",
    ),
    ("ready-check-timeout-sec", "wait until /ready answers 200"),
    ("insecure", "the certificate of the server is always checked"),
    ("chat-template-kwargs", "--extra-body sends them"),
    ("request-id-prefix", "the server names the requests"),
)
"""(flags of `vllm bench serve` that do not exist here, replacement or reason)."""


def bench_parser() -> FlagParser:
    """Parser with all flags of the command."""
    parser = FlagParser(
        prog="gaudiserve bench serve",
        usage="gaudiserve bench serve [flags]",
        description=DESCRIPTION,
    )
    parser.examples = (
        "gaudiserve bench serve --num-prompts 100 --max-concurrency 8",
        "gaudiserve bench serve --random-input-len 1024 --random-output-len 128 --request-rate 4",
        "gaudiserve bench serve --base-url http://host:8000 --json report.json",
    )
    parser.absence = partial(absence, rows=_ABSENT)
    add = parser.add_argument_group("Server").add_argument
    add("--host", default="127.0.0.1", help="Host of the server [%(default)s]")
    add(
        "--port",
        type=number(int, minimum=0, maximum=65535),
        default=8000,
        metavar="N",
        help="Port of the server [%(default)s]",
    )
    add(
        "--base-url",
        metavar="URL",
        help="URL of the server instead of --host and --port, with or without /v1",
    )
    add("--backend", choices=BACKENDS, default="openai", help="Kind of API [%(default)s]")
    add(
        "--endpoint",
        choices=(*PATHS, *PATHS.values()),
        help="Route of the requests [the route of --backend]",
    )
    add("--model", metavar="NAME", help="Name of the model [the first of /v1/models]")
    add(
        "--served-model-name",
        metavar="NAME",
        help="Name of the model in the requests, if it differs from --model",
    )
    add("--api-key", metavar="KEY", help="API key [the variable OPENAI_API_KEY]")
    add("--header", nargs="+", default=[], metavar="KEY=VALUE", help="Headers of each request")
    add(
        "--timeout",
        type=number(above=0),
        default=600.0,
        metavar="SECONDS",
        help="Time limit of a request [%(default)g]",
    )

    add = parser.add_argument_group("Load").add_argument
    add(
        "--num-prompts",
        type=number(int, minimum=1),
        default=32,
        metavar="N",
        help="Number of requests [%(default)s]",
    )
    add(
        "--max-concurrency",
        type=number(int, minimum=1),
        metavar="N",
        help="Maximum concurrent requests [8; with --request-rate no limit]",
    )
    add(
        "--request-rate",
        type=number(above=0, maximum=math.inf),
        metavar="PER_SECOND",
        help="Requests per second (open loop); inf sends all at once [closed loop]",
    )
    add(
        "--burstiness",
        type=number(above=0),
        default=1.0,
        metavar="X",
        help="Open loop: requests arrive in bursts below 1, evenly above 1 [%(default)g]",
    )
    add(
        "--num-warmups",
        type=number(int, minimum=0),
        default=2,
        metavar="N",
        help="Warm-up requests, not counted [%(default)s]",
    )
    add(
        "--seed",
        type=number(int),
        default=0,
        metavar="N",
        help="Random seed of prompts and arrivals [%(default)s]",
    )

    add = parser.add_argument_group("Prompts, in tokens").add_argument
    add(
        "--dataset-name",
        choices=("random", "sharegpt"),
        default="random",
        help="Random tokens, or conversations of --dataset-path [%(default)s]",
    )
    add("--dataset-path", metavar="FILE", help="JSON file of conversations, for sharegpt")
    add(
        "--sharegpt-output-len",
        type=number(int, minimum=1),
        metavar="N",
        help="Tokens of an answer, for sharegpt [the length of the conversation's answer]",
    )
    for end in ("input", "output"):
        add(
            *(f"--random-{end}-len", f"--{end}-len"),
            type=number(int, minimum=1),
            metavar="N",
            help="Tokens of a prompt [128]"
            if end == "input"
            else "Tokens of an answer [128; with sharegpt the length of the conversation's answer]",
        )
    add(
        "--random-range-ratio",
        type=number(minimum=0, maximum=1),
        default=0.0,
        metavar="R",
        help="Draw the lengths from (1 - R) to (1 + R) times these lengths [%(default)g]",
    )
    add(
        *("--shared-prefix-len", "--random-prefix-len"),
        type=number(int, minimum=0),
        default=0,
        metavar="N",
        help="Tokens of a common prefix, in addition to --random-input-len [%(default)s]",
    )
    add(
        "--prompt-kind",
        choices=("auto", "tokens", "text"),
        default="auto",
        help="tokens: send token ids, to completions only; text: send text; auto: token ids if the "
        "server has /tokenize [auto]",
    )

    add = parser.add_argument_group("Requests, other fields").add_argument
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="Generate the full output length, past end tokens [on for random]",
    )
    add(
        "--no-stream-usage",
        action="store_true",
        help="Send no stream_options, for servers that reject it; each chunk counts as a token",
    )
    add(
        "--temperature",
        type=number(minimum=0),
        default=0.0,
        metavar="T",
        help="Sampling temperature [%(default)g]",
    )
    for name in SAMPLING:
        kind, metavar = (int, "N") if name in ("top-k", "logprobs") else (float, "X")
        add(f"--{name}", type=number(kind), metavar=metavar, help="[the server's default]")
    add(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="Fields that are added to each request body",
    )

    add = parser.add_argument_group("Output").add_argument
    add(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="NAMES",
        help="Rows of the table [%(default)s]",
    )
    add(
        "--metric-percentiles",
        default=",".join(map(str, PERCENTILES)),
        metavar="N,N",
        help="Percentiles of each row [%(default)s]",
    )
    add("--json", metavar="FILE", help="Write the report as JSON; - for stdout")
    add("--quiet", "--disable-tqdm", action="store_true", help="No progress bar")

    add = parser.add_argument_group(
        f"Flags of vLLM without effect, because {_COUNTED}"
    ).add_argument
    for name, metavar in _WITHOUT_EFFECT.items():
        add(f"--{name}", metavar=metavar)
    for name in _SWITCHES_WITHOUT_EFFECT:
        add(f"--{name}", action="store_true")
    return parser


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse, validate and decode the flags. Raises ConfigError."""
    options = bench_parser().parse_all(argv)
    _choose(options)
    _check(options)
    return options


def _choose(options: argparse.Namespace) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    options.base_url = options.base_url or f"http://{host}:{options.port}"
    endpoint = BACKENDS[options.backend]
    if options.endpoint is not None:
        endpoint = {path: name for name, path in PATHS.items()}.get(
            options.endpoint, options.endpoint
        )
        if options.backend == "openai-chat" and endpoint != "chat":
            raise ConfigError(
                f"--backend is openai-chat and --endpoint is {options.endpoint}: they contradict "
                "each other; leave one of them out"
            )
    options.endpoint = endpoint
    is_random = options.dataset_name == "random"
    if options.ignore_eos is None:
        options.ignore_eos = is_random
    if not is_random and options.sharegpt_output_len is None:
        options.sharegpt_output_len = options.random_output_len
    for name in ("random_input_len", "random_output_len"):
        if getattr(options, name) is None:
            setattr(options, name, 128)


def check_dataset(options: argparse.Namespace) -> None:
    """Raises ConfigError for --dataset-name sharegpt without --dataset-path, and for --dataset-path
    without sharegpt."""
    is_sharegpt = options.dataset_name == "sharegpt"
    if is_sharegpt and not options.dataset_path:
        raise ConfigError(
            "--dataset-name sharegpt needs --dataset-path FILE, a file of conversations"
        )
    if options.dataset_path and not is_sharegpt:
        raise ConfigError(
            f"--dataset-path is {options.dataset_path!r}, which needs --dataset-name sharegpt"
        )


def _check(options: argparse.Namespace) -> None:
    check_dataset(options)
    options.extra_body = _extra_body(options.extra_body)
    options.header = dict(_pair(word) for word in options.header)
    options.percentile_metrics = _names(options.percentile_metrics)
    options.metric_percentiles = _percentiles(options.metric_percentiles)
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(f"--json is {options.json!r}, whose folder does not exist: create it")
    if options.prompt_kind == "tokens" and options.endpoint == "chat":
        raise ConfigError(
            "--prompt-kind is tokens, and the chat endpoint accepts text only: use "
            "--prompt-kind text"
        )
    if options.prompt_kind == "tokens" and options.dataset_name == "sharegpt":
        raise ConfigError(
            "--prompt-kind is tokens, and sharegpt has texts only: use --prompt-kind text"
        )


def _extra_body(text: str) -> Json:
    try:
        body = parse_json(text, is_finite=True)
    except ValueError as error:
        raise ConfigError(
            f"--extra-body is {text!r}, which is not JSON: {json_problem(error)}"
        ) from None
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body is {text!r}, it must be a JSON object")
    return body


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in word.partition("="))
    if not (key and equals) or not (key + value).isprintable():
        raise ConfigError(f"--header is {word!r}, it must be KEY=VALUE")
    return key, value


def _names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    if not set(names) <= set(METRICS):
        raise ConfigError(
            f"--percentile-metrics is {text!r}, it must be some of {','.join(METRICS)}"
        )
    return names


def _percentiles(text: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= 100 for number in numbers):
        raise ConfigError(f"--metric-percentiles is {text!r}, it must be numbers from 0 to 100")
    return numbers
