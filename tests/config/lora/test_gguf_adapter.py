"""Adapters in GGUF files have the same matrices as the same adapters in PEFT folders."""

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delays import machine_s
from gguf import GGMLQuantizationType
from gguf_adapters import METADATA, Array, factors, pairs_of, write_pairs
from gguf_families import CASES, COMMON, architecture_of, write_checkpoint

from config.errors import ConfigError
from config.lora.adapter import LoadedAdapter, load_adapter
from config.lora.adapter_folder import AdapterFolder
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config
from config.params.lora import EMBEDDING, EXTRA_TARGETS, HEAD

RANK = 3
REFUSED = "linear_attn.out_proj"
"""Modules that cannot have an adapter in a GGUF file."""


def base_of(folder: Path, case: str) -> BaseModules:
    write_checkpoint(folder, case)
    return BaseModules(read_model_config(str(folder)))


def load(path: Path, base: BaseModules, max_rank: int = 16) -> LoadedAdapter:
    folder = AdapterFolder(str(path))
    return load_adapter(folder, base, max_rank, EXTRA_TARGETS, keeps_bytes=True)


def products_in(loaded: LoadedAdapter) -> dict[str, Array]:
    """Product of the two matrices of each module, by module name."""

    def values(stored: Any) -> Array:
        end = stored.offset + stored.num_bytes
        return np.frombuffer(loaded.data[stored.offset : end], np.float32).reshape(stored.shape)

    return {m.base.name: values(m.b) @ values(m.a) * m.scale for m in loaded.adapter.modules}


def random_product(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    a = random.standard_normal((*shape[:-2], RANK, shape[-1]), dtype=np.float32)
    b = random.standard_normal((*shape[:-1], RANK), dtype=np.float32)
    return b @ a


def random_products(base: BaseModules) -> dict[str, Array]:
    """Random products for the linear layers that an adapter in a GGUF file may have, except the
    head and stacked experts, by weight name."""
    random = np.random.default_rng(0)
    return {
        f"{module.name}.weight": random_product(module.spec.shape, random)
        for module in base.modules.values()
        if module.spec.num_experts is None
        and module.kind not in (EMBEDDING, HEAD)
        and not (module.refusal or module.name.endswith(REFUSED))
    }


@pytest.mark.parametrize(
    "case",
    [
        *("llama", "llama with experts", "phi3", "gemma3", "qwen2moe", "qwen3next", "qwen35"),
        *("deepseek2", "phi2", "command-r", "falcon", "gpt2", "gptneox", "internlm2", "baichuan"),
        *("granitemoe with a shared expert", "bert", "bert of DistilBERT"),
    ],
)
def test_gguf_adapter_matrices_equal_the_peft_adapter(case: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "hf", case)
    products = random_products(base)
    architecture, config = architecture_of(case), {**COMMON, **CASES[case].fields}
    # A projection that the base merges and the file splits has one rank per part.
    pairs = pairs_of(architecture, config, products, RANK)
    file = write_pairs(tmp_path / "a.gguf", architecture, pairs, metadata=METADATA)

    found = products_in(load(file, base))

    assert found.keys() == {name.removesuffix(".weight") for name in products}
    for name, product in found.items():
        expected = products[f"{name}.weight"] * (8.0 / RANK)
        if base.modules[name].spec.transposed:
            expected = expected.T
        np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", ["granitemoe", "llama4", "gpt-oss"])
@pytest.mark.parametrize("kinds", [("gate", "up", "down"), ("up",)])
def test_adapters_of_stacked_experts_are_loaded(
    case: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    base = base_of(tmp_path / "hf", case)
    (layer, *_), (stack, *_) = base.expert_stacks, base.expert_stacks.values()
    number = layer.removeprefix(base.weight_map.layer_prefix)
    ((gate_up,), (down,)) = stack.parameters.values()
    inner, hidden = down[0].in_features, down[0].out_features
    experts = len(base.expert_stacks) * 4 * (hidden + 2 * inner + inner + hidden)
    assert base.num_features > experts
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    random = np.random.default_rng(0)
    products = {kind: random_product((4, *shapes[kind]), random) for kind in kinds}
    pairs = {
        f"blk.{number}.ffn_{kind}_exps.weight": factors(product, RANK)
        for kind, product in products.items()
    }
    file = write_pairs(tmp_path / "a.gguf", case, pairs, metadata=METADATA)

    found = products_in(load(file, base))

    zeros = np.zeros((4, inner, hidden), np.float32)
    both = [products.get(kind, zeros) for kind in ("gate", "up")]
    # gpt-oss interleaves the rows of gate and up.
    axis = 2 if case == "gpt-oss" else 1
    merged = np.stack(both, axis).reshape(4, 2 * inner, hidden)
    expected = dict(zip((item.name for item in gate_up), merged, strict=True))
    expected |= dict(zip((item.name for item in down), products.get("down", ()), strict=False))
    assert found.keys() == expected.keys()
    for name, product in expected.items():
        np.testing.assert_allclose(found[name], product * 8.0 / RANK, atol=1e-3, err_msg=name)


def test_matrices_of_four_gguf_types_and_of_the_embedding_are_loaded(tmp_path: Path) -> None:
    base = base_of(tmp_path / "hf", "qwen3")
    random = np.random.default_rng(0)
    a = random.standard_normal((32, 64), dtype=np.float32)
    b = random.standard_normal((64, 32), dtype=np.float32)
    table = random.standard_normal((288, 32), dtype=np.float32)
    name, expected = "blk.0.attn_q.weight", (b @ a) * 8 / 32
    for kind, error in (("F32", 1e-5), ("F16", 1e-2), ("BF16", 0.1), ("Q8_0", 0.2)):
        file = write_pairs(
            tmp_path / f"{kind}.gguf",
            "qwen3",
            {name: (a, b), "token_embd.weight": (table, b)},
            metadata=METADATA,
            kind=GGMLQuantizationType[kind],
        )
        found = products_in(load(file, base, max_rank=32))
        query = found["model.layers.0.self_attn.q_proj"]
        np.testing.assert_allclose(query, expected, atol=error)
        np.testing.assert_allclose(found["model.embed_tokens"], (b @ table.T) * 8 / 32, atol=error)


PAIR = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)
QUERY, KEY = "blk.0.attn_q.weight", "blk.0.attn_k.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BaseModules:
    return base_of(tmp_path_factory.mktemp("base") / "hf", "llama")


def test_a_file_without_alpha_is_not_scaled(llama: BaseModules, tmp_path: Path) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "adapter.lora.alpha"}
    file = write_pairs(tmp_path / "a.gguf", "llama", {QUERY: PAIR}, metadata=metadata)

    (product,) = products_in(load(file, llama)).values()

    assert (product == 2).all()


def with_value(value: float) -> tuple[Array, Array]:
    a = PAIR[0].copy()
    a[1, 7] = value
    return a, PAIR[1]


@pytest.mark.parametrize(
    ("architecture", "pairs", "metadata", "message"),
    [
        ("qwen2", {QUERY: PAIR}, {}, "of the architecture qwen2, the base model is a LlamaForCaus"),
        ("nothing", {QUERY: PAIR}, {}, "of the architecture nothing, the base model is a Llama"),
        ("llama", {}, {}, "has 0 low-rank matrices, an adapter needs at least 2"),
        ("llama", {QUERY: (PAIR[0], None)}, {}, "and no blk.0.attn_q.weight.lora_b"),
        ("llama", {QUERY: (None, PAIR[1])}, {}, "and no blk.0.attn_q.weight.lora_a"),
        (
            "llama",
            {QUERY: (PAIR[0], np.ones((64, 3), np.float32))},
            {},
            "lora_a of 2x64 and blk.0.attn_q.weight.lora_b of 64x3: the ranks are 2 and 3",
        ),
        (
            "llama",
            {QUERY: (np.ones((2, 48), np.float32), PAIR[1])},
            {},
            "attn_q.weight.lora_a of 2x48, the base model and rank 2 need 2x64",
        ),
        (
            "llama",
            {KEY: PAIR},
            {},
            "attn_k.weight.lora_b of 64x2, the base model and rank 2 need 32x2",
        ),
        (
            "llama",
            {QUERY: (PAIR[0], np.ones((62, 2), np.float32))},
            {},
            "has 62 rows in blk.0.attn_q.weight, it must be a multiple of 8 for 4 heads",
        ),
        ("llama", {"blk.9.attn_q.weight": PAIR}, {}, "blk.9.attn_q.weight, which is not a module"),
        ("llama", {"blk.0.attn_x.weight": PAIR}, {}, "blk.0.attn_x.weight, which is not a module"),
        ("llama", {"": PAIR}, {}, "has weights for , which is not a module of the base model"),
        (
            "llama",
            {QUERY: tuple(item[None] for item in PAIR)},
            {},
            "blk.0.attn_q.weight.lora_a of 3 dimensions, it must have 2",
        ),
        ("llama", {QUERY: with_value(np.nan)}, {}, "NaN value in .*lora_a"),
        ("llama", {QUERY: with_value(np.inf)}, {}, "NaN value in .*lora_a"),
        ("llama", {QUERY: with_value(1e5)}, {}, "1e[+]05 in .*lora_a, at most 65504 is supported"),
        ("llama", {QUERY: PAIR}, {"general.type": "model"}, "general.type 'model', it must be"),
        (
            "llama",
            {QUERY: PAIR},
            {"adapter.type": "x"},
            "adapter.type 'x', only 'lora' is supported",
        ),
        (
            "llama",
            {QUERY: PAIR},
            {"adapter.alora.invocation_tokens": [1, 2]},
            "activated LoRA",
        ),
        ("llama", {QUERY: PAIR}, {"adapter.lora.alpha": float("nan")}, "must be a finite number"),
        ("llama", {QUERY: PAIR}, {"adapter.lora.alpha": "8"}, "it must be a float"),
        (
            "llama",
            {QUERY: (np.ones((40, 64), np.float32), np.ones((64, 40), np.float32))},
            {},
            "has rank 40, --max-lora-rank is 16",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_sentence(
    architecture: str,
    pairs: Any,
    metadata: dict[str, Any],
    message: str,
    llama: BaseModules,
    tmp_path: Path,
) -> None:
    path = write_pairs(
        tmp_path / "theirs.gguf", architecture, pairs, metadata={**METADATA, **metadata}
    )

    with pytest.raises(ConfigError, match=f"theirs.gguf.*{message}"):
        load(path, llama)


def test_the_error_names_a_tensor_that_is_not_low_rank(llama: BaseModules, tmp_path: Path) -> None:
    norm = {"blk.0.attn_norm.weight": np.ones(64, np.float32)}
    file = write_pairs(tmp_path / "a.gguf", "llama", {QUERY: PAIR}, metadata=METADATA, further=norm)

    with pytest.raises(ConfigError, match=r"blk\.0\.attn_norm\.weight, which is not a LoRA tensor"):
        load(file, llama)


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "hf", "qwen35")
    pair = np.ones((2, 96), np.float32), np.ones((64, 2), np.float32)
    file = write_pairs(
        tmp_path / "a.gguf", "qwen35", {"blk.0.ssm_out.weight": pair}, metadata=METADATA
    )

    with pytest.raises(
        ConfigError, match=r"blk\.0\.ssm_out\.weight, whose inputs are permuted in the base model"
    ):
        load(file, base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-40], "ends at byte"),
        (lambda data: data[:30], "cannot be read as a GGUF file"),
        (lambda data: b"PK" + data[2:], "it does not begin with GGUF"),
        (lambda data: b"", "cannot be read as a GGUF file"),
    ],
)
def test_the_error_names_a_damaged_file(
    change: Callable[[bytes], bytes], message: str, llama: BaseModules, tmp_path: Path
) -> None:
    file = write_pairs(tmp_path / "a.gguf", "llama", {QUERY: PAIR}, metadata=METADATA)
    file.write_bytes(change(file.read_bytes()))

    with pytest.raises(ConfigError, match=f"a.gguf.*{message}"):
        load(file, llama)


def test_a_file_beyond_the_limit_is_not_read(
    llama: BaseModules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_pairs(tmp_path / "a.gguf", "llama", {QUERY: PAIR}, metadata=METADATA)
    monkeypatch.setattr("config.lora.adapter.MAX_FILE_BYTES", 1000)

    with pytest.raises(ConfigError, match=r"a.gguf has \d+ bytes, at most 1000 are allowed"):
        load(file, llama)
    monkeypatch.undo()
    monkeypatch.setattr("config.lora.gguf_adapter.MAX_NUMBERS", 255)
    with pytest.raises(ConfigError, match=r"a.gguf has 256 values, at most 255 are allowed"):
        load(file, llama)


def test_a_link_out_of_the_folder_is_not_followed(llama: BaseModules, tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "a.gguf", "llama", {QUERY: PAIR}, metadata=METADATA)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.gguf").symlink_to(file)
    link = AdapterFolder(str(tmp_path / "below" / "b.gguf"), str(tmp_path / "below"), "b.gguf")

    with pytest.raises(ConfigError, match=r"b\.gguf is outside --lora-dir"):
        load_adapter(link, llama, 16, ())


def sparse_file(path: Path, header: bytes, num_bytes: int) -> Path:
    """A sparse file of `num_bytes` that begins with `header`."""
    path.write_bytes(header)
    os.truncate(path, num_bytes)
    return path


def peak_of(call: Callable[[], object]) -> int:
    """Growth of the peak of this process's resident memory during `call`, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_a_large_file_with_a_wrong_header_is_refused_without_reading_it(
    llama: BaseModules, tmp_path: Path
) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)
    file = sparse_file(tmp_path / "a.gguf", header, 2**30)

    def refused() -> None:
        with pytest.raises(ConfigError, match="tensors, at most"):
            load(file, llama)

    began_s = time.process_time()
    assert peak_of(refused) < 64 * 2**20
    assert time.process_time() - began_s < machine_s(1.0)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            struct.pack("<QQ", 0, 1) + struct.pack("<QsIIQ", 1, b"a", 9, 8, 2**20),
            "up to 'a' have 1048576 elements, at most 65536 are allowed",
        ),
        (struct.pack("<QQ", 2**17, 0), "131072 tensors, at most 128 are allowed"),
        (struct.pack("<QQ", 0, 2**16), "65536 keys, at most 1024 are allowed"),
    ],
    ids=["texts", "tensors", "keys"],
)
def test_a_header_that_takes_long_to_parse_is_refused_by_its_counts(
    header: bytes, message: str, llama: BaseModules, tmp_path: Path
) -> None:
    begin = b"GGUF" + struct.pack("<I", 3) + header
    file = sparse_file(tmp_path / "a.gguf", begin, 2**24)

    began_s = time.process_time()
    with pytest.raises(ConfigError, match=message):
        load(file, llama)
    assert time.process_time() - began_s < machine_s(0.5)


def test_a_file_with_too_many_weights_is_refused_without_reading_them(
    llama: BaseModules, tmp_path: Path
) -> None:
    pairs = {"blk.0.attn_q.weight": factors(random_product((64, 64), np.random.default_rng()), 3)}
    small = write_pairs(tmp_path / "small.gguf", "llama", pairs, metadata=METADATA)
    data = bytearray(small.read_bytes())
    for name, shape in ((b"lora_a", (64, 3)), (b"lora_b", (3, 64))):
        # The number of dimensions and the sizes follow the name in the directory.
        place = data.index(b"blk.0.attn_q.weight." + name) + len(b"blk.0.attn_q.weight." + name)
        assert struct.unpack_from("<IQQ", data, place) == (2, *shape)
        struct.pack_into("<IQQ", data, place, 2, 2**13, 2**14)
    place = data.index(b"blk.0.attn_q.weight.lora_b") + len(b"blk.0.attn_q.weight.lora_b")
    # The second matrix begins after the first.
    struct.pack_into("<Q", data, place + 4 + 16 + 4, 2**29)
    file = sparse_file(tmp_path / "a.gguf", bytes(data), 2**30 + 2**20)

    def refused() -> None:
        with pytest.raises(ConfigError, match="268435456 values, at most"):
            load(file, llama)

    assert peak_of(refused) < 64 * 2**20


def test_the_hash_of_a_gguf_adapter_covers_metadata_and_weights(
    llama: BaseModules, tmp_path: Path
) -> None:
    pairs = {"blk.0.attn_q.weight": factors(random_product((64, 64), np.random.default_rng(0)), 3)}
    file = write_pairs(tmp_path / "a.gguf", "llama", pairs, metadata=METADATA)
    data = file.read_bytes()
    contents = {load(file, llama).content}
    for place in (len(data) - 40, len(data) // 2):
        changed = bytearray(data)
        changed[place] ^= 1
        file.write_bytes(changed)
        contents.add(load(file, llama).content)

    assert len(contents) == 3
