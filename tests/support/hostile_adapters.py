"""Hostile LoRA adapters: PEFT folders with one hostile property each."""

import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPONENTIAL = "(([a-z0-9_.]+)+)+!"
"""Pattern that takes Python's `re` exponential time."""
FIELDS = (
    *("target_modules", "target_parameters", "rank_pattern", "alpha_pattern"),
    *("exclude_modules", "layers_pattern"),
)
LARGE_WEIGHT = 3e4
"""A value of all weights that the server accepts, although products of the layers overflow
float16."""
BESIDE = (
    *("embed_tokens.weight", "embed_tokens.base_layer.weight", "norm.weight"),
    *("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.base_layer.weight"),
)
"""Tensors that PEFT may save beside an adapter."""


class Link(NamedTuple):
    """A symbolic link."""

    target: str


class Pipe(NamedTuple):
    """A named pipe that nobody writes to."""


Files = Mapping[str, bytes | Link | Pipe]
"""Files of a folder, by name."""


def write_files(folder: Path, files: Files) -> Path:
    """Write the files to a new folder."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, Link):
            (folder / name).symlink_to(content.target)
        elif isinstance(content, Pipe):
            os.mkfifo(folder / name)
        else:
            (folder / name).write_bytes(content)
    return folder


def write_hostile(folder: Path, valid: Path, seed: int) -> str:
    """Write one hostile adapter, and return its name. Equal seeds write equal adapters. `valid`: an
    adapter that the server accepts."""
    made = list(_forms(valid, seed))
    name, files = random.Random(seed).choice(made)
    write_files(folder, files())
    return name


def hostile_adapters(valid: Path, seed: int = 0) -> Iterator[tuple[str, Files]]:
    """All hostile adapters of a seed, with their names. `valid` as in write_hostile."""
    for name, files in _forms(valid, seed):
        yield name, files()


def _forms(valid: Path, seed: int) -> Iterator[tuple[str, Callable[[], Files]]]:
    """Names of the adapters, and functions that make their files."""
    rng = random.Random(seed)
    config = json.loads((valid / CONFIG).read_bytes())
    whole = {name: (valid / name).read_bytes() for name in (CONFIG, WEIGHTS)}

    def configured(fields: Mapping[str, Any]) -> Files:
        return {**whole, CONFIG: json.dumps({**config, **fields}).encode()}

    def weighted(data: bytes | Callable[[], bytes]) -> Files:
        return {**whole, WEIGHTS: data if isinstance(data, bytes) else data()}

    for name, fields in _configs(config, rng):
        yield name, partial(configured, fields)
    for name, text in _texts(config):
        yield name, partial(dict, {**whole, CONFIG: text})
    for name, data in _weights(whole[WEIGHTS], rng):
        yield name, partial(weighted, data)
    for file in (CONFIG, WEIGHTS):
        for target in (
            str(valid / file),
            "/etc/passwd",
            "/dev/zero",
            file,
            "nowhere",
            "/proc/self",
        ):
            linked = {**whole, file: Link(target)}
            yield f"{file} is a link to {Path(target).name}", partial(dict, linked)
        yield f"{file} is a pipe", partial(dict, {**whole, file: Pipe()})


def _configs(config: Mapping[str, Any], rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    rank = config["r"]
    slow = rf"(?:.|_)*o[a-z0-9_.]{{{rng.randint(900, 1000)}}}.*"
    expressions = {
        "exponential": EXPONENTIAL,
        "nested": "(?:" * 1000 + "a*" + ")*" * 1000,
        "a repetition of": "((a{10}){10}){100}",
        "a large": "a{1000}" * 500,
        "a long": "q_proj|" * 100_000,
        "a slow": slow,
        "a broken": "(" * rng.randint(1, 50),
        "a surrogate in": "\ud800",
    }
    for name, text in expressions.items():
        yield f"{name} expression in target_modules", {"target_modules": text}
        yield f"{name} expression in rank_pattern", {"rank_pattern": {text: rank}}
        yield f"{name} expression in alpha_pattern", {"alpha_pattern": {text: 8}}
    yield "200000 equal target_modules", {"target_modules": ["q_proj"] * 200_000}
    yield "100000 target_modules", {"target_modules": [f"a{i}" for i in range(100_000)]}
    yield "50000 target_modules", {"target_modules": [f"a{i}" for i in range(50_000)]}
    for field in ("rank_pattern", "alpha_pattern"):
        yield f"100000 keys in {field}", {field: {f"a{i}": 4 for i in range(100_000)}}
        yield f"4000 keys in {field}", {field: {f"layers.{i}.q_proj": rank for i in range(4000)}}
        slow_keys = {slow.replace("o", chr(97 + i)) + str(i): rank for i in range(26)}
        yield f"slow keys in {field}", {field: slow_keys}
    for field in FIELDS:
        yield f"a list of lists in {field}", {field: [[]] * 300_000}
        yield f"a text of 2 MB in {field}", {field: "a" * 2_000_000}
        yield f"an object in {field}", {field: {"a": {}}}
        yield f"a number in {field}", {field: rng.randint(1, 9)}
    for number in (
        1e30,
        -1e30,
        1e308,
        10**30,
        10**400,
        float("nan"),
        float("inf"),
        "8",
        None,
        True,
    ):
        yield f"lora_alpha {str(number)[:9]}", {"lora_alpha": number}
        yield f"alpha_pattern of {str(number)[:9]}", {"alpha_pattern": {".*": number}}
    for count in (0, -1, 2**31, 2**63, 10**30, 10**400, 1.5, float("nan"), "4", [4]):
        yield f"r {str(count)[:9]}", {"r": count}
        yield f"rank_pattern of {str(count)[:9]}", {"rank_pattern": {".*": count}}
    yield "init_lora_weights as a list", {"init_lora_weights": [[]]}
    yield "peft_type as an object", {"peft_type": {"a": ["b"] * 100_000}}
    yield "bias as a list", {"bias": ["none"] * 100_000}
    yield "modules_to_save of 100000", {"modules_to_save": ["a"] * 100_000}
    yield "100000 unknown fields", {f"field{i}": 1 for i in range(100_000)}


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    plain = json.dumps(config).encode()
    yield "a config that is nested deeply", b'{"a":' * 300_000
    yield "a config of lists", b"[" * 1_000_000
    yield "a config of 4 MB", plain + b" " * 4_000_000
    yield "an empty config", b""
    yield "a config that is a list", b"[]"
    yield "a config with bytes that are no text", b'{"a": "\xff"}'
    yield "a config with a number of 100000 digits", b'{"r": ' + b"9" * 100_000 + b"}"
    yield (
        "a config with the alpha 1e999",
        plain.replace(b'"lora_alpha": 8.0', b'"lora_alpha": 1e999'),
    )
    yield "a config with a field twice", plain[:-1] + b', "r": 4, "r": 9}'


def _weights(
    weights: bytes, rng: random.Random
) -> Iterator[tuple[str, bytes | Callable[[], bytes]]]:
    length = int.from_bytes(weights[:8], "little")
    header: dict[str, Any] = json.loads(weights[8 : 8 + length])
    data = weights[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    begin, end = header[name]["data_offsets"]

    def written(changed: object, body: bytes) -> bytes:
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + body

    def file(changed: object, body: bytes = data) -> Callable[[], bytes]:
        return partial(written, changed, body)

    def with_entry(**changes: Any) -> Callable[[], bytes]:
        return file({**header, name: {**header[name], **changes}})

    place = rng.randrange(begin, end, 4)
    for value in (float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e38):
        changed = data[:place] + struct.pack("<f", value) + data[place + 4 :]
        yield f"a weight {value}", file(header, changed)
    # The products of the layers exceed float16.
    yield "large weights", file(header, struct.pack("<f", LARGE_WEIGHT) * (len(data) // 4))
    prefix = name[: name.index("layers.")]
    for beside in BESIDE:
        for sizes in ((320, 64), (64, 64), (64,), (0, 4)):
            offsets = [len(data), len(data) + 4 * math.prod(sizes)]
            entry = {"dtype": "F32", "shape": sizes, "data_offsets": offsets}
            for value in (0.0, float("nan")):
                body = data + struct.pack("<f", value) * math.prod(sizes)
                yield (
                    f"{beside} of {sizes} with {value} beside",
                    file({**header, prefix + beside: entry}, body),
                )
    halves = {key: {**header[key], "dtype": "BF16"} for key in names}
    for key in names:
        first, last = header[key]["data_offsets"]
        halves[key]["data_offsets"] = [first // 2, last // 2]
    top_halves = bytearray(data[: len(data) // 2])
    yield "weights in bfloat16 that are random bytes", file(halves, bytes(top_halves))
    top_halves[place // 2 : place // 2 + 2] = b"\xc0\x7f"
    yield "a weight in bfloat16 that is no number", file(halves, bytes(top_halves))
    for size in (0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1):
        yield f"a header of {size} bytes", size.to_bytes(8, "little") + weights[8:]
    again = json.dumps({name: header[name]})[:-1].encode() + b", " + weights[9 : 8 + length]
    yield "a tensor twice", len(again).to_bytes(8, "little") + again + data
    yield "a cut file", weights[: rng.randrange(len(weights))]
    yield "bytes behind the tensors", weights + b"\0" * 100
    yield "an empty file of weights", b""
    yield "a header that is a list", file([header])
    yield "no tensors", file({}, b"")
    yield "a header that is nested deeply", (300_000).to_bytes(8, "little") + b"[" * 300_000
    yield "metadata of 10 MB", file({**header, "__metadata__": {"a": "b" * 10_000_000}})
    yield "metadata that is a list", file({**header, "__metadata__": [1]})
    for shape in ([-1, -4], [2**62, 2**62], [1] * 1000, [], ["4"], [4.5], [10**30], None, [0, 0]):
        yield f"the shape {str(shape)[:12]}", with_entry(shape=shape)
    for offsets in ([-8, 0], [0, 0], [end, begin], [begin, end + 8], [begin], [2**70, 2**71], [0]):
        yield f"the offsets {offsets}", with_entry(data_offsets=offsets)
    for dtype in ("I64", "F8_E4M3", "", "X" * 1_000_000, 4, None):
        yield f"the dtype {str(dtype)[:9]!r}", with_entry(dtype=dtype)
    others = {key: entry for key, entry in header.items() if key != name}
    for other in ("a" * 1_000_000, "a." * 300_000, "\ud800", "", "\0", "../../a", name.upper()):
        yield (
            f"a tensor {other[:9]!r} instead of another one",
            file({**others, other: header[name]}),
        )
    yield (
        "100000 empty tensors",
        file(
            {
                f"a{i}": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
                for i in range(100_000)
            },
            b"",
        ),
    )
    shuffled = bytearray(weights)
    for _ in range(rng.randint(1, 20)):
        shuffled[rng.randrange(8 + length)] = rng.randrange(256)
    yield "random bytes in the header", bytes(shuffled)
