"""Quantized checkpoints on two strict emulated cards: the log-probabilities of a single card, and
no compilation after warm-up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from quantized_checkpoints import FORMATS, STACKING, make_quantized
from random_checkpoint import write_mxfp4
from rank_pool import RankPool
from two_prompts import working

from config.execution import EmulatorSettings, ExecutionConfig
from config.parallel import ParallelConfig
from hpu.distributed.process_groups import ProcessGroup
from hpu.protocol import Ranks, RequestSampling

PROMPT = [3, 5, 7, 9, 11] * 9
FORCED = [8, 1, 2, 60]
"""Tokens decoded after PROMPT, so that all ranks see the same tokens."""
SAMPLING = RequestSampling(temperature=0.0, num_logprobs=0, num_prompt_logprobs=0, masked=True)
COUNTERS = ("compilations", "captures", "fallbacks", "unmarked_collective")
MOE = "experts: "
MXFP4 = MOE + "mxfp4"
ROUNDING, FP8_ROUNDING = 0.05, 0.1
"""Allowed difference of a log-probability, in standard deviations."""


Array = npt.NDArray[np.float64]


class Served(NamedTuple):
    """Results of a single rank."""

    logprobs: list[float]
    """Log-probabilities of PROMPT without its first token, and of FORCED."""
    quantized_bytes: int
    """Bytes of quantized weight values on this card."""


def serve(
    group: ProcessGroup,
    folder: Path,
    store: Path,
    generation: str,
    expert_parallel: bool = False,
    calculates_scales: bool = False,
) -> Served:
    """Serve the prompt with a worker of `group.size` ranks. `store`: rendezvous file of the ranks.
    `calculates_scales`: for a KV cache in FP8."""
    settings: dict[str, Any] = {}
    if calculates_scales:
        settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    if group.size > 1:
        settings |= {
            "ranks": Ranks(group.size, group.rank, f"file://{store}", timeout_s=60),
            "parallel": ParallelConfig(
                tensor_parallel_size=group.size, enable_expert_parallel=expert_parallel
            ),
        }
    with working(
        folder,
        device="hpu-emulator",
        dtype="bfloat16",
        execution=ExecutionConfig(mode="hpu-graphs"),
        emulator=EmulatorSettings(card=generation, is_strict=True),
        **settings,
    ) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        rig.admit(0, PROMPT, sampling=SAMPLING)
        rig.prefill({0: 40})
        rig.submit()
        results = [rig.collect()]
        rig.prefill({0: None})
        for token in FORCED:
            rig.submit({0: [token]})
            results.append(rig.collect())
            rig.decode([0])
        after = [counts[name] for name in COUNTERS]
        loaded = rig.worker.loaded
        assert loaded is not None and isinstance(loaded.model, torch.nn.Module)
        held = [
            parameter
            for name, parameter in loaded.model.named_parameters()
            if name.endswith("qweight")
        ]
    assert after == before and before[0] > 0 and before[2:] == [0, 0]
    found = [
        np.frombuffer(item.values, "<f4").tolist()
        for result in results
        for _, item in (*result.prompt_logprobs, *result.logprobs)
    ]
    return Served([item for part in found for item in part], sum(tensor.nbytes for tensor in held))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("ranks"), joins=False) as pool:
        yield pool


def make(name: str, folder: Path) -> Path:
    if name == MXFP4:
        return write_mxfp4(folder)
    fields: dict[str, Any] = {"num_hidden_layers": 1}
    if not name.startswith(MOE):
        return make_quantized(FORMATS[name], folder, **fields).folder
    # Each token uses all experts, so that rounding does not change the routing.
    fields |= {"num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 4}
    return make_quantized(FORMATS[name.removeprefix(MOE)], folder, "qwen3_moe", **fields).folder


def error_of(found: Array, expected: Array) -> float:
    """Root mean square error, in standard deviations of `expected`."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


CASES = [
    ("gptq", "gaudi2", False),
    (MOE + "wna16", "gaudi3", False),
]
SLOW = [
    ("fp8, blocks", "gaudi2", False),
    ("gptq, desc_act", "gaudi3", False),
    ("gptq, 8 bits", "gaudi2", False),
    ("awq", "gaudi2", False),
    ("wna16", "gaudi3", False),
    ("wna16, 8 bits", "gaudi2", False),
    ("int-quantized", "gaudi2", False),
    ("fp8", "gaudi3", False),
    ("fp8, static", "gaudi2", False),
    ("float-quantized", "gaudi2", False),
    ("float-quantized, static", "gaudi3", False),
    ("float-quantized, channels", "gaudi3", False),
    ("float-quantized, blocks", "gaudi2", False),
    (MOE + "gptq, desc_act", "gaudi3", False),
    (MOE + "awq", "gaudi2", True),
    (MOE + "wna16, 8 bits", "gaudi2", True),
    (MOE + "fp8, static", "gaudi3", True),
    (MOE + "fp8, blocks", "gaudi2", False),
    (MXFP4, "gaudi2", False),
    (MXFP4, "gaudi3", True),
    (STACKING, "gaudi2", False),
    ("bitsandbytes, 8 bits", "gaudi3", False),
    ("nf4", "gaudi2", False),
]


@pytest.mark.parametrize(
    ("name", "generation", "expert_parallel"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_two_cards_give_the_log_probabilities_of_a_single_card(
    name: str, generation: str, expert_parallel: bool, pool: RankPool, tmp_path: Path
) -> None:
    folder = make(name, tmp_path / "checkpoint")
    (single,) = pool.run(1, serve, folder, tmp_path / "none", generation, False)

    first, second = pool.run(2, serve, folder, tmp_path / "store", generation, expert_parallel)

    found, expected = np.array(first.logprobs), np.array(single.logprobs)
    assert len(expected) == len(PROMPT) - 1 + len(FORCED)
    largest = FP8_ROUNDING if "fp8" in name or "float" in name else ROUNDING
    assert error_of(found, expected) < largest
    assert not second.logprobs or second.logprobs == first.logprobs
    # These formats are dequantized while they are loaded.
    assert (single.quantized_bytes == 0) == (name in (MXFP4, "nf4"))
    for rank in (first, second):
        # Limit above a half: act-order group tables are replicated on each rank.
        assert rank.quantized_bytes <= 0.6 * single.quantized_bytes


@pytest.mark.slow
def test_two_cards_with_calculated_scales_give_the_log_probabilities_of_a_single_card(
    pool: RankPool, tmp_path: Path
) -> None:
    folder, store = make("gptq", tmp_path / "checkpoint"), tmp_path / "store"
    (single,) = pool.run(1, serve, folder, store, "gaudi2", False, True)
    (plain,) = pool.run(1, serve, folder, store, "gaudi2")

    first, _ = pool.run(2, serve, folder, store, "gaudi2", False, True)

    found, expected = np.array(first.logprobs), np.array(single.logprobs)
    assert error_of(found, expected) < ROUNDING
    assert error_of(np.array(plain.logprobs), expected) > 0
