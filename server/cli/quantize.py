"""`gaudiserve quantize`: a checkpoint with quantized weights, made by llmcompressor, which vLLM and
transformers read too."""

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config.checkpoint.safetensors_files import weight_files
from config.errors import ConfigError
from config.loading.env import is_installed
from config.loading.parser import Parser, number

if TYPE_CHECKING:
    from server.offline.perplexity import Reading

LIBRARY = "llmcompressor"


class Target(NamedTuple):
    """A value of --to."""

    scheme: str
    """As compressed-tensors names it."""
    modifier: str
    """llmcompressor's class."""
    has_groups: bool
    text: str

    @property
    def needs_data(self) -> bool:
        """Whether the weights depend on what the layers get as inputs."""
        return self.modifier != PLAIN


PLAIN = "QuantizationModifier"
TARGETS = {
    "fp8": Target("FP8_DYNAMIC", PLAIN, False, "8 bits (e4m3), a scale per output"),
    "int8": Target("W8A16", PLAIN, True, "8 bits, rounded"),
    "int4": Target("W4A16_ASYM", PLAIN, True, "4 bits, rounded"),
    "awq": Target("W4A16_ASYM", "AWQModifier", True, "4 bits, inputs rescaled (needs --data)"),
    "gptq": Target("W4A16_ASYM", "GPTQModifier", True, "4 bits, errors made up for (needs --data)"),
}
IGNORED = ("lm_head", r"re:.*\.(gate|router)$", r"re:.*shared_expert_gate$")
"""Layers that keep their weights: the head, and routers of experts."""
MAX_GROUP = 128
CONFIG, WEIGHTS = "config.json", (".safetensors", ".safetensors.index.json")


def quantize_parser() -> Parser:
    """The flags of the command."""
    parser = Parser(
        prog="gaudiserve quantize",
        description="Write a checkpoint with quantized weights, in the format compressed-tensors, "
        "which gaudiserve, vLLM and transformers read, and compare its perplexity with that of the "
        f"original. Needs {LIBRARY}: pip install 'gaudiserve[cpu,quantize]', in an environment of "
        "its own.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id, or demo")
    kinds = "; ".join(f"{name}: {target.text}" for name, target in TARGETS.items())
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help=kinds)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="new or empty folder"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='texts like those the model will get, for awq and gptq: .jsonl with {"text": ...} or '
        '{"messages": [...]} in each line, or a text file with an empty line between texts',
    )
    parser.add_argument(
        "--max-samples",
        type=number(int, minimum=1),
        default=128,
        metavar="N",
        help="texts of --data to use [128]",
    )
    parser.add_argument(
        "--max-length",
        type=number(int, minimum=8),
        default=2048,
        metavar="N",
        help="tokens of a text to use [2048]",
    )
    parser.add_argument(
        "--group-size",
        type=number(int, minimum=8),
        metavar="N",
        help="inputs that share a scale, but for fp8; without it the largest power of two up to "
        f"{MAX_GROUP} that divides all layers",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text for the perplexity; without it 1,700 tokens of an own one",
    )
    parser.add_argument(
        "--skip-perplexity", action="store_true", help="do not compare; saves two loads"
    )
    return parser


def main(argv: list[str]) -> int:
    """Quantize, compare and print; returns 0. Raises ConfigError."""
    options = quantize_parser().parse_all(argv)
    target = TARGETS[options.to]
    _check_options(options, target)
    from config.checkpoint.resolve import resolve

    folder = resolve(options.model)
    samples = list(islice(texts(options.data), options.max_samples)) if options.data else []
    if options.data and not samples:
        raise ConfigError(f"--data {options.data} has no text")
    text = options.text.read_text(encoding="utf-8") if options.text else None
    run = partial(_in_own_process, compress, folder, options.output, target, samples)
    if options.skip_perplexity:
        run(options.group_size, options.max_length)
    else:
        before = _in_own_process(predictions, folder, text)
        run(options.group_size, options.max_length)
        after = _in_own_process(predictions, str(options.output), text)
        print(table(options.to, folder, str(options.output), before, after))
    print(f"Serve it: gaudiserve serve {options.output}")
    return 0


def _check_options(options: Any, target: Target) -> None:
    output: Path = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists and is no empty folder")
    for file in (options.data, options.text):
        if file is not None and not file.is_file():
            raise ConfigError(f"{file} is no file")
    if target.needs_data and options.data is None:
        raise ConfigError(f"--to {options.to} needs --data, a file with texts")
    if options.group_size is not None and not target.has_groups:
        raise ConfigError(
            f"--group-size is {options.group_size}, and --to {options.to} has a scale per output"
        )
    if not is_installed(LIBRARY):
        raise ConfigError(
            f"{LIBRARY} is not installed here: pip install 'gaudiserve[cpu,quantize]' in an "
            "environment of its own"
        )


def texts(file: Path) -> Iterator[str | list[dict[str, str]]]:
    """The texts in `file`, or the messages of chats. ConfigError for a line that is neither."""
    content = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        yield from (part.strip() for part in content.split("\n\n") if part.strip())
        return
    for index, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {index} of {file} is no JSON: {error}") from None
        found = None
        if isinstance(entry, dict):
            found = entry.get("text", entry.get("messages"))
        if not found or not isinstance(found, str | list):
            raise ConfigError(f'line {index} of {file} has neither "text" nor "messages"')
        yield found


def _in_own_process(function: Any, *arguments: Any) -> Any:
    """Its memory is free afterwards."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compress(
    folder: str,
    output: Path,
    target: Target,
    samples: Sequence[str | list[dict[str, str]]],
    group_size: int | None,
    max_length: int,
) -> None:
    """Write the quantized checkpoint of `folder` to `output`. Raises ConfigError."""
    # Only now: the environment of the server need not have them.
    import datasets
    import llmcompressor
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers import awq, quantization
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scheme = preset_name_to_scheme(target.scheme, ["Linear"])
    if target.has_groups:
        sizes = {
            name: module.in_features
            for name, module in model.named_modules()
            if type(module).__name__ == "Linear" and name != IGNORED[0]
        }
        scheme.weights.group_size = group_size or _common_group(sizes.values())
        _check_groups(scheme.weights.group_size, sizes)
    module = awq if target.modifier == "AWQModifier" else quantization
    kind = getattr(module, target.modifier)
    recipe = kind(config_groups={"weights": scheme}, ignore=list(IGNORED))
    if target.needs_data:
        if not torch.accelerator.is_available():
            # Release 0.14 pins memory for an accelerator that is not there.
            IntermediatesCache.pin_memory = lambda *_: None
        tokens = [_tokens(tokenizer, one, max_length) for one in samples]
        data = datasets.Dataset.from_dict({"input_ids": [one for one in tokens if one]})
        llmcompressor.oneshot(
            model=model,
            recipe=recipe,
            dataset=data,
            max_seq_length=max_length,
            num_calibration_samples=len(data),
        )
    else:
        llmcompressor.oneshot(model=model, recipe=recipe)
    # It refuses to write some that are published; the file of the original is copied.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # theirs
    model.save_pretrained(output, save_compressed=True)
    _copy_other_files(Path(folder), output)


def _tokens(tokenizer: Any, sample: str | list[dict[str, str]], max_length: int) -> list[int]:
    if isinstance(sample, str):
        return list(tokenizer(sample, truncation=True, max_length=max_length)["input_ids"])
    found = tokenizer.apply_chat_template(sample, tokenize=True, return_dict=True)["input_ids"]
    return list(found)[:max_length]


def _common_group(sizes: Any) -> int:
    """The largest power of two up to MAX_GROUP that divides all of `sizes`."""
    group = MAX_GROUP
    while any(size % group for size in sizes):
        group //= 2
    return group


def _check_groups(group_size: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % group_size:
            raise ConfigError(f"--group-size {group_size} does not divide the {size} of {name}")


def _copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template and so on, as they are."""
    for file in source.iterdir():
        if file.is_file() and file.name != CONFIG and not file.name.endswith(WEIGHTS):
            shutil.copy(file, target / file.name)


def predictions(folder: str, text: str | None) -> "Reading":
    """Of the model in `folder` for `text`, in bfloat16."""
    from server.offline.llm import LLM
    from server.offline.perplexity import TEXT, WINDOW, read

    with LLM(folder, dtype="bfloat16", max_model_len=WINDOW + 1) as llm:
        return read(llm, TEXT.read_text(encoding="utf-8") if text is None else text)


def table(kind: str, source: str, output: str, before: "Reading", after: "Reading") -> str:
    """Both models' size and perplexity."""
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
