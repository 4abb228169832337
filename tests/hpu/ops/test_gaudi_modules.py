"""Attention operators on Gaudi as the FP8 compressor sees them: by class name and path, and
replaced by modules with the arguments of the compressor's modules."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
from emulated import emulated
from paged_harness import PagedHarness, load_decoder
from tiny_models import make_tiny
from torch import Tensor, nn

from config.engine import EngineConfig
from config.model.read_config import read_model_config
from hpu.backends.select import select_backend
from hpu.distributed.process_groups import ProcessGroup
from hpu.model_loader.loader import load_weights
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.ops.block_softmax import REFERENCES

PATCHED_CLASSES = {
    *("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"),
    *("RowParallelLinear", "ReplicatedLinear", "ParallelLMHead"),
    *("Matmul", "B2BMatmul", "Softmax", "ModuleFusedSDPA", "VLLMKVCache"),
}
"""The classes in the compressor's table that a dense decoder can have."""

LAYER = {
    "self_attn.qkv_proj": "QKVParallelLinear",
    "self_attn.o_proj": "RowParallelLinear",
    "self_attn.attn.impl.matmul_qk": "Matmul",
    "self_attn.attn.impl.softmax": "Softmax",
    "self_attn.attn.impl.matmul_av": "Matmul",
    "self_attn.attn.impl.batch2block_matmul": "B2BMatmul",
    "self_attn.attn.impl.block2batch_matmul": "B2BMatmul",
    "self_attn.attn.impl.k_cache": "VLLMKVCache",
    "self_attn.attn.impl.v_cache": "VLLMKVCache",
    "self_attn.attn.impl.fused_scaled_dot_product_attention": "ModuleFusedSDPA",
    "mlp.gate_up_proj": "MergedColumnParallelLinear",
    "mlp.down_proj": "RowParallelLinear",
}

Calls = dict[str, list[tuple[Any, ...]]]
"""Arguments of each call, with tensors shown as shapes, by the module's name in its layer."""


def shown(argument: Any) -> Any:
    return tuple(argument.shape) if isinstance(argument, Tensor) else argument


class Double(nn.Module):
    """Copies the attributes of the module that it replaces, like the compressor's classes."""

    def __init__(self, original: nn.Module, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.__dict__.update(original.__dict__)
        self.__dict__["original"] = original
        self.calls = calls


class MatmulDouble(Double):
    def forward(self, input: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        self.calls.append((shown(input), shown(other)))
        return self.original(input, other, out=out)  # type: ignore[no-any-return]


class SoftmaxDouble(Double):
    def forward(self, x: Tensor, dim: int | None = None, invAttnHead: Any = None) -> Tensor:
        self.calls.append((shown(x), dim))
        return self.original(x, dim)  # type: ignore[no-any-return]


class FusedDouble(Double):
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "None",
    ) -> Tensor:
        options = (attn_mask, is_causal, valid_seq_len, seq_padding_type)
        self.calls.append(tuple(map(shown, (q, k, v, *options))))
        out: Tensor = self._hpu_kernel_fsdpa.apply(
            *(q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute),
            *(valid_seq_len, seq_padding_type),
        )
        return out


class CacheDouble(Double):
    """Stores bfloat16 in the cache, and returns float32."""

    def forward(
        self, input: Tensor, cache: Tensor, slot_mapping: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.calls.append((*map(shown, (input, cache, slot_mapping)), self.is_v_cache))
        stored = self.original(input.to(cache.dtype), cache, slot_mapping, *args, **kwargs)
        # The compressor returns the whole cache dequantized; the caller must not use it.
        return torch.full_like(stored, torch.nan, dtype=torch.float32)

    def fetch_from_cache(self, cache: Tensor, blocks: Tensor, scales: Any = None) -> Tensor:
        assert not self.use_contiguous_pa
        self.calls.append((shown(cache), shown(blocks)))
        return self.original.fetch_from_cache(cache, blocks).float()  # type: ignore[no-any-return]


DOUBLES = {
    "Matmul": MatmulDouble,
    "B2BMatmul": MatmulDouble,
    "Softmax": SoftmaxDouble,
    "ModuleFusedSDPA": FusedDouble,
    "VLLMKVCache": CacheDouble,
}


def swap(model: nn.Module) -> Calls:
    """Replace every module whose class has a double."""
    calls: Calls = defaultdict(list)
    for path, module in list(model.named_modules()):
        double = DOUBLES.get(type(module).__name__)
        if double is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, double(module, calls[name]))
    return calls


def fuse(model: Decoder, **settings: Any) -> None:
    from hpu.ops.gaudi import GaudiKernels

    model.use_kernels(
        GaudiKernels(**{"fused_sdpa": True, "block_softmax": "adjustment", **settings})
    )


def run(harness: PagedHarness) -> Tensor:
    """Logits of two prompts, of a prompt continued over its cached context, and of a decode."""
    parts = [
        *harness.prefill({0: list(range(20, 26)), 1: [40, 41]}).values(),
        *harness.prefill({0: [50, 51]}).values(),
        *harness.decode({0: 52, 1: 42}, pad_blocks=1).values(),
    ]
    return torch.cat([part.view(-1, 320) for part in parts])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with 4 heads and 2 KV heads of 16 entries."""
    return make_tiny("llama", tmp_path, num_hidden_layers=1)


@pytest.fixture
def kernels() -> Iterator[None]:
    """The emulator, with operators that also accept CPU tensors."""
    with emulated(lazy=False, generation="gaudi3", runs_on_host=True), torch.inference_mode():
        yield


def test_every_operator_has_the_class_and_path_that_the_compressor_expects(
    tmp_path: Path,
) -> None:
    model = load_decoder(make_tiny("llama", tmp_path, num_hidden_layers=2))
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))

    prepared = backend.prepare(model)

    found = {
        path: type(module).__name__
        for path, module in prepared.named_modules()
        if type(module).__name__ in PATCHED_CLASSES
    }
    layers = {f"model.layers.{i}.{path}": name for i in (0, 1) for path, name in LAYER.items()}
    assert found == {**layers, "lm_head": "ParallelLMHead"}
    assert not [path for path, _ in prepared.named_parameters() if ".attn." in path]
    backend.close()


def test_experts_have_the_classes_and_paths_of_vllm(tmp_path: Path, kernels: None) -> None:
    model = load_decoder(make_tiny("qwen2_moe", tmp_path, num_hidden_layers=1))
    before = {name for name, _ in model.named_parameters()}

    fuse(model)

    mlp = model.model.layers[0].mlp
    found = {path: type(module).__name__ for path, module in mlp.experts.named_modules() if path}
    lists = dict.fromkeys(("moe_op.w13_list", "moe_op.w2_list"), "ModuleList")
    weights = {f"{name}.{i}": "MoeMatmul" for name in lists for i in range(4)}
    assert found == {"moe_op": "VllmMixtureOfExpertsOp", **lists, **weights}
    assert {name for name, _ in model.named_parameters()} == before
    assert type(mlp.gate).__name__ == "ReplicatedLinear"
    view = mlp.experts.moe_op.w13_list[2].weight
    assert view.data_ptr() == mlp.experts.w13_weight[2].data_ptr()


def test_an_activation_without_a_kernel_runs_on_plain_operations(
    tmp_path: Path, kernels: None
) -> None:
    folder = make_tiny("mixtral", tmp_path, hidden_act="gelu")
    model = load_decoder(folder)

    fuse(model)

    assert [layer.mlp.experts.moe_op for layer in model.model.layers] == [None, None]
    expected = run(PagedHarness(load_decoder(folder)))
    torch.testing.assert_close(run(PagedHarness(model)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("release", "fields", "name"),
    [
        ("1.24.0", {"swiglu_limit": 7.0}, "VllmMixtureOfExpertsOp"),
        ("1.24.0", {"swiglu_limit": 6.0}, "NoneType"),
        ("1.22.1", {"swiglu_limit": 7.0}, "NoneType"),
    ],
)
def test_experts_with_biases_run_on_the_kernel_of_their_activation_where_it_exists(
    release: str,
    fields: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random_checkpoint.register(monkeypatch)
    folder = random_checkpoint.write_random(tmp_path, "GptOssForCausalLM", **fields)
    plain, model = load_decoder(folder), load_decoder(folder)
    hidden = 3 * torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))

    with emulated(release=release, runs_on_host=True), torch.inference_mode():
        fuse(model)
        pairs = zip(plain.model.layers, model.model.layers, strict=True)
        outs = [(theirs.mlp(hidden), ours.mlp(hidden)) for theirs, ours in pairs]

    for layer, (expected, found) in zip(model.model.layers, outs, strict=True):
        assert type(layer.mlp.experts.moe_op).__name__ == name
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_kernels_of_expert_parallel_ranks_add_up_to_all_experts(
    tmp_path: Path, kernels: None
) -> None:
    folder = make_tiny("mixtral", tmp_path, num_hidden_layers=1)
    expected_of = load_decoder(folder).layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 64, generator=generator)
    ids = torch.rand(6, 4, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(6, 2, generator=generator)

    parts = []
    for rank in (0, 1):
        groups = {name: ProcessGroup(range(2), rank) for name in ("group", "expert_group")}
        config, device = read_model_config(str(folder)), torch.device("cpu")
        model = build_model(config, ModelBuild(dtype=torch.float32, device=device, **groups))
        load_weights(model, str(folder), on_progress=lambda done, total: None, **groups)
        fuse(model)
        moe_op = model.layers[0].mlp.experts.moe_op
        assert (moe_op.experts_min, moe_op.experts_max) == (2 * rank, 2 * rank + 1)
        parts.append(moe_op(hidden, ids, weights, True, "silu"))

    expected = expected_of(hidden, ids, weights)
    assert all(part.std() > 0.1 for part in parts)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-4, atol=1e-4)


def test_only_the_first_rank_passes_the_second_bias_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint.register(monkeypatch)
    random_checkpoint.write_config(tmp_path, "GptOssForCausalLM", swiglu_limit=7.0)
    config = read_model_config(str(tmp_path))
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    with emulated(release="1.24.0", runs_on_host=True):
        for rank in (0, 1):
            model = build_model(config, ModelBuild(**options, group=ProcessGroup(range(2), rank)))
            experts = model.layers[0].mlp.experts
            experts.w2_bias.fill_(2.0)
            fuse(model)
            biases = {float(value) for expert in experts.moe_op.w2_list for value in expert.bias}
            assert biases == ({0.0} if rank else {2.0})


def test_without_a_gaudi_attention_has_no_modules(folder: Path) -> None:
    attention = load_decoder(folder).model.layers[0].self_attn.attn

    assert list(attention.children()) == []


def test_swapped_modules_receive_every_call(folder: Path, kernels: None) -> None:
    model = load_decoder(folder)
    fuse(model)
    calls = swap(model)
    harness = PagedHarness(model, num_blocks=16)

    run(harness)

    new, all_slots, all_blocks = (12, 2, 16), (68, 2, 16), (17, 4, 2, 16)
    written = [(new, all_slots, (12,)), ((2, 2, 16), all_slots, (2,))]
    # The prompt's 6 tokens take 2 blocks; the decode has 3 + 1 blocks and a padding block.
    reads = [(all_blocks, (2,)), (all_blocks, (5,))]
    for name, is_value in (("k_cache", False), ("v_cache", True)):
        first, second = ((*shapes, is_value) for shapes in written)
        assert calls[name] == [first, second, reads[0], second, reads[1]]
    assert calls["fused_scaled_dot_product_attention"] == [
        ((2, 4, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16), None, True, (2,), "right"),
        ((1, 4, 2, 16), (1, 2, 10, 16), (1, 2, 10, 16), (1, 1, 2, 10), False, None, "right"),
    ]
    assert calls["batch2block_matmul"] == [((5, 2), (2, 64))]
    assert calls["matmul_qk"] == [((5, 2, 2, 1, 16), (5, 2, 1, 16, 4))]
    assert calls["matmul_av"] == [((5, 2, 2, 1, 4), (5, 2, 1, 4, 16))]
    assert calls["block2batch_matmul"] == [((2, 5), (5, 64))]
    assert calls["softmax"] == []


def test_unfused_prompts_call_the_products_and_the_softmax(folder: Path, kernels: None) -> None:
    model = load_decoder(folder)
    fuse(model, fused_sdpa=False)
    calls = swap(model)

    PagedHarness(model).prefill({0: list(range(20, 26)), 1: [40, 41]})

    assert calls["matmul_qk"] == [((2, 2, 12, 16), (2, 2, 16, 6))]
    assert calls["softmax"] == [((2, 2, 2, 6, 6), -1)]
    assert calls["matmul_av"] == [((2, 2, 12, 6), (2, 2, 6, 16))]
    assert calls["fused_scaled_dot_product_attention"] == []


@pytest.mark.parametrize("fused_sdpa", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("block_softmax", [*REFERENCES, "adjustment"])
def test_modules_give_the_logits_of_plain_operations(
    folder: Path, kernels: None, fused_sdpa: bool, block_softmax: str
) -> None:
    model = load_decoder(folder)
    fuse(model, fused_sdpa=fused_sdpa, block_softmax=block_softmax)

    expected = run(PagedHarness(load_decoder(folder)))
    found = run(PagedHarness(model))

    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("contiguous", [False, True], ids=["gathered", "contiguous"])
def test_a_cache_in_another_dtype_is_written_and_read_through_its_modules(
    folder: Path, kernels: None, contiguous: bool
) -> None:
    def run_alone(model: Decoder, dtype: torch.dtype) -> Tensor:
        """Logits of a prompt in two chunks and of a decode, all in the first blocks."""
        harness = PagedHarness(model, num_blocks=16)
        harness._free = iter(range(16))
        caches = [(keys.to(dtype), values.to(dtype)) for keys, values in harness.caches]
        model.bind_caches(caches, harness.block_size)
        first = harness.prefill({0: list(range(20, 26))})[0]
        second = harness.prefill({0: [50, 51, 52]})[0]
        return torch.cat((first, second, harness.decode({0: 53})[0].unsqueeze(0)))

    plain, swapped = load_decoder(folder), load_decoder(folder)
    for model in (plain, swapped):
        fuse(model)
        if contiguous:
            model.read_contiguously()
    swap(swapped)

    expected = run_alone(plain, torch.float32)
    found = run_alone(swapped, torch.bfloat16)

    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    assert torch.equal(found[:6], expected[:6]), "new tokens are not read from the cache"
    assert not torch.equal(found[-1], expected[-1])
