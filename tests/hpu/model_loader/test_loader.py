"""Weights from safetensors: every file layout, and an error for every mismatch."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lazy_loading import assert_lazy_load_copies_nothing
from paged_harness import load_decoder
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor, nn

from config.checkpoint.safetensors_files import read_header
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.shard import Interval
from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint
from hpu.model_loader import tensor_reader
from hpu.model_loader.loader import load_weights
from hpu.model_loader.tensor_reader import Read, TensorReader
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model

WEIGHTS = "model.safetensors"
SIDE = 1536
"""Rows and columns of the 9 MiB float32 matrices for measuring memory."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), attention_bias=True)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _change(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of the checkpoint; None removes a tensor, and two underscores stand in for a
    dot."""
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def _state(folder: Path) -> dict[str, Tensor]:
    return dict(load_decoder(folder).state_dict())


def test_merged_projections_are_concatenated_by_rows(original: Path) -> None:
    tensors = load_file(original / WEIGHTS)
    prefix = "model.layers.1.self_attn."

    state = _state(original)

    parts = [tensors[f"{prefix}{name}_proj.weight"] for name in "qkv"]
    biases = [tensors[f"{prefix}{name}_proj.bias"] for name in "qkv"]
    assert torch.equal(state["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(parts))
    assert torch.equal(state["model.layers.1.self_attn.qkv_proj.bias"], torch.cat(biases))


def test_shards_give_the_same_weights_as_a_single_file(original: Path, tmp_path: Path) -> None:
    sharded = make_tiny("llama", tmp_path, attention_bias=True, max_shard_size="100KB")

    state = _state(sharded)

    assert len(list(sharded.glob("*.safetensors"))) > 2
    for name, tensor in _state(original).items():
        assert torch.equal(state[name], tensor), name


def test_weights_are_converted_to_the_model_s_dtype(original: Path) -> None:
    model = load_decoder(original, dtype=torch.bfloat16)

    tensors = load_file(original / WEIGHTS)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"].bfloat16())


@pytest.mark.parametrize("family", ["llama", "glm4_moe", "granitemoe"])
def test_loading_to_a_lazy_device_takes_the_memory_of_the_weights_and_no_copies(
    family: str, original: Path, tmp_path: Path
) -> None:
    if family != "llama":
        original = make_tiny(family, tmp_path)

    assert_lazy_load_copies_nothing(original, _state(original))


def test_progress_counts_bytes_up_to_the_total(original: Path) -> None:
    config = read_model_config(str(original))
    model = build_model(config, ModelBuild(dtype=torch.float32, device=torch.device("cpu")))
    seen: list[tuple[int, int]] = []

    load_weights(model, str(original), on_progress=lambda done, total: seen.append((done, total)))

    sizes = [tensor.nbytes for tensor in load_file(original / WEIGHTS).values()]
    assert sorted(last[0] - first[0] for first, last in pairwise([(0, 0), *seen])) == sorted(sizes)
    assert {total for _, total in seen} == {sum(sizes)}


class _Matrices(nn.Module):
    """A model whose parameters are each a checkpoint tensor in another dtype."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            # Unwritten zeros would not be resident in memory.
            filled = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
            self.register_parameter(name, nn.Parameter(filled, requires_grad=False))
        self.weight_map = WeightMap(tuple(WeightSpec(name, (SIDE, SIDE), name) for name in names))


def _memory_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


def test_loading_needs_at_most_one_shard_beside_the_weights(tmp_path: Path) -> None:
    num_shards, per_shard = 6, 4
    names = [[f"{shard}_{index}" for index in range(per_shard)] for shard in range(num_shards)]
    for shard, inside in enumerate(names):
        tensors = {name: torch.full((SIDE, SIDE), float(shard)) for name in inside}
        save_file(tensors, tmp_path / f"{shard}.safetensors")
    model = _Matrices([name for inside in names for name in inside])
    before = _memory_bytes("VmRSS")
    # Reset the peak: https://docs.kernel.org/filesystems/proc.html
    Path("/proc/self/clear_refs").write_text("5")

    load_weights(model, str(tmp_path), on_progress=lambda done, total: None)

    shard_bytes = per_shard * SIDE * SIDE * 4
    assert _memory_bytes("VmHWM") - before < 1.25 * shard_bytes
    for shard, inside in enumerate(names):
        for name in inside:
            assert (model.get_parameter(name) == shard).all()


def test_the_error_names_a_file_that_is_truncated_while_it_is_read(folder: Path) -> None:
    stored = read_header(folder / WEIGHTS)[-1]
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(stored.offset + 1)
    target = torch.empty(stored.shape)

    with (
        TensorReader() as reader,
        pytest.raises(ConfigError, match=r"model.safetensors cannot be read: it ends at byte \d+"),
    ):
        list(reader.read(folder / WEIGHTS, [Read(stored, target)]))


def test_the_error_names_a_missing_tensor_and_its_shape(folder: Path) -> None:
    _change(folder, model__layers__1__mlp__up_proj__weight=None)

    with pytest.raises(
        ConfigError, match=r"1 of 29 are missing: model.layers.1.mlp.up_proj.*128x64"
    ):
        load_decoder(folder)


@pytest.mark.parametrize("piece_bytes", [64, 1000, tensor_reader.PIECE_BYTES])
@pytest.mark.parametrize(
    ("dim", "intervals"),
    [
        (0, ((1, 3),)),
        (0, ((0, 1), (4, 5))),
        (1, ((2, 5), (6, 7))),
        (2, ((0, 3),)),
        (2, ((1, 2), (5, 11))),
    ],
)
def test_only_the_requested_intervals_of_a_tensor_are_read(
    dim: int,
    intervals: tuple[Interval, ...],
    piece_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_reader, "PIECE_BYTES", piece_bytes)
    tensor = torch.arange(5 * 7 * 11, dtype=torch.int16).view(5, 7, 11)
    # Tensor "a" comes first, so that "b" does not begin at a page boundary.
    save_file({"a": torch.zeros(3, dtype=torch.int32), "b": tensor}, tmp_path / WEIGHTS)
    (stored,) = (item for item in read_header(tmp_path / WEIGHTS) if item.name == "b")
    expected = torch.cat([tensor.narrow(dim, a, b - a) for a, b in intervals], dim)
    target = torch.full_like(expected, -1)

    with TensorReader() as reader:
        list(reader.read(tmp_path / WEIGHTS, [Read(stored, target, dim, intervals)]))

        assert reader.num_bytes == expected.nbytes
    assert torch.equal(target, expected)


def test_reading_columns_of_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / WEIGHTS
    save_file({"a": torch.zeros(64, 64)}, file)
    (stored,) = read_header(file)
    file.write_bytes(file.read_bytes()[:-64])
    target = torch.empty(64, 2)

    with (
        TensorReader() as reader,
        pytest.raises(ConfigError, match="cannot be read: it ends before byte"),
    ):
        list(reader.read(file, [Read(stored, target, 1, ((0, 2),))]))


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return make_tiny("glm4_moe", tmp_path / "experts", num_nextn_predict_layers=1)


def test_experts_are_stacked_with_gate_before_up(experts: Path) -> None:
    tensors = load_file(experts / WEIGHTS)
    prefix = "model.layers.1.mlp.experts."

    state = _state(experts)

    for index in range(8):
        gate, up, down = (
            tensors[f"{prefix}{index}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        assert torch.equal(state[f"{prefix}w13_weight"][index], torch.cat((gate, up)))
        assert torch.equal(state[f"{prefix}w2_weight"][index], down)


def test_merged_expert_tensors_are_loaded_into_the_same_parameters(tmp_path: Path) -> None:
    folder = make_tiny("granitemoeshared", tmp_path)
    tensors = load_file(folder / WEIGHTS)

    state = _state(folder)

    prefix = "model.layers.1."
    for name, stored in (
        ("block_sparse_moe.experts.w13_weight", "block_sparse_moe.input_linear.weight"),
        ("block_sparse_moe.experts.w2_weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.shared_experts.gate_up_proj.weight", "shared_mlp.input_linear.weight"),
    ):
        assert torch.equal(state[prefix + name], tensors[prefix + stored])


def test_the_error_names_a_missing_expert_and_its_shape(experts: Path) -> None:
    _change(experts, model__layers__1__mlp__experts__7__up_proj__weight=None)

    with pytest.raises(
        ConfigError, match=r"are missing: model.layers.1.mlp.experts.7.up_proj.weight 48x64"
    ):
        load_decoder(experts)


def test_multi_token_prediction_layers_are_skipped(experts: Path) -> None:
    expected = _state(experts)
    _change(
        experts,
        model__layers__2__mlp__gate__weight=torch.zeros(8, 64),
        model__layers__2__eh_proj__weight=torch.zeros(64, 128),
    )

    check_checkpoint(EngineConfig(str(experts)), str(experts))

    assert _state(experts).keys() == expected.keys()


def test_the_error_names_an_unexpected_tensor(folder: Path) -> None:
    _change(folder, model__layers__0__mlp__extra__weight=torch.zeros(2))

    with pytest.raises(ConfigError, match=r"does not have model.layers.0.mlp.extra.weight in"):
        load_decoder(folder)


def test_the_error_names_a_tensor_of_another_shape_and_both_shapes(folder: Path) -> None:
    _change(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(64, 64))

    with pytest.raises(ConfigError, match=r"k_proj.weight in .* is 64x64, the model needs 32x64"):
        load_decoder(folder)


def test_an_error_names_all_kinds_of_mismatches(folder: Path) -> None:
    _change(
        folder,
        model__layers__0__self_attn__k_proj__weight=torch.zeros(64, 64),
        model__layers__1__mlp__up_proj__weight=None,
        **{f"extra_{index}": torch.zeros(2) for index in range(7)},
    )

    with pytest.raises(ConfigError) as error:
        load_decoder(folder)

    assert str(error.value) == (
        f"the tensors in {folder} do not match the model: model.layers.0.self_attn.k_proj.weight "
        "in model.safetensors is 64x64, the model needs 32x64; 1 of 29 are missing: "
        "model.layers.1.mlp.up_proj.weight 128x64; the model does not have model.extra_0 in "
        "model.safetensors, model.extra_1 in model.safetensors, model.extra_2 in "
        "model.safetensors, model.extra_3 in model.safetensors, model.extra_4 in "
        "model.safetensors and 2 more"
    )


def test_integer_weights_without_a_quantization_config_are_refused(folder: Path) -> None:
    _change(folder, model__norm__weight=torch.zeros(64, dtype=torch.int8))

    with pytest.raises(ConfigError, match=r"model.norm.weight .* is I8, .* no quantization_config"):
        load_decoder(folder)


def test_rope_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    _change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))

    load_decoder(folder)


def test_an_lm_head_in_a_tied_checkpoint_is_ignored(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, tie_word_embeddings=True)
    _change(folder, lm_head__weight=torch.zeros(320, 64))

    model = load_decoder(folder)

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.abs().sum() > 0


def test_pickles_are_refused_by_name(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_decoder(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()

    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        load_decoder(folder)


def test_the_error_names_a_truncated_weight_file(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ConfigError, match=r"model.safetensors is not a complete safetensors file"):
        load_decoder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which does not exist"),
        ({"weight_map": {"a": "../x.safetensors"}}, "it must be a safetensors file in its folder"),
        ({"weight_map": {"a": "x.bin"}}, "it must be a safetensors file in its folder"),
        ({}, "is not an index of safetensors files"),
    ],
)
def test_a_wrong_index_is_an_error(folder: Path, index: dict[str, object], message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigError, match=message):
        load_decoder(folder)
