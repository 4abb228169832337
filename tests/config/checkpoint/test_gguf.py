"""GGUF files become Hugging Face folders with the same weights, settings and tokens."""

import fcntl
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from demo import demo_folder, demo_gguf, demo_reader, read_demo_once
from gguf import GGMLQuantizationType, quants
from gguf_families import write_case, write_checkpoint
from safetensors import safe_open
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, family_weights, write_gguf
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from config.checkpoint import gguf
from config.checkpoint.gguf import converted
from config.checkpoint.gguf_metadata import GgufFile, open_gguf
from config.checkpoint.gguf_tokenizer import byte_alphabet, tokenizer_files
from config.checkpoint.gguf_weights import to_bfloat16
from config.errors import ConfigError
from config.model.read_config import read_model_config
from config.owned_directory import LOCK


def _convert(source: Path, dtype: str = "float32") -> Path:
    return converted(source, source.parent / "cache", dtype=dtype, progress=False)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights without their end": lambda folder: os.truncate(folder / "model.safetensors", 2000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "an empty config": lambda folder: os.truncate(folder / "config.json", 0),
    "half a tokenizer": lambda folder: os.truncate(folder / "tokenizer.json", 100),
    "no files": lambda folder: [file.unlink() for file in folder.iterdir()],
    "half the sizes": lambda folder: os.truncate(folder / ".sizes.json", 20),
    "a file instead": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_copy_is_converted_again(name: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    folder = _convert(source)
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    DAMAGES[name](folder)

    assert _convert(source) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == contents


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Descriptor of the locked lock file of `folder`, which is not converted any more."""
    shutil.rmtree(folder)
    with folder.with_name(f"{folder.name}.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def test_a_conversion_does_not_wait_for_a_process_that_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    folder = _convert(source)
    monkeypatch.setattr(gguf, "_STUCK_S", 0.5)

    with _held(folder):
        assert _convert(source) == folder

    assert (folder / "model.safetensors").is_file()
    assert "has stopped for 0.5 s: it is converted here, too" in caplog.text


def test_a_conversion_waits_for_a_process_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    folder = _convert(source)
    monkeypatch.setattr(gguf, "_STUCK_S", 10.0)
    events = []

    def convert() -> None:
        events.append("converted" if _convert(source) == folder else "wrong")

    with _held(folder) as lock:
        waiting = Thread(target=convert)
        waiting.start()
        for _ in range(20):
            os.utime(lock)
            waiting.join(0.05)
        events.append("released")
    waiting.join()

    assert events == ["released", "converted"]


def test_a_copy_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    folder = _convert(source)
    (folder / ".sizes.json").unlink()
    (folder / "own.txt").write_text("kept")

    assert (_convert(source) / "own.txt").read_text() == "kept"


def _json(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return loaded


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _interleaved(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a projection as llama-family GGUF files store them: the two halves of a head
    interleaved."""
    rows = [
        weight[head * HEAD_DIM + half * HEAD_DIM // 2 + place]
        for head in range(heads)
        for place in range(HEAD_DIM // 2)
        for half in range(2)
    ]
    return np.stack(rows)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "granite", "phi3"])
def test_a_converted_file_loads_in_transformers_with_no_weight_left_over(
    tmp_path: Path, architecture: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", architecture, settings={"attention.key_length": 16})

    folder = _convert(source)

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    assert read_model_config(str(folder)).architecture == model.config.architectures[0]


def test_interleaved_rows_of_q_and_k_are_restored_to_their_order(tmp_path: Path) -> None:
    weights = family_weights("llama")
    wanted = {part: weights[f"blk.1.attn_{part}.weight"] for part in "qkv"}
    stored = dict(weights)
    stored["blk.1.attn_q.weight"] = _interleaved(wanted["q"], HEADS)
    stored["blk.1.attn_k.weight"] = _interleaved(wanted["k"], KV_HEADS)

    found = _tensors(_convert(write_gguf(tmp_path / "m.gguf", weights=stored)))

    for part, weight in wanted.items():
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert torch.equal(found[name], torch.from_numpy(weight))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantized_weights_are_exact_in_float32_and_rounded_once_in_bfloat16(
    tmp_path: Path, kind: str
) -> None:
    name, qtype = "blk.0.ffn_up.weight", GGMLQuantizationType[kind]
    weights = family_weights("llama")
    source = write_gguf(tmp_path / "m.gguf", weights=weights, quantized={name: qtype})
    wanted = torch.from_numpy(quants.dequantize(quants.quantize(weights[name], qtype), qtype))

    exact, rounded = _tensors(_convert(source)), _tensors(_convert(source, "bfloat16"))

    assert torch.equal(exact["model.layers.0.mlp.up_proj.weight"], wanted)
    assert torch.equal(rounded["model.layers.0.mlp.up_proj.weight"], wanted.bfloat16())
    assert rounded["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_a_one_dimensional_quantized_tensor_is_a_single_row(tmp_path: Path, kind: str) -> None:
    name, qtype = "blk.0.attn_norm.weight", GGMLQuantizationType[kind]
    weights = family_weights("llama")
    weights[name] = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
    source = write_gguf(tmp_path / "m.gguf", weights=weights, quantized={name: qtype})
    wanted = torch.from_numpy(quants.dequantize(quants.quantize(weights[name], qtype), qtype))

    found = _tensors(_convert(source))

    assert torch.equal(found["model.layers.0.input_layernorm.weight"], wanted)


@pytest.mark.parametrize(
    "kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ4_XS", "MXFP4"]
)
def test_dequantized_blocks_equal_the_library(tmp_path: Path, kind: str) -> None:
    # Use random bytes as blocks, because the library can quantize into only a few of these types.
    qtype, name = GGMLQuantizationType[kind], "blk.0.ffn_down.weight"
    random = np.random.default_rng(1)
    wanted = np.full(1, np.nan, np.float32)
    while not np.isfinite(wanted).all():
        size = quants.quant_shape_to_byte_shape((HIDDEN, 256), qtype)
        blocks = random.integers(0, 256, size, dtype=np.uint8)
        # Bound the exponents: most types store the scales' exponents in these bytes.
        blocks[:, [1, 3, -1, -3]] &= 0x3F
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = quants.dequantize(blocks, qtype)
    weights: dict[str, Any] = family_weights("llama", layers=1)
    weights |= dict.fromkeys(
        ("blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"), np.zeros((256, HIDDEN), np.float32)
    )
    source = write_gguf(
        tmp_path / "m.gguf",
        weights={**weights, name: blocks},
        raw={name: qtype},
        settings={"feed_forward_length": 256},
    )

    found = _tensors(_convert(source))["model.layers.0.mlp.down_proj.weight"]

    assert torch.equal(found, torch.from_numpy(wanted))


def test_bfloat16_rounds_ties_to_even_and_keeps_nan_and_infinity() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.1e-40, 3.4e38, np.inf, np.nan], np.float32)
    values = np.concatenate((values, np.array([0x7FFFFFFF], np.uint32).view(np.float32)))

    bits = to_bfloat16(values)

    found = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(found.isnan(), torch.tensor([False] * 6 + [True] * 2))
    assert torch.equal(found[:6], torch.from_numpy(values)[:6].bfloat16())


def test_settings_equal_the_metadata_of_the_file(tmp_path: Path) -> None:
    weights = family_weights("granite", layers=3, tied=False)
    settings = {
        "embedding_scale": 12.0,
        "attention.scale": 0.25,
        "residual_scale": 0.5,
        "logit_scale": 8.0,
    }
    source = write_gguf(tmp_path / "m.gguf", "granite", weights=weights, settings=settings)

    config = read_model_config(str(_convert(source)))

    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, HEADS, KV_HEADS)
    assert (config.hidden_size, config.max_position) == (HIDDEN, 512)
    assert config.rope.theta == 50000.0 and math.isclose(config.rms_norm_eps, 1e-5, rel_tol=1e-6)
    assert not config.tie_word_embeddings
    assert (config.embedding_multiplier, config.attention_multiplier) == (12.0, 0.25)
    assert (config.residual_multiplier, config.logits_scaling) == (0.5, 8.0)
    assert config.eos_token_ids == (0, 2)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_equals_the_metadata_of_the_file(tmp_path: Path, kind: str) -> None:
    settings = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    source = write_gguf(tmp_path / "m.gguf", "qwen2", settings=settings)

    scaling = read_model_config(str(_convert(source))).rope.scaling

    assert scaling is not None
    assert (scaling.kind, scaling.factor) == (kind, 4.0)
    if kind == "yarn":
        assert scaling.original_max_position == 128


def test_llama3_rope_settings_are_restored_from_the_stored_factors(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama",
        head_dim=HEAD_DIM,
        rope_theta=50000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    plain = 50000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    weights = family_weights("llama")
    weights["rope_freqs.weight"] = (plain / _llama3_frequencies(plain)).astype(np.float32)

    folder = _convert(write_gguf(tmp_path / "m.gguf", weights=weights))

    scaling = _json(folder, "config.json")["rope_scaling"]
    assert math.isclose(scaling.pop("factor"), 32.0, rel_tol=1e-6)
    wanted = {k: v for k, v in config.rope_scaling.items() if k not in ("factor", "rope_theta")}
    assert scaling == wanted


def _llama3_frequencies(plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Meta's published rule, for factor 32 over 8192 positions."""
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            scaled.append(frequency)
        elif wavelength > 8192 / 1.0:
            scaled.append(frequency / 32.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            scaled.append((1 - smooth) * frequency / 32.0 + smooth * frequency)
    return np.array(scaled)


def test_rope_factors_of_an_unknown_rule_are_refused(tmp_path: Path) -> None:
    weights = family_weights("llama")
    weights["rope_freqs.weight"] = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    source = write_gguf(tmp_path / "m.gguf", weights=weights)

    with pytest.raises(ConfigError, match="rope frequency"):
        _convert(source)


def test_byte_level_text_round_trips_and_special_tokens_are_not_split(tmp_path: Path) -> None:
    folder = _convert(write_gguf(tmp_path / "m.gguf"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "hello wörld 42\n\n7 <|im_start|>\t日本"

    encoding = tokenizer.encode(text)

    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert encoding.tokens[0] == "hello" and encoding.ids.count(1) == 1
    assert encoding.tokens.count("ĊĊ") == 1
    config = _json(folder, "tokenizer_config.json")
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|endoftext|>")
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["Ġthe", "Ġpi", "ĠCafÃ©", "Ġ", "123", "45", "Ġ", "Ġ!", "x"]),
        ("deepseek-coder", [*("Ġthe", "Ġpi", "ĠCafÃ©", "Ġ"), *"12345", "Ġ", "Ġ!", "x"]),
        # DeepSeek's range of punctuation ends after z.
        ("deepseek-llm", [*("Ġthe", "Ġpi", "ĠCaf", "Ã©", "Ġ"), *"12345", "Ġ", "Ġ!", "x"]),
        ("falcon", ["Ġthe", "Ġpi", "ĠCafÃ©", "Ġ", "123", "45", "ĠĠ", "!", "x"]),
        ("glm4", ["Ġthe", "Ġpi", "ĠCafÃ©", "Ġ", "123", "45", "Ġ", "Ġ!", "x"]),
        ("qwen35", [*("Ġthe", "Ġpi", "ĠCafÃ©", "Ġ"), *"12345", "Ġ", "Ġ!", "x"]),
    ],
)
def test_text_is_split_by_the_pre_tokenizer_of_the_file(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    folder = _convert(write_gguf(tmp_path / "m.gguf", pre=pre))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = " the pi Café 12345  !x"

    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)

    assert [piece for piece, _ in found] == pieces
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("pixtral", True), ("qwen2", False)]
)
def test_a_file_without_a_bos_rule_gets_the_default_of_llama_cpp(
    tmp_path: Path, pre: str, begins: bool
) -> None:
    file = open_gguf(write_gguf(tmp_path / "m.gguf", pre=pre))
    del file.metadata["tokenizer.ggml.add_bos_token"]

    files = tokenizer_files(file)

    assert files is not None
    assert files["tokenizer_config.json"]["add_bos_token"] == begins
    assert (files["tokenizer.json"]["post_processor"] is not None) == begins


@pytest.mark.parametrize(
    ("architecture", "specials", "ends"),
    [
        ("gpt-oss", ["<|return|>", "<|end|>", "<|call|>"], (0, 2)),
        ("glm4", ["<|user|>", "<|assistant|>", "<|observation|>"], (0, 2)),
        ("phi3", ["<|endoftext|>", "<|user|>", "<|end|>"], (0, 2)),
    ],
)
def test_end_of_turn_tokens_of_the_family_are_end_tokens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    specials: list[str],
    ends: tuple[int, ...],
) -> None:
    monkeypatch.setattr("tiny_gguf.SPECIAL", specials)
    tensors = write_checkpoint(tmp_path / "hf", architecture)

    folder = _convert(write_case(tmp_path / "m.gguf", architecture, tensors))

    assert read_model_config(str(folder)).eos_token_ids == ends


def test_the_byte_alphabet_equals_the_library() -> None:
    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())


def test_sentencepiece_merges_follow_the_scores_and_unknown_characters_become_bytes(
    tmp_path: Path,
) -> None:
    folder = _convert(write_gguf(tmp_path / "m.gguf", tokenizer="llama"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    encoding = tokenizer.encode("hello ölo")

    assert encoding.tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xB6>", "l", "o"]
    assert tokenizer.decode(encoding.ids) == "hello ölo"


def test_a_file_without_a_vocabulary_gives_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = _convert(write_gguf(tmp_path / "m.gguf", tokenizer=None))

    assert not (folder / "tokenizer.json").exists()
    assert (folder / "config.json").exists()


def test_unknown_gguf_features_are_refused_by_name_and_leave_no_copy(tmp_path: Path) -> None:
    weights = family_weights("llama")
    odd = {**weights, "blk.0.attn_sinks.weight": np.zeros(HEADS, np.float32)}
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    write_gguf(tmp_path / "arch.gguf", "mamba", weights=weights)
    write_gguf(tmp_path / "pre.gguf", pre="martian")
    write_gguf(tmp_path / "tensor.gguf", weights=odd)

    for name, words in {
        "torn": "cannot be read as a GGUF file",
        "arch": "'mamba', it must be one of llama",
        "pre": "'martian', it must be one of",
        "tensor": "attn_sinks",
    }.items():
        with pytest.raises(ConfigError, match=words):
            _convert(tmp_path / f"{name}.gguf")
    left = (tmp_path / "cache" / "converted").iterdir()
    assert {path.suffix for path in left} == {".lock"}


def test_a_second_start_finds_the_copy_and_a_changed_file_makes_a_new_copy(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf")
    first = _convert(source)
    stamp = (first / "model.safetensors").stat().st_mtime_ns

    again = _convert(source)
    write_gguf(source, weights=family_weights("llama", layers=1))
    changed = _convert(source)

    assert again == first and (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert changed != first and _json(changed, "config.json")["num_hidden_layers"] == 1


def test_remains_of_a_killed_conversion_are_removed(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf")
    folder = _convert(source)
    of_dead_process = folder.with_name(".converting-x")
    of_dead_process.mkdir()
    (of_dead_process / LOCK).touch()
    folder.rename(of_dead_process / "model")
    (of_dead_process / "model" / "model.safetensors").write_bytes(b"half")

    again = _convert(source)

    assert again == folder and not of_dead_process.exists()
    assert len(_tensors(folder)) == 2 + 2 * 9


def test_two_concurrent_conversions_leave_a_single_complete_copy(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf")

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(_convert, [source, source])

    assert folders[0] == folders[1]
    assert len(_tensors(folders[0])) == 2 + 2 * 9


TEXTS = [
    "Hello world",
    "  two  spaces and trailing ",
    "tabs\t\tand\nnewlines\n\n\nend",
    "def f(x):\n    return x**2 + 12345\n",
    "2024-01-02 3.14159 1,000,000",
    "naïve café — “quotes” l'été I'm you're we'll don't",
    "日本語のテキスト Здравствуй مرحبا 😀👍🏽",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|endoftext|>b",
    "",
    "   ",
    "x\x00y\u200b",
]


def test_the_demo_models_tokens_equal_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_demo_once(monkeypatch)
    source = Path(demo_gguf())
    ours = AutoTokenizer.from_pretrained(demo_folder())
    # The file has the add_bos field; transformers before 5 ignores it.
    theirs = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, add_bos_token=False
    )
    messages = [{"role": "user", "content": "Hi 42"}, {"role": "assistant", "content": "yo"}]

    prompts = [t.apply_chat_template(messages, tokenize=False) for t in (ours, theirs)]

    assert prompts[0] == prompts[1]
    for text in [*TEXTS, prompts[0]]:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        assert ours.decode(ours(text)["input_ids"]) == text


def test_the_demo_models_special_tokens_equal_the_file() -> None:
    fields = demo_reader().fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

    ours = AutoTokenizer.from_pretrained(demo_folder())

    for kind, name in names.items():
        index = fields[f"tokenizer.ggml.{kind}_token_id"].contents()
        assert getattr(ours, name) == tokens[index], name


def test_the_demo_model_splits_digits_as_in_training() -> None:
    # transformers applies GPT-2's splitting rule to this file, which lets a digit split the spaces
    # or line ends before it; the file itself asks for single digits.
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())

    tokens = tokenizer.tokenize("a\n\n12   3")

    assert tokens == ["a", "ĊĊ", "1", "2", "ĠĠĠ", "3"]


def test_the_demo_models_settings_equal_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_demo_once(monkeypatch)
    source = Path(demo_gguf())
    theirs = AutoConfig.from_pretrained(source.parent, gguf_file=source.name).to_dict()

    ours = AutoConfig.from_pretrained(demo_folder()).to_dict()

    # Fields that a GGUF file does not have, and the path it was read from. (torch_dtype: before 5.)
    named = {"_name_or_path", "_model_name_or_path", "architectures", "dtype", "unk_token_id"}
    named |= {"torch_dtype"}
    differing = {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)}
    assert differing <= named


def test_a_pair_of_bert_keeps_its_second_text_without_a_first_token(tmp_path: Path) -> None:
    file = open_gguf(write_gguf(tmp_path / "m.gguf", tokenizer="bert"))
    del file.metadata["tokenizer.ggml.bos_token_id"]

    files = tokenizer_files(file)

    assert files is not None
    tokenizer = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert tokenizer.encode("hello", "world").tokens == ["hello", "[SEP]", "world", "[SEP]"]


def test_booleans_are_not_read_as_integers(tmp_path: Path) -> None:
    file = GgufFile(tmp_path / "tiny.gguf", {"one": True, "several": [True, False]}, {})

    with pytest.raises(ConfigError, match=r"'one' in .* is True, it must be a int"):
        file.value("one", int)
    with pytest.raises(ConfigError, match="each entry must be a int"):
        file.values("several", int)
