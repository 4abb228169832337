"""The mode torch-compile with torch's real tracer: after warm-up nothing is traced or compiled, and
few operators run outside of compiled parts. Every graph break is an error."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import Reader, make_pooling
from tiny_models import make_tiny
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from two_prompts import LIMITS, random_traffic
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range
from config.engine import EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from hpu.backends.select import select_backend
from hpu.runner.model_runner import ModelRunner

TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(32, 32, 32),
    prompt_context=Range(0, 16, 16),
    decode_batch=Range(2, 2, 2),
    decode_blocks=Range(16, 16, 32),
)

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_hidden_layers": 3}, {}),
    "windowed": ("mistral", {"sliding_window": 12}, {"card": "gaudi3", "dtype": "bfloat16"}),
    "whole": ("llama", {}, {"regional_compilation": False}),
    "symbolic": ("granite", {}, {"compile_dynamic_shapes": True}),
}
"""Case name: (family, fields of its config, options)."""

LATER = dict.fromkeys(("windowed", "whole", "symbolic"), pytest.mark.slow)

MAX_GUARDS = {"qwen3": 390, "windowed": 360, "whole": 800, "symbolic": 400}
"""Maximum number of guards per compiled part: measured, plus a margin of 5 %."""


@contextmanager
def working(
    folder: Path,
    *,
    card: str = "gaudi2",
    dtype: str = "float32",
    guards_off: bool = False,
    **execution: Any,
) -> Iterator[WorkerRig]:
    """A warm worker on a strict card."""
    clear_compilation_metrics()
    mode = ExecutionConfig(mode="torch-compile", compile_fullgraph=True, **execution)
    rig = WorkerRig(
        folder,
        buckets=TABLE,
        steps=(2, 32, 16),
        device="hpu-emulator",
        dtype=dtype,
        execution=mode,
        emulator=EmulatorSettings(card=card, is_strict=True),
        warmup=WarmupConfig(full_guards_off=guards_off),
        **LIMITS,
    )
    try:
        yield rig
    finally:
        rig.worker.close()


def counted() -> tuple[int, int]:
    """(graphs that torch passed to the card's compiler, recipes)."""
    card = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
    return card["traces"], card["compilations"]


def eager_ops() -> int:
    """Number of operators that have run outside of compiled parts."""
    found: int = torch.hpu.emulated.counters.counts["eager_ops"]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATER.get(name, ())) for name in MODELS])
def test_after_warmup_nothing_is_compiled_and_few_operators_run_uncompiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, overrides, options = MODELS[name]
    sampling: list[int] = []
    original = ModelRunner._sample

    def measured(self: ModelRunner, *arguments: Any) -> None:
        before = eager_ops()
        original(self, *arguments)
        sampling.append(eager_ops() - before)

    with working(make_tiny(family, tmp_path, **overrides), **options) as rig:
        warm = counted()
        random_traffic(rig, 6, max_chunk=32)
        guards = [metrics.guard_count for metrics in get_compilation_metrics()]
        rig.admit(0, [3, 5, 7])
        rig.prefill({0: None})
        rig.step()
        monkeypatch.setattr(ModelRunner, "_sample", measured)
        before = eager_ops()

        rig.run([0], 1)

        assert warm[0] > 0 and counted() == warm
        assert max(guards) <= MAX_GUARDS[name]
        # Outside of compiled parts, only the input tokens are selected and copied.
        assert eager_ops() - before - sum(sampling) == 2
        # Operators of the sampler for greedy requests.
        assert sum(sampling) <= 2


@pytest.mark.slow
def test_all_layers_share_their_graphs(tmp_path: Path) -> None:
    traces = []

    for layers in (1, 4):
        folder = make_tiny("llama", tmp_path / str(layers), num_hidden_layers=layers)
        with working(folder):
            traces.append(counted()[0])

    assert traces[0] == traces[1]


@pytest.mark.parametrize("whole_graphs", [True, False])
def test_modules_of_torch_itself_are_compiled(whole_graphs: bool) -> None:
    """transformers' own code has such modules beside its layers, for example in GPT-NeoX."""
    execution = ExecutionConfig(mode="torch-compile", compile_fullgraph=whole_graphs)
    backend = select_backend(EngineConfig("m", device="hpu-emulator", execution=execution))
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Dropout()).eval()
    expected = model(torch.tensor([1, 3]))

    prepared = backend.prepare(model.to(backend.device))
    tokens = torch.tensor([1, 3]).to(backend.device)
    before = eager_ops()
    with torch.inference_mode():
        found = prepared(tokens)

    assert counted()[0] > 0 and eager_ops() == before
    assert torch.equal(found.cpu(), expected)
    backend.close()


def test_without_guards_a_warm_server_runs_and_a_new_shape_is_an_error(tmp_path: Path) -> None:
    with working(make_tiny("llama", tmp_path), guards_off=True) as rig:
        warm = counted()

        random_traffic(rig, max_chunk=32)

        assert counted() == warm
        torch.hpu.emulated.is_serving = False  # type: ignore[attr-defined]
        rig.admit(0, list(range(4, 44)))
        rig.prefill({0: 40})
        with pytest.raises(RuntimeError, match="Recompilation triggered"):
            rig.step()


def test_an_encoder_compiles_without_graph_breaks(tmp_path: Path) -> None:
    folder = make_pooling("bert", tmp_path)
    prompts = [[7] * 32, [9, 5, 11]]
    on_cpu = Reader(folder)
    expected = on_cpu.read(prompts)
    on_cpu.worker.close()

    reader = Reader(
        folder,
        device="hpu-emulator",
        buckets=dataclasses.replace(TABLE, prompt_context=Range(0, 1, 0)),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        execution=ExecutionConfig(mode="torch-compile", compile_fullgraph=True),
        emulator=EmulatorSettings(is_strict=True),
    )
    warm = counted()
    found = reader.read(prompts)

    assert warm[0] > 0 and counted() == warm
    for first, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(first, other, atol=1e-5)
    reader.worker.close()
