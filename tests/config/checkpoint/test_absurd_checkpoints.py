"""Checkpoints with absurd numbers are refused in one sentence, with little time and memory, before
anything is allocated."""

import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from delays import least, machine_s
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from tiny_encoders import ENCODERS, make_pooling
from tiny_gguf import write_gguf
from tiny_models import FAMILIES, make_tiny

from config.checkpoint.facts import model_facts
from config.checkpoint.gguf_metadata import open_gguf
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.errors import ConfigError
from config.startup_checks import check_checkpoint
from server.text.tokenizer_files import read_text_files

ROOT = Path(__file__).parents[3]
MOST_S = 2.0
MOST_BYTES = 50 * 2**20
SPARSE_BYTES = 3 * 2**30
DEEP = b"[" * 200_000 + b"]" * 200_000

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@contextmanager
def _in_little_time_and_memory() -> Iterator[None]:
    process = psutil.Process()
    before, start = process.memory_info().rss, time.process_time()
    yield
    seconds = time.process_time() - start
    grown = process.memory_info().rss - before
    assert seconds < machine_s(MOST_S), f"it took {seconds:.1f} s"
    assert grown < MOST_BYTES, f"{grown / 2**20:.0f} MiB more than before"


def _open(model: str | Path, cache: Path) -> None:
    """Resolve and check a checkpoint, as `serve` does before it starts an engine."""
    path = resolve(EngineConfig(str(model), cache_dir=str(cache)), progress=False)
    check_checkpoint(EngineConfig(path), path)
    if (Path(path) / "tokenizer.json").exists():
        read_text_files(path, cache)


def _set(folder: Path, name: str = "config.json", **fields: Any) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **fields}))


def _rope(folder: Path, theta: float) -> None:
    # Both spellings, for both versions of transformers.
    _set(folder, rope_theta=theta, rope_parameters={"rope_type": "default", "rope_theta": theta})


def _write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


def _sparse(folder: Path, name: str, begin: bytes = b"") -> None:
    with (folder / name).open("wb") as file:
        file.write(begin)
        file.truncate(SPARSE_BYTES)


def _pipe(folder: Path, name: str) -> None:
    """Create a named pipe without a writer. A safetensors pipe replaces the real weights."""
    if name.endswith(".safetensors"):
        (folder / WEIGHTS).unlink()
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)


def _added(count: int, text: str = "x", first: int = 320) -> dict[str, Any]:
    """An added_tokens_decoder of `count` tokens."""
    return {str(first + number): {"content": f"{text}{number}"} for number in range(count)}


def _index(folder: Path, name: str) -> None:
    content = json.dumps({"weight_map": {"model.norm.weight": name}})
    (folder / "model.safetensors.index.json").write_text(content)


def _header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header entry of the embedding table in the safetensors file."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header["model.embed_tokens.weight"])
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])


def _moved(entry: dict[str, Any], by: int) -> None:
    entry["data_offsets"] = [place + by for place in entry["data_offsets"]]


def _deep_field(folder: Path) -> None:
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_bytes(text.encode() + b', "deep": ' + DEEP + b"}")


INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
ATTACKS: dict[str, tuple[Spoil, str]] = {
    "layers": (
        partial(_set, num_hidden_layers=10**9),
        "config.json specifies 1000000000 layers, the files have 2",
    ),
    "layers and window": (
        partial(_set, num_hidden_layers=10**9, sliding_window=8),
        "specifies 1000000000 layers, at most 10000 are supported",
    ),
    "hidden": (
        partial(_set, hidden_size=10**12),
        r"specifies 320x1000000000000 \(vocab_size x hidden_size\) for .* the files have 320x64",
    ),
    "digits": (
        partial(_set, hidden_size=10**4000),
        r"hidden_size in .* is 1000\d*\.\.\.0+, it must be from -3\.40282e\+38 to 3\.40282e\+38",
    ),
    "count": (
        partial(_set, hidden_size=10**20),
        "hidden_size in .* is 100000000000000000000, it must be at most 281474976710656",
    ),
    "vocabulary": (partial(_set, vocab_size=10**9), "specifies 1000000000x64 .* have 320x64"),
    "inner": (partial(_set, intermediate_size=10**12), "specifies 64x1000000000000 .* have 64x128"),
    "heads": (
        partial(_set, num_attention_heads=10**9, num_key_value_heads=1, head_dim=16),
        "specifies 64x16000000000 .* have 64x64",
    ),
    "odd head": (partial(_set, head_dim=1), "applies rope to 1 of 1 dimensions of a head"),
    "positions": (
        partial(_set, max_position_embeddings=10**9),
        "is 1000000000, it must be at most 16777216",
    ),
    "text": (partial(_set, hidden_size="64"), "hidden_size in .* is '64', it must be a int"),
    "negative": (partial(_set, hidden_size=-64), "is -64, it must be at least 1"),
    "switch": (partial(_set, hidden_size=True), "is True, it must be a int"),
    "infinite": (partial(_set, hidden_size=float("inf")), "is inf, it must be a int"),
    "list": (partial(_set, hidden_size=[64] * 10**6), r"is \[64, .*\.\.\.\], it must be a int"),
    "eps NaN": (partial(_set, rms_norm_eps=float("nan")), "rms_norm_eps in .* is nan"),
    "eps 0": (partial(_set, rms_norm_eps=0), "rms_norm_eps in .* is 0, it must be above 0"),
    "eps digits": (partial(_set, rms_norm_eps=10**400), r"it must be from -3\.40282e\+38 to"),
    "theta NaN": (partial(_rope, theta=float("nan")), "rope_theta in .* is nan"),
    "theta 0": (partial(_rope, theta=0), "rope_theta in .* is 0, it must be above 1"),
    "kinds": (
        partial(_set, sliding_window=8, layer_types=[["x"], {}]),
        r"unknown kinds \[\['x'\]\]",
    ),
    "deep field": (_deep_field, "config.json .* nested too deeply"),
    "deep tokenizer": (
        partial(_write, name="tokenizer.json", data=b'{"model": ' + DEEP + b"}"),
        "tokenizer.json cannot be read: ",
    ),
    "version": (
        partial(_set, name="tokenizer.json", version="\n\x1b[31m"),
        r"tokenizer.json cannot be read: .*\\n\\x1b",
    ),
    "deep tokenizer_config": (
        partial(_write, name="tokenizer_config.json", data=DEEP),
        "tokenizer_config.json .* nested too deeply",
    ),
    "deep generation_config": (
        partial(_write, name="generation_config.json", data=DEEP),
        "generation_config.json .* nested too deeply",
    ),
    "deep index": (partial(_write, name=INDEX, data=DEEP), "index.json .* nested too deeply"),
    "large config": (partial(_sparse, name="config.json"), "at most 33554432 are allowed"),
    "large tokenizer": (partial(_sparse, name="tokenizer.json"), "at most 268435456 are allowed"),
    "index outside": (
        partial(_index, name="../../etc/passwd"),
        "names '../../etc/passwd', it must",
    ),
    "index missing": (partial(_index, name="gone.safetensors"), "gone.safetensors, which does not"),
    "index of a long name": (
        partial(_index, name="x" * 5_000 + ".safetensors"),
        "xxx.safetensors, which does not exist",
    ),
    "header of 2^63": (
        partial(_write, name=WEIGHTS, data=(2**63).to_bytes(8, "little") + b"{}"),
        "header has 9223372036854775808 bytes, it must have at most 2;",
    ),
    "header of 1 GB": (
        partial(_sparse, name=WEIGHTS, begin=(10**9).to_bytes(8, "little")),
        "header has 1000000000 bytes, it must have at most 33554432;",
    ),
    "deep header": (
        partial(_write, name=WEIGHTS, data=len(DEEP).to_bytes(8, "little") + DEEP),
        "is not a complete safetensors file: .* invalid JSON in header",
    ),
    "shape": (
        partial(_header, change=lambda entry: entry.update(shape=[2**62, 2**62])),
        "is not a complete safetensors file: .* overflow computing buffer size from shape",
    ),
    "dtype": (
        partial(_header, change=lambda entry: entry.update(dtype="X9")),
        "is not a complete safetensors file: .* unknown variant `X9`, expected one of `BOOL`, ",
    ),
    "overlap": (
        partial(_header, change=lambda entry: _moved(entry, 4)),
        "is not a complete safetensors file: .* invalid offset for tensor `model.*`",
    ),
    "offset": (
        partial(_header, change=lambda entry: _moved(entry, 10**15)),
        "is not a complete safetensors file: .* invalid offset for tensor `model",
    ),
    "temperature": (
        partial(_write, name="generation_config.json", data=b'{"temperature": NaN}'),
        "temperature in .* is nan",
    ),
    "end token": (
        partial(
            _write, name="generation_config.json", data=b'{"eos_token_id": [1%s]}' % (b"0" * 30)
        ),
        "its absolute value must be at most 4294967295",
    ),
    "added tokens": (
        partial(_set, name="tokenizer_config.json", added_tokens_decoder={"x": 5}),
        "the added or special tokens in .* are not in the format of transformers",
    ),
    "number of added tokens": (
        partial(_set, name="tokenizer_config.json", added_tokens_decoder=_added(66_000)),
        "tokenizer_config.json has 66000 added tokens, at most 65536 are allowed",
    ),
    "length of an added token": (
        partial(_set, name="tokenizer_config.json", added_tokens_decoder=_added(1, "x" * 5_000)),
        "tokenizer_config.json has 5001 characters in a token, at most 4096 are allowed",
    ),
    "weights in a pipe": (
        partial(_pipe, name=WEIGHTS),
        "model.safetensors cannot be read: it is not a regular file",
    ),
    "shard in a pipe": (
        partial(_pipe, name="model-1.safetensors"),
        "model-1.safetensors cannot be read: it is not a regular file",
    ),
    "template in a pipe": (
        partial(_pipe, name="additional_chat_templates/x.jinja"),
        "x.jinja cannot be read: it is not a regular file",
    ),
    "templates": (
        partial(_set, name="tokenizer_config.json", chat_template=[5]),
        "has 5, it must be a string, or a list of objects",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_absurd_checkpoint_is_refused_in_one_sentence(folder: Path, attack: str) -> None:
    spoil, message = ATTACKS[attack]
    spoil(folder)

    with _in_little_time_and_memory(), pytest.raises(ConfigError, match=message) as error:
        _open(folder, folder / "cache")

    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_many_added_tokens_take_little_time_and_get_their_ids(folder: Path) -> None:
    first = read_text_files(str(folder), folder).encoder.get_vocab_size(with_added_tokens=True)
    added = _added(60_000, first=first)
    # The second token is already in the vocabulary and takes no new id, so the id of the third
    # token is too large.
    kept = {str(first): {"content": "new"}, str(first + 1): {"content": "a"}}
    tail = {str(first + 2): {"content": "late"}}
    _set(folder, "tokenizer_config.json", added_tokens_decoder=added)
    with _in_seconds(2.0):
        encoder = read_text_files(str(folder), folder).encoder
    assert [encoder.token_to_id(f"x{number}") for number in range(60_000)] == list(
        range(first, first + 60_000)
    )

    _set(folder, "tokenizer_config.json", added_tokens_decoder={**kept, **tail})
    encoder = read_text_files(str(folder), folder).encoder
    assert (encoder.token_to_id("new"), encoder.token_to_id("late")) == (first, None)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


_KEY, _STRING, _ARRAY, _U8, _U32, _F32 = _text("a"), 8, 9, 0, 4, 6
GGUF_ATTACKS = {
    "array": (_gguf(0, 1, _KEY + struct.pack("<IIQ", _ARRAY, _U32, 10**9)), "1000000000 elements"),
    "array of 2^64": (
        _gguf(0, 1, _KEY + struct.pack("<IIQ", _ARRAY, _U8, 2**64 - 1)),
        "18446744073709551615 elements in 'a' of at least 1 bytes, 0 bytes are left",
    ),
    "text": (_gguf(0, 1, _KEY + struct.pack("<IQ", _STRING, 2**60)), "takes 1152921504606846976 "),
    "nested": (_gguf(0, 1, _KEY + struct.pack("<IIQ", _ARRAY, _ARRAY, 1) * 99), "array of type 9"),
    "tensors": (_gguf(10**12, 0), "1000000000000 tensors, at most 131072 are allowed"),
    "many tensors": (_gguf(10**5, 0), "100000 tensors of at least 32 bytes, 0 bytes are left"),
    "keys": (_gguf(0, 10**12), "1000000000000 keys, at most 65536 are allowed"),
    "nothing": (b"", "cannot be read as a GGUF file"),
}


@pytest.mark.parametrize("attack", GGUF_ATTACKS)
def test_a_gguf_file_whose_counts_do_not_fit_it_is_refused(tmp_path: Path, attack: str) -> None:
    data, message = GGUF_ATTACKS[attack]
    (tmp_path / "m.gguf").write_bytes(data)

    with _in_little_time_and_memory(), pytest.raises(ConfigError, match=message):
        _open(tmp_path / "m.gguf", tmp_path)


def test_a_gguf_array_is_bounded_even_in_a_large_file(tmp_path: Path) -> None:
    begin = _gguf(0, 1, _KEY + struct.pack("<IIQ", _ARRAY, _U8, 10**9))
    _sparse(tmp_path, "m.gguf", begin)

    with (
        _in_little_time_and_memory(),
        pytest.raises(ConfigError, match="have 1000000000 elements, at most 2097152 are allowed"),
    ):
        _open(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("llama.block_count", "I", 10**9, "m.gguf specifies 1000000000 layers, the files have 2"),
        ("llama.embedding_length", "I", 4 * 10**9, "specifies 288x4000000000 .* have 288x64"),
        ("llama.attention.head_count", "I", 0, "is 0, it must be at least 1"),
        (
            "llama.attention.head_count",
            "I",
            6,
            "attn_q.weight, it must be a multiple of 12 for 6 heads",
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            "f",
            float("nan"),
            "is nan, it must be a finite",
        ),
        ("llama.attention.layer_norm_rms_epsilon", "f", 0.0, "rms_norm_eps in .* is 0"),
        ("llama.rope.freq_base", "f", 0.0, "rope_theta in .* is 0, it must be above 1"),
        ("llama.rope.freq_base", "f", float("inf"), "is inf, it must be a finite"),
    ],
)
def test_absurd_metadata_of_a_gguf_file_is_refused_before_it_is_converted(
    tmp_path: Path, key: str, kind: str, value: float, message: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    data = bytearray(file.read_bytes())
    # The value follows the key and the value's type.
    struct.pack_into(f"<{kind}", data, data.index(_text(key)) + len(_text(key)) + 4, value)
    file.write_bytes(data)

    with _in_little_time_and_memory(), pytest.raises(ConfigError, match=message):
        _open(file, tmp_path)
    with pytest.raises(ConfigError):
        model_facts(str(file))

    assert not list((tmp_path / "converted").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 8 experts in 4 groups; each token uses 3 experts of 2 groups."""
    return make_tiny("glm4_moe", tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_routed_experts": -1}, "n_routed_experts in .* is -1, it must be at least 1"),
        ({"n_routed_experts": 0}, "n_routed_experts in .* is 0, it must be at least 1"),
        ({"n_routed_experts": 10**9}, "n_routed_experts in .* it must be at most 4096"),
        ({"n_routed_experts": None}, "config.json has no n_routed_experts"),
        (
            {"num_experts_per_tok": 9},
            "num_experts_per_tok in .* is 9, it must be at most n_routed_experts, which is 8",
        ),
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok in .* is 5, it must be at most 4",
        ),
        ({"n_group": 3}, "n_group in .* is 3, it must divide n_routed_experts, 8, into"),
        ({"n_group": 8}, "n_group in .* is 8, .* into groups of at least 2"),
        ({"topk_group": 5}, "topk_group in .* is 5, it must be at most n_group, which is 4"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace in .* it must be from 0 to"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers .* from 0 to 64"),
        ({"clip_qkv": -8.0}, "clip_qkv in .* is -8, it must be above 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob in .* is 1, it must be a bool"),
        (
            {"n_routed_experts": 16},
            r"specifies 16x64 \(n_routed_experts x hidden_size\) for .*gate.weight, .* have 8x64",
        ),
        (
            {"moe_intermediate_size": 10**12},
            r"specifies 1000000000000x64 \(moe_intermediate_size x .* have 48x64",
        ),
        ({"n_shared_experts": 2}, r"x n_shared_experts \* moe_intermediate_size\) .* have 64x48"),
        (
            {"first_k_dense_replace": 2},
            r"for model.layers.1.mlp.down_proj.weight, the files do not have this tensor",
        ),
    ],
)
def test_absurd_experts_are_refused_in_one_sentence(
    experts: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for file in experts.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    _set(tmp_path, **change)

    with _in_little_time_and_memory(), pytest.raises(ConfigError, match=message) as error:
        check_checkpoint(EngineConfig(str(tmp_path)), str(tmp_path))

    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_family_specific_sizes_are_read_from_the_config(tmp_path: Path, family: str) -> None:
    if family in FAMILIES:
        make_tiny(family, tmp_path / "generates")
    make_pooling(family, tmp_path / "embeds")
    # Transformers has no classifier for these families.
    without = ("granite", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax", "qwen3_5_moe", "llama4")
    without += ("lfm2",)
    if not family.startswith(without):
        make_pooling(family, tmp_path / "classifies", num_labels=3)

    for folder in tmp_path.iterdir():
        check_checkpoint(EngineConfig(str(folder)), str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_labels": 1000, "id2label": None}, r"1000x64 \(labels x hidden size\) .* have 3x64"),
        ({"num_labels": 10**9, "id2label": None}, "num_labels in .* must be at most 1048576"),
        ({"type_vocab_size": 10**9}, r"1000000000x64 \(type_vocab_size .* have 2x64"),
        ({"max_position_embeddings": 10**9}, "1000000000x64 .* have 130x64"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps in .* is nan"),
        ({"num_hidden_layers": 10**9}, "specifies 1000000000 layers, the files have 2"),
    ],
)
def test_absurd_sizes_of_an_encoder_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = make_pooling("bert", tmp_path, num_labels=3)
    _set(folder, **change)

    with _in_little_time_and_memory(), pytest.raises(ConfigError, match=message):
        check_checkpoint(EngineConfig(str(folder)), str(folder))


def test_a_plan_checks_sizes_with_and_without_weight_files(folder: Path) -> None:
    _set(folder, num_hidden_layers=10**9)

    with _in_little_time_and_memory():
        with pytest.raises(ConfigError, match="specifies 1000000000 layers, the files have 2"):
            model_facts(str(folder))
        with pytest.raises(ConfigError, match="has 1000000000 layers, at most 10000 are supported"):
            model_facts(str(folder / "config.json"))


@pytest.mark.parametrize("endian", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_gguf_parsing_equals_the_library(
    tmp_path: Path, endian: GGUFEndian, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiny_gguf.GGUFWriter", partial(GGUFWriter, endianess=endian))
    path = write_gguf(tmp_path / "m.gguf", settings={"logit_scale": 0.5})

    ours, theirs = open_gguf(path), GGUFReader(path)

    fields = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.tensor_type == tensor.tensor_type and own.n_bytes == tensor.n_bytes
        assert own.shape == tuple(tensor.shape) and (own.data == tensor.data).all()


def test_the_command_fails_with_status_1_and_one_line(folder: Path, tmp_path: Path) -> None:
    def failed(num_layers: int) -> tuple[float, int]:
        """CPU seconds and peak memory in bytes."""
        _set(folder, num_hidden_layers=num_layers)
        seconds, num_bytes, status, said = _serve(folder, tmp_path)
        assert status == 1
        # The first line names the versions and the model.
        assert "gaudiserve 0." in said[0]
        assert said[1:] == [
            f"gaudiserve: {folder}/config.json specifies {num_layers} layers, the files have 2",
        ]
        return seconds, num_bytes

    def ratio() -> float:
        """CPU time relative to the same error for one layer too many."""
        base_s, base_bytes = failed(3)
        seconds, num_bytes = failed(10**9)
        assert num_bytes < base_bytes + MOST_BYTES
        return seconds / base_s

    assert least(ratio, 2) < 2


def _serve(model: Path, tmp_path: Path) -> tuple[float, int, int, list[str]]:
    """(CPU seconds, peak bytes, exit status, lines on stderr)."""
    log = tmp_path / "said.txt"
    command = [sys.executable, "-m", "gaudiserve", "serve", str(model), "--port", "0"]
    with log.open("w") as said:
        process = subprocess.Popen(command, cwd=ROOT, stderr=said, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    return seconds, usage.ru_maxrss * 1024, process.returncode, log.read_text().splitlines()


def test_random_changes_of_a_gguf_file_are_refused_or_converted(tmp_path: Path) -> None:
    chance = random.Random(20261122)
    file = write_gguf(tmp_path / "m.gguf")
    whole = file.read_bytes()
    refused = 0

    with _in_seconds(60):
        for turn in range(300):
            data = bytearray(whole)
            place = chance.randrange(4, 12_000)
            number = chance.choice([0, 1, 9, 255, 2**31, 2**60, 2**64 - 1, 10**9])
            data[place : place + 8] = number.to_bytes(8, "little")
            file.write_bytes(data)
            try:
                _open(file, tmp_path / str(turn))
            except ConfigError as error:
                refused += 1
                assert "\n" not in str(error)

    assert 0 < refused < 300


@contextmanager
def _in_seconds(most_s: float) -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < machine_s(most_s)
