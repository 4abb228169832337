"""`gaudiserve quantize`: quantize the weights of a checkpoint with llmcompressor, in a format that
vLLM and transformers also read, or convert an FP8 checkpoint for Gaudi 2."""

import importlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from config.checkpoint.resolve import resolve
from config.checkpoint.safetensors_files import weight_files
from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.env import is_installed
from config.loading.parser import FlagParser, number
from config.progress import ProgressLines
from config.version import install_command
from engine.process.child_process import die_with_parent
from server.cli.samples import Sample, read_samples
from server.offline.llm import LLM
from server.offline.perplexity import TEXT, WINDOW, Reading, read

LIBRARY = "llmcompressor"


class QuantizationTarget(NamedTuple):
    """A quantization scheme, selected by --to."""

    scheme: str
    """Name of the scheme in compressed-tensors."""
    modifier: str
    """Name of the modifier class in llmcompressor.modifiers."""
    has_groups: bool
    text: str
    keeps_activations: bool = False
    """Whether activations are not quantized, although the scheme quantizes them."""

    calibrated: str | None = None
    """Modifier class to use with samples, if `modifier` needs no samples."""

    keeps_last_layer: bool = False
    """Whether the last decoder layer is not quantized unless --all-layers is given."""

    converts: bool = False
    """Whether the command converts a checkpoint that is already quantized, without
    llmcompressor."""

    @property
    def needs_data(self) -> bool:
        """Whether the quantization needs calibration data (--data)."""
        return self.modifier != PLAIN

    def modifier_of(self, *, has_data: bool) -> str:
        return self.calibrated if has_data and self.calibrated else self.modifier


PLAIN, COMPENSATING = "quantization.QuantizationModifier", "quantization.GPTQModifier"
TARGETS = {
    "fp8": QuantizationTarget(
        "FP8_DYNAMIC",
        PLAIN,
        False,
        "8 bits (e4m3) with a scale per output, in all decoder layers except the last; with "
        "--data, later weights compensate for rounding errors",
        calibrated=COMPENSATING,
        keeps_last_layer=True,
    ),
    "fp8-weights": QuantizationTarget(
        "FP8_DYNAMIC",
        PLAIN,
        False,
        "8 bits (e4m3) in all layers; activations are not quantized",
        keeps_activations=True,
        calibrated=COMPENSATING,
    ),
    "fp8-gaudi2": QuantizationTarget(
        "",
        PLAIN,
        False,
        "halve the weights and double the scales of an FP8 checkpoint for Gaudi 2, whose largest "
        "FP8 value is 240",
        converts=True,
    ),
    "int8": QuantizationTarget("W8A16", PLAIN, True, "8 bits, rounded"),
    "int4": QuantizationTarget("W4A16_ASYM", PLAIN, True, "4 bits, rounded"),
    "awq": QuantizationTarget(
        "W4A16_ASYM", "awq.AWQModifier", True, "4 bits, inputs rescaled (needs --data)"
    ),
    "gptq": QuantizationTarget(
        "W4A16_ASYM",
        COMPENSATING,
        True,
        "4 bits, later weights compensate for rounding errors (needs --data)",
    ),
}


def quantize_parser() -> FlagParser:
    """Parser with the flags of the command."""
    parser = FlagParser(
        prog="gaudiserve quantize",
        usage="gaudiserve quantize MODEL --to KIND -o DIR [flags]",
        description="Write a checkpoint with quantized weights, in the format compressed-tensors, "
        "which gaudiserve, vLLM and transformers read, and compare its perplexity with that of the "
        f"original. Needs {LIBRARY}: {install_command('cpu,quantize')}, in a separate environment.",
    )
    parser.examples = (
        "gaudiserve quantize demo --to int8 -o demo-int8",
        "gaudiserve quantize /data/model --to fp8 -o model-fp8 --data samples.jsonl",
        "gaudiserve quantize /data/model --to gptq -o model-gptq --data samples.jsonl",
        "gaudiserve quantize /data/model-fp8 --to fp8-gaudi2 -o model-gaudi2",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="Model folder, .gguf file, Hugging Face id, or demo"
    )
    kinds = "; ".join(f"{name}: {target.text}" for name, target in TARGETS.items())
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, metavar="KIND", help=kinds)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="Output folder, new or empty",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="Samples of what users will send, for awq and gptq, optional for fp8. Each line of a "
        ".jsonl file is a string, or an object with `prompt`, `text` or `messages`; each line of "
        "another file is a text",
    )
    parser.add_argument(
        "--max-samples",
        type=number(int, minimum=1),
        default=128,
        metavar="N",
        help="Maximum samples, read from the start of --data [128]",
    )
    parser.add_argument(
        "--max-length",
        type=number(int, minimum=8),
        default=2048,
        metavar="N",
        help="Maximum tokens of a sample; the rest is not used [2048]",
    )
    parser.add_argument(
        "--group-size",
        type=number(int, minimum=8),
        metavar="N",
        help="Number of inputs that share a scale, not for fp8 [the largest power of two up to 128 "
        "that divides the inputs of all layers]",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="Do not quantize the layer with this path, such as model.layers.29.mlp.down_proj, or "
        "the layers that match a regular expression, such as re:.*layers\\.29\\..*; may be "
        "repeated; the head and routers are never quantized",
    )
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="With --to fp8, also quantize the last decoder layer, which loses the most accuracy",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="Text for the perplexity [a text of about 1,700 tokens in gaudiserve]",
    )
    parser.add_argument(
        "--skip-perplexity",
        action="store_true",
        help="Do not compare perplexities, which needs two loads",
    )
    return parser


def main(argv: list[str]) -> int:
    """Quantize, compare and print the result; returns 0. Raises ConfigError."""
    options = quantize_parser().parse_all(argv)
    target = TARGETS[options.to]
    _check_options(options, target)
    with ProgressLines(prefix="") as lines:
        folder = resolve(EngineConfig(options.model), report=lines.report)
    has_data = options.data is not None and (target.needs_data or target.calibrated is not None)
    samples = read_samples(options.data, options.max_samples) if has_data else []
    text = _text_in(options.text or TEXT)
    run = _in_own_process
    before = None if options.skip_perplexity else run(__name__, "predictions", folder, text)
    if target.converts:
        run("hpu.quantization.convert_fp8", "convert", folder, options.output)
    else:
        _compress(options, target, folder, samples, has_data=has_data)
    if before is not None:
        after = run(__name__, "predictions", str(options.output), text)
        print(table(options.to, folder, str(options.output), before, after))
    variable = "VLLM_HPU_CONVERT_TO_FP8UZ=false " if target.converts else ""
    print(f"Serve it: {variable}gaudiserve serve {options.output}")
    return 0


def _text_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise ConfigError(f"{file}: {reason}") from error


def _compress(
    options: Any, target: QuantizationTarget, folder: str, samples: list[Sample], *, has_data: bool
) -> None:
    _in_own_process(
        "hpu.quantization.compress",
        "compress",
        folder,
        options.output,
        target.scheme,
        target.modifier_of(has_data=has_data),
        samples,
        group_size=options.group_size,
        max_length=options.max_length,
        ignored=options.ignore,
        keeps_activations=target.keeps_activations,
        keeps_last_layer=target.keeps_last_layer and not options.all_layers,
    )


def _check_options(options: Any, target: QuantizationTarget) -> None:
    output: Path = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            f"--output {output} exists and is not an empty folder: name another folder"
        )
    for file in (options.data, options.text):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} is not a file")
    if target.converts:
        for name in ("data", "group_size", "ignore", "all_layers"):
            flag = f"--{name.replace('_', '-')}"
            if getattr(options, name):
                raise ConfigError(
                    f"{flag} is set, and --to {options.to} converts a quantized checkpoint as it "
                    f"is: leave {flag} out"
                )
        return
    if target.needs_data and options.data is None:
        raise ConfigError(f"--to {options.to} needs --data, a file with texts")
    if options.group_size is not None and not target.has_groups:
        raise ConfigError(
            f"--group-size is {options.group_size}, and --to {options.to} has a scale per "
            "output: leave --group-size out"
        )
    if options.all_layers and not target.keeps_last_layer:
        raise ConfigError(
            f"--all-layers is set, and --to {options.to} quantizes all layers anyway: leave "
            "--all-layers out"
        )
    if not is_installed(LIBRARY):
        raise ConfigError(
            f"{LIBRARY} is not installed here: {install_command('cpu,quantize')}, in a "
            "separate environment"
        )


def _in_own_process(module: str, function: str, *arguments: Any, **named: Any) -> Any:
    """Call `function` in a new process, so that its memory is freed and its modules are not
    imported here."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=die_with_parent
    ) as pool:
        return pool.submit(_call, module, function, *arguments, **named).result()


def _call(module: str, function: str, *arguments: Any, **named: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments, **named)


def predictions(folder: str, text: str) -> Reading:
    """Predictions of the model in `folder` for `text`, in bfloat16."""
    with LLM(folder, dtype="bfloat16", max_model_len=WINDOW + 1) as llm:
        return read(llm, text)


def table(kind: str, source: str, output: str, before: Reading, after: Reading) -> str:
    """Table with size and perplexity of both models."""
    rows = [("", "GB", "perplexity", "ratio", "same likeliest token")]
    for name, folder, reading in (("before", source, before), (kind, output, after)):
        size = sum(file.stat().st_size for file in weight_files(Path(folder)))
        ratio = reading.perplexity / before.perplexity
        shared = f"{reading.agreement(before):.1%}"
        rows.append(
            (name, f"{size / 1e9:.3f}", f"{reading.perplexity:.3f}", f"{ratio:.4f}", shared)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
