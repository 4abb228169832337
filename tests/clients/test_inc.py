"""Intel Neural Compressor itself, on the emulated card: measure, quantize, serve.

The compressor binds the card at import, so each card gets a fresh import.
"""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import emulated
from live import ROOT, running
from paged_harness import load_decoder
from strict_card import COUNTERS, STRICT
from tiny_models import make_tiny
from tiny_vision import image_bytes, make_tiny_vision, picture
from two_prompts import greedy, random_traffic, working
from worker_rig import WorkerRig

from config.errors import ConfigError
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.model.quantization.inc import read_quant_config
from config.model.read_config import read_model_config
from config.params.sampling import SamplingParams
from hpu.distributed.process_groups import SINGLE
from hpu.model_loader.loader import load_weights
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model
from hpu.quantization.inc import IncCompressor, IncScheme
from server.offline.calibration import finish_measures, write_configs
from server.offline.llm import LLM

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
pytest.importorskip("neural_compressor")

GRAPHS = ExecutionConfig(mode="hpu-graphs")
GAUDI3 = EmulatorSettings(card="gaudi3", is_strict=True)
MODES = ("lazy", "hpu-graphs", "torch-compile", "eager")
LINEARS = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
ATTENTION = {
    *("matmul_qk", "matmul_av", "batch2block_matmul", "block2batch_matmul", "k_cache", "v_cache"),
    "fused_scaled_dot_product_attention",
}
"""Modules that a launch with fused attention calls."""
ATTENTION_CLASSES = ("Matmul", "B2BMatmul", "Softmax", "ModuleFusedSDPA", "VLLMKVCache")
LEAST_LOGPROB = -1000
CROSS = ("q_proj", "kv_proj", "o_proj")
EXPERTS = {
    "moe_op",
    *(f"{kind}_list.{i}" for kind in ("moe_op.w13", "moe_op.w2") for i in range(4)),
}
LATENT = {
    *("fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"),
    *(
        f"mla_attn.mla_attn.impl.{name}"
        for name in (*ATTENTION - {"k_cache", "v_cache"}, "latent_cache_k")
    ),
}
PROMPT = [(37 * i) % 316 + 4 for i in range(120)]


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    unbind()


def unbind() -> None:
    """Unbind the compressor from its card, by removing its modules."""
    for name in list(sys.modules):
        if name.split(".")[0] == "neural_compressor":
            del sys.modules[name]


NO_WARMUP = WarmupConfig(mode="skip")


def compressed(
    folder: Path,
    config: Path,
    execution: ExecutionConfig = GRAPHS,
    emulator: EmulatorSettings = STRICT,
    **settings: Any,
) -> AbstractContextManager[WorkerRig]:
    """A worker with a model that the compressor measures or quantizes."""
    return working(
        folder,
        device="hpu-emulator",
        dtype="bfloat16",
        execution=execution,
        emulator=emulator,
        quantization="inc",
        quant_config=str(config),
        **settings,
    )


def measure(
    folder: Path, out: Path, emulator: EmulatorSettings = STRICT, **configured: Any
) -> Path:
    """Measure two prompts and random traffic; returns the configuration that quantizes with
    these measurements."""
    out.mkdir()
    options: dict[str, Any] = {"quantizes_cache": True, "skipped": [], "scale_method": "maxabs_hw"}
    measuring, quantizing = write_configs(out, **{**options, **configured})
    lazy = ExecutionConfig(mode="lazy")
    with compressed(folder, measuring, lazy, emulator, enforce_eager=True, warmup=NO_WARMUP) as rig:
        greedy(rig)
        random_traffic(rig)
    unbind()
    finish_measures(out, 1)
    return quantizing


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def quantizing(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(llama, tmp_path_factory.mktemp("measured") / "out")


def served(
    folder: Path,
    quantizing: Path,
    execution: ExecutionConfig = GRAPHS,
    emulator: EmulatorSettings = STRICT,
) -> tuple[list[list[int]], int]:
    """(tokens of two prompts and of random traffic from the quantized model, number of recipes).
    Asserts that nothing compiles after warm-up."""
    with compressed(folder, quantizing, execution, emulator) as rig:
        counters = torch.hpu.emulated.counters  # type: ignore[attr-defined]
        before = [counters.counts[name] for name in COUNTERS]
        found = greedy(rig) + random_traffic(rig)
        assert [counters.counts[name] for name in COUNTERS] == before
        assert before[0] > 0 and before[2] == 0
        num_recipes = len(counters.recipes)
    unbind()
    return found, num_recipes


def logprobs(folder: Path, **flags: Any) -> torch.Tensor:
    """Log-probabilities of a prompt's tokens. The prompt is prefilled in chunks over the cached
    context."""
    with LLM(
        str(folder),
        device="hpu-emulator",
        dtype="bfloat16",
        distributed_executor_backend="uni",
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=16,
        block_size=16,
        warmup="skip",
        **flags,
    ) as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    unbind()
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([row[token].logprob for row, token in rows if row is not None])


def test_every_module_that_a_launch_calls_is_measured_under_its_name_in_vllm(
    quantizing: Path,
) -> None:
    record = json.loads((quantizing.parent / "inc_output_hooks_maxabs_0_1.json").read_text())

    names = LINEARS | {f"self_attn.attn.impl.{name}" for name in ATTENTION}
    expected = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names}
    assert record["Nodes"].keys() == {*expected, "lm_head"}
    assert record["Mode"] == "DynamicRange"
    sizes = {len(node["inputs"]) for node in record["Nodes"].values()}
    assert sizes == {1, 2, 3}


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x` rounded to the FP8 range of a Gaudi 2, which ends at 240."""
    codes = (x / scale).clamp(-240, 240).to(torch.float8_e4m3fn)
    return codes.float() * scale


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.std())


def with_blocked(quantizing: Path, path: Path, *types: str, names: tuple[str, ...] = ()) -> Path:
    """The configuration with the same measurements, and with these classes and names blocked."""
    blocklist = {"types": types, "names": names}
    path.write_text(json.dumps({**json.loads(quantizing.read_text()), "blocklist": blocklist}))
    return path


@torch.inference_mode()
def test_products_equal_a_reference_with_fp8_rounded_operands(
    llama: Path, quantizing: Path
) -> None:
    weights = load_decoder(llama).state_dict()
    with compressed(llama, quantizing, warmup=NO_WARMUP) as rig:
        model = rig.worker.loaded.model
        file = quantizing.parent / "inc_output_hooks_maxabs_MAXABS_HW_0_1.json"
        scales = json.loads(file.read_text())["Nodes"]
        names = [name for name in scales if f"{name}.weight" in weights]
        for name in names:
            weight = weights[f"{name}.weight"].bfloat16().float()
            of_input, of_weight = scales[name]["inputs"][0], scales[name]["params"]["weight"]
            x = torch.randn(3, 5, weight.shape[1]).bfloat16()
            expected = rounded(x.float(), of_input) @ rounded(weight, of_weight).T
            found = model.get_submodule(name)(x.to("hpu")).cpu().float()
            assert torch.allclose(found, expected, rtol=0.01, atol=0.01), name

    assert len(names) == 2 * len(LINEARS) + 1


def test_logprobs_are_close_to_the_bfloat16_model(
    llama: Path, quantizing: Path, tmp_path: Path
) -> None:
    expected = logprobs(llama)
    linears = ("QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear")
    parts = {
        "all": ((), 0.3),
        "head": ((*linears, *ATTENTION_CLASSES), 0.05),
        "attention and cache": ((*linears, "ParallelLMHead"), 0.15),
    }
    for name, (blocked, tolerance) in parts.items():
        config = with_blocked(quantizing, tmp_path / "config.json", *blocked)
        found = logprobs(llama, quantization="inc", quant_config=str(config))
        # Each operand has four significant bits; the wide random weights magnify differences.
        assert 0.01 < relative(found, expected) < tolerance, name


def test_each_mode_gives_the_same_tokens_and_compiles_nothing_after_warm_up(
    llama: Path, quantizing: Path
) -> None:
    found = {mode: served(llama, quantizing, ExecutionConfig(mode=mode))[0] for mode in MODES}

    assert all(tokens == found["hpu-graphs"] for tokens in found.values())
    assert len({token for tokens in found["hpu-graphs"] for token in tokens}) > 20


def test_split_qkv_has_no_effect_on_compressed_layers(
    llama: Path, quantizing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lazy = ExecutionConfig(mode="lazy")
    with compressed(llama, quantizing, lazy, warmup=NO_WARMUP) as rig:
        expected = greedy(rig)
    unbind()
    split = replace(lazy, split_qkv=True)
    with compressed(llama, quantizing, split, warmup=NO_WARMUP) as rig:
        assert greedy(rig) == expected

    assert "--split-qkv has no effect on 2 of 2 layers" in caplog.text


def two_and_four_layer_folders(folder: Path) -> list[Path]:
    return [make_tiny("llama", folder / f"{n}", num_hidden_layers=n) for n in (2, 4)]


def test_layers_of_the_same_kind_share_recipes(tmp_path: Path) -> None:
    small, large = two_and_four_layer_folders(tmp_path)

    # One recipe each for an embedding, a layer and a head; weights are moved separately.
    recipes = [served(item, measure(item, item / "measured"))[1] for item in (small, large)]
    assert recipes[0] == recipes[1]


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration in the documentation."""
    text = (ROOT / "docs" / "inc.md").read_text("utf-8")
    (block,) = re.findall(r"```json\n(.*?dynamic_quantization.*?)```", text, re.DOTALL)
    path = tmp_path_factory.mktemp("dynamic") / "dynamic_quant.json"
    path.write_text(block, "utf-8")
    return path


def power_of_2(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


@torch.inference_mode()
@pytest.mark.parametrize(("emulator", "largest"), [(STRICT, 240), (GAUDI3, 448)])
def test_dynamic_scales_are_per_token_and_per_output(
    llama: Path, dynamic: Path, emulator: EmulatorSettings, largest: int
) -> None:
    weights = load_decoder(llama).state_dict()
    with compressed(llama, dynamic, emulator=emulator, warmup=NO_WARMUP) as rig:
        model = rig.worker.loaded.model
        names = {
            name
            for name, parameter in model.named_parameters()
            if parameter.dtype == torch.float8_e4m3fn and parameter.dim() == 2
        }
        for name in names:
            weight = weights[name].bfloat16().float()
            x = torch.randn(3, 5, weight.shape[1]).bfloat16()
            # The tokens have different sizes.
            x *= torch.logspace(-3, 3, 5).bfloat16().unsqueeze(1)
            operands = []
            for operand in (x.float(), weight):
                # Half of the range is kept free, as the compressor does.
                scale = power_of_2(operand.abs().amax(-1, keepdim=True) / (largest * 0.5))
                operands.append((operand / scale).to(torch.float8_e4m3fn).float() * scale)
            expected = operands[0] @ operands[1].T
            found = model.get_submodule(name.removesuffix(".weight"))(x.to("hpu")).cpu().float()
            torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-5, msg=name)

    paths = {f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in LINEARS}
    assert names == paths


def test_dynamic_scales_give_the_same_tokens_in_each_mode(llama: Path, dynamic: Path) -> None:
    found = {mode: served(llama, dynamic, ExecutionConfig(mode=mode))[0] for mode in MODES}

    assert all(tokens == found["hpu-graphs"] for tokens in found.values())
    assert len({token for tokens in found["hpu-graphs"] for token in tokens}) > 20


def test_logprobs_with_dynamic_scales_are_close_to_bfloat16_and_layers_share_recipes(
    llama: Path, dynamic: Path, tmp_path: Path
) -> None:
    found = logprobs(llama, quantization="inc", quant_config=str(dynamic))
    # The bound of static scales: each operand has four significant bits.
    assert 0.01 < relative(found, logprobs(llama)) < 0.3

    recipes = [served(folder, dynamic)[1] for folder in two_and_four_layer_folders(tmp_path)]
    assert recipes[0] == recipes[1]


def test_experts_are_quantized_with_the_kernel(tmp_path: Path) -> None:
    folder = make_tiny("mixtral", tmp_path / "model")
    quantizing = measure(folder, tmp_path / "out")

    found, _ = served(folder, quantizing)

    record = json.loads((tmp_path / "out" / "inc_output_hooks_maxabs_0_1.json").read_text())
    experts = "model.layers.1.block_sparse_moe.experts."
    names = {name.removeprefix(experts) for name in record["Nodes"] if name.startswith(experts)}
    assert names == EXPERTS
    moe_op = record["Nodes"][f"{experts}moe_op"]
    assert (len(moe_op["inputs"]), len(moe_op["outputs"])) == (1, 5)
    assert len({token for tokens in found for token in tokens}) > 20


def test_scales_on_a_gaudi_3_use_the_fp8_range_of_gaudi_3(llama: Path, tmp_path: Path) -> None:
    quantizing = measure(llama, tmp_path / "out", GAUDI3)

    found, _ = served(llama, quantizing, emulator=GAUDI3)

    file = tmp_path / "out" / "inc_output_hooks_maxabs_MAXABS_HW_0_1.json"
    nodes = json.loads(file.read_text())["Nodes"]
    weights = load_decoder(llama).state_dict()
    for name in [name for name in nodes if f"{name}.weight" in weights]:
        largest = weights[f"{name}.weight"].bfloat16().abs().max().item()
        # Half of the range is kept free, as the compressor does for weights.
        expected = 2.0 ** np.ceil(np.log2(largest / (448 * 0.5)))
        assert set(np.ravel(nodes[name]["params"]["weight"])) == {expected}, name
    scales = {float(scale) for node in nodes.values() for scale in np.ravel(node["inputs"])}
    assert all(np.log2(scale).is_integer() for scale in scales)
    assert scales - {16, 1, 1 / 16, 1 / 256}, "a Gaudi 2 has these four"
    assert len({token for tokens in found for token in tokens}) > 20


def test_mla_is_quantized_with_its_cache(tmp_path: Path) -> None:
    folder = make_tiny("deepseek_v3", tmp_path / "model")
    quantizing = measure(folder, tmp_path / "out")

    found, _ = served(folder, quantizing)

    record = json.loads((tmp_path / "out" / "inc_output_hooks_maxabs_0_1.json").read_text())
    attention = "model.layers.1.self_attn."
    names = {n.removeprefix(attention) for n in record["Nodes"] if n.startswith(attention)}
    assert names == LATENT
    assert len({token for tokens in found for token in tokens}) > 20


def test_weights_take_one_byte_and_a_skipped_cache_keeps_its_dtype(
    llama: Path, quantizing: Path, tmp_path: Path
) -> None:
    config = with_blocked(quantizing, tmp_path / "c.json", "VLLMKVCache", names=("lm_head",))
    found = {}
    for path in (quantizing, config):
        with compressed(llama, path, warmup=NO_WARMUP) as rig:
            model = rig.worker.loaded.model
            weights = dict(model.named_parameters())
            cache = rig.worker.serving.components.cache._layers[0][0]  # type: ignore[union-attr]
            found[path] = (
                {name: weight.dtype for name, weight in weights.items() if weight.dim() == 2},
                cache.dtype,
            )
        unbind()

    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    dtypes, cache_dtype = found[quantizing]
    assert {name for name, dtype in dtypes.items() if dtype != fp8} == {"model.embed_tokens.weight"}
    assert cache_dtype == fp8
    dtypes, cache_dtype = found[config]
    assert dtypes["lm_head.weight"] == cache_dtype == bf16


def test_loading_needs_the_memory_of_the_quantized_weights_and_one_extra_weight(
    llama: Path, quantizing: Path
) -> None:
    facts = read_model_config(str(llama))
    with emulated(strict=True) as card, torch.inference_mode():
        from hpu.ops.gaudi import GaudiKernels

        model = build_model(
            facts,
            ModelBuild(
                dtype=torch.bfloat16,
                device=torch.device("hpu", 0),
                max_model_len=64,
                quantization=IncScheme(),
            ),
        )
        load_weights(model, str(llama), on_progress=lambda done, total: None)
        model.use_kernels(GaudiKernels(fused_sdpa=True))
        IncCompressor(read_quant_config(str(quantizing)), SINGLE).patch(model)
        model.to("hpu")
        held = sum(parameter.nbytes for parameter in (*model.parameters(), *model.buffers()))
        peak = card.memory.peak

    # The largest temporary tensors belong to the head: bfloat16, magnitudes and FP8.
    assert peak - held < 2 * facts.vocab_size * facts.hidden_size * 2
    plain = sum(parameter.nbytes for parameter in load_decoder(llama).parameters()) // 2
    # All but the embedding and the norms take half.
    assert held < 0.65 * plain


def test_sleep_and_wake_up_change_no_output(llama: Path, quantizing: Path) -> None:
    with compressed(llama, quantizing) as rig:
        expected = greedy(rig)
        rig.sleep(1)
        rig.worker.wake_up(lambda progress: None)
        assert greedy(rig) == expected


def test_measurements_of_another_model_are_refused_with_file_and_module(
    llama: Path, quantizing: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    _, config = write_configs(out, quantizes_cache=True, skipped=[], scale_method="maxabs_hw")
    file = "inc_output_hooks_maxabs_0_1.npz"
    record = np.load(quantizing.parent / file, allow_pickle=True)["arr_0"].item()
    record["Nodes"] = {
        name: node for name, node in record["Nodes"].items() if "layers.1" not in name
    }
    np.savez(out / file, record)

    with pytest.raises(
        ConfigError, match=r"0_1\.npz has no measurements of 11 .* model\.layers\.1"
    ):
        served(llama, config)


def test_an_invalid_compressor_configuration_is_refused_with_its_path(
    llama: Path, quantizing: Path, tmp_path: Path
) -> None:
    fields = json.loads(quantizing.read_text())
    config = tmp_path / "wrong.json"
    config.write_text(json.dumps({**fields, "scale_method": "best"}))

    with pytest.raises(ConfigError, match=r"cannot use .*wrong\.json.*best"):
        served(llama, config)


def calibrate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gaudiserve", "calibrate", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_serve_on_two_ranks_uses_the_files_written_by_calibrate(
    llama: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "hello"}\n"how are you"\n')

    done = calibrate(
        str(llama),
        *("--data", str(data), "-o", str(tmp_path / "out"), "--device", "hpu-emulator"),
        *("--max-model-len", "64", "--max-tokens", "3", "--tensor-parallel-size", "2"),
    )

    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"QUANT_CONFIG={tmp_path}/out/maxabs_quant.json gaudiserve serve ")
    assert last.endswith("--tensor-parallel-size 2 --device hpu-emulator")
    names = {path.name for path in (tmp_path / "out").glob("*.npz")}
    prefix = "inc_output_hooks_maxabs"
    assert names == {
        *(f"{prefix}_{ranks}.npz" for ranks in ("0_1", "0_2", "1_2")),
        *(f"{prefix}_MAXABS_HW_{ranks}.npz" for ranks in ("0_2", "1_2")),
    }
    flags = last.split("gaudiserve serve ")[1].split()[1:]
    flags += ["--max-model-len=64", "--max-num-seqs=2", "--block-size=16"]
    flags += ["--num-gpu-blocks-override=8"]
    env = {"QUANT_CONFIG": f"{tmp_path}/out/maxabs_quant.json"}
    with running(str(llama), tmp_path / "log", *flags, env=env) as server:
        body = {"prompt": [3, 5, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        reply = server.ask("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 6
        assert server.ask("/v1/completions", body).json()["choices"] == reply.json()["choices"]


def question(index: int) -> list[dict[str, Any]]:
    data = base64.b64encode(image_bytes(picture(60 + 20 * index, 50, seed=index))).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "Who are you? " * 4}]
    return [{"role": "user", "content": parts}]


def logprobs_of_chat(folder: Path, **flags: Any) -> torch.Tensor:
    """Log-probabilities of the text that follows an image."""
    with LLM(
        str(folder),
        device="hpu-emulator",
        dtype="bfloat16",
        distributed_executor_backend="uni",
        max_model_len=128,
        max_num_seqs=2,
        block_size=16,
        warmup="skip",
        **flags,
    ) as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
        (output,) = llm.chat(question(2), params, use_tqdm=False)
    unbind()
    assert output.prompt_logprobs is not None
    ids = output.prompt_token_ids
    assert ids is not None
    rows = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    found = torch.tensor([row[token].logprob for row, token in rows if row is not None])
    # The image token is never an output of this model.
    return found[found > LEAST_LOGPROB]


@pytest.mark.timeout(600)
def test_cross_attention_is_quantized_with_measurements_of_images(tmp_path: Path) -> None:
    folder = make_tiny_vision("mllama", tmp_path / "model")
    data = tmp_path / "data.jsonl"
    samples = [json.dumps({"messages": question(index)}) for index in range(3)]
    data.write_text("\n".join([*samples, json.dumps("how are you")]) + "\n")

    done = calibrate(
        str(folder),
        *("--data", str(data), "-o", str(tmp_path / "out"), "--device", "hpu-emulator"),
        *("--max-model-len", "128", "--max-tokens", "4", "--all-modules"),
    )

    assert done.returncode == 0, done.stderr
    file = tmp_path / "out" / "inc_output_hooks_maxabs_MAXABS_HW_0_1.json"
    scales = json.loads(file.read_text())["Nodes"]
    cross = {f"model.layers.{layer}.self_attn.{name}" for layer in (1, 3) for name in CROSS}
    assert cross < scales.keys()
    assert all(scales[name]["inputs"][0] > 0 for name in cross)
    expected = logprobs_of_chat(folder)
    config = tmp_path / "out" / "maxabs_quant.json"
    found = logprobs_of_chat(folder, quantization="inc", quant_config=str(config))
    # Each operand has four significant bits.
    assert 0.01 < relative(found, expected) < 0.3
