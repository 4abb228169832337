"""Tensor, pipeline, expert and data parallelism compared with a single process: the same tokens and
log-probabilities, with chunks, preemptions, prefix hits, grammars, beams, seeds and penalties at
once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from parity import PROMPTS, SHORT_OF_BLOCKS, Answer, answers, difference
from tiny_models import FAMILIES, WITH_STATES, make_tiny

from gaudiserve import LLM, SamplingParams
from hpu.ops.cpu import can_pack

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

TP2: dict[str, Any] = {"tensor_parallel_size": 2, "compare_ranks": True}
TP4: dict[str, Any] = {"tensor_parallel_size": 4}
EP2: dict[str, Any] = {**TP2, "enable_expert_parallel": True}
EP4: dict[str, Any] = {**TP4, "enable_expert_parallel": True}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
DP2: dict[str, Any] = {"data_parallel_size": 2}
SETUPS = {
    "tp 2": TP2,
    "tp 4": TP4,
    "ep 2": EP2,
    "ep 4": EP4,
    "pp 2": PP2,
    "tp 2, pp 2": {**TP2, **PP2},
    "ep 2, pp 2": {**EP2, **PP2},
    "dp 2": DP2,
    "dp 2, tp 2": {**DP2, **TP2},
    # Expert-parallel engines, with one rank each and with two ranks each.
    "dp 2, ep": {**DP2, "enable_expert_parallel": True},
    "dp 2, ep 2": {**DP2, **EP2},
}


class Case(NamedTuple):
    """A tiny model with 4 heads, and the set-ups in which it runs."""

    family: str
    setups: tuple[str, ...]
    overrides: Mapping[str, Any] = {}


CASES = {
    "llama": Case("llama", ("tp 2", "tp 4", "pp 2", "tp 2, pp 2", "dp 2", "dp 2, tp 2")),
    "llama, tokens that do not divide": Case("llama", ("tp 4",), {"vocab_size": 323}),
    "qwen3, one KV head": Case("qwen3", ("tp 4",), {"num_key_value_heads": 1}),
    "qwen3_moe": Case("qwen3_moe", ("tp 2", "ep 2", "ep 4", "ep 2, pp 2", "dp 2, ep 2")),
    "deepseek_v3": Case("deepseek_v3", ("tp 2", "ep 2", "ep 4", "pp 2", "dp 2, ep")),
    "gemma3": Case(
        "gemma3_text",
        ("tp 2", "pp 2", "dp 2"),
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "initializer_range": 0.3,
        },
    ),
    "gpt_oss": Case("gpt_oss", ("tp 2", "ep 2", "tp 2, pp 2")),
    "minimax_m3": Case("minimax_m3_vl_text", ("tp 2", "tp 4", "pp 2"), {"index_block_size": 8}),
    "granitemoehybrid": Case("granitemoehybrid", ("tp 2", "tp 4", "dp 2")),
}
# gemma3_text is a model of transformers and needs no fields in FAMILIES.
CASES = {
    name: case
    for name, case in CASES.items()
    if case.family in FAMILIES or case.family == "gemma3_text"
}


class Tiny:
    """Checkpoints of the cases, and the answers of a single process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected: dict[str, list[Answer]] = {}

    def make(self, name: str) -> str:
        folder = self._folder / name.replace(" ", "_").replace(",", "")
        case = CASES[name]
        if not folder.exists():
            make_tiny(case.family, folder, seed=3, **case.overrides)
        return str(folder)

    def expected(self, name: str) -> list[Answer]:
        if name not in self._expected:
            with LLM(self.make(name), **SHORT_OF_BLOCKS) as llm:
                self._expected[name] = answers(llm)
        return self._expected[name]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("name", "setup"), [(name, setup) for name, case in CASES.items() for setup in case.setups]
)
def test_a_group_gives_the_answers_of_a_single_process(name: str, setup: str, tiny: Tiny) -> None:
    expected = tiny.expected(name)

    with LLM(tiny.make(name), **SHORT_OF_BLOCKS, **SETUPS[setup]) as llm:
        found = answers(llm)
        (again,) = llm.generate(
            {"prompt_token_ids": PROMPTS[1]},
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        stats = llm._client.stats

    assert difference(found, expected) == ""
    # A model that repeats one token would hide a wrong cache.
    assert sum(len(set(tokens)) > 8 for tokens, _ in found) >= 6
    assert stats.preemptions > 0
    assert (again.num_cached_tokens > 0) == (CASES[name].family not in WITH_STATES)
    assert not any(look.endswith(("miss", "fallback")) for look in stats.lookups)


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")),
    reason="quantized weights need a CPU with bfloat16 instructions",
)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_ranks_give_the_log_probabilities_of_a_single_process(
    quantization: str, tiny: Tiny
) -> None:
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    settings = {**SHORT_OF_BLOCKS, "dtype": "bfloat16", "quantization": quantization}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found: list[list[Answer]] = []
    for setup in ({}, TP2):
        with LLM(tiny.make("llama"), **settings, **setup) as llm:
            outputs = llm.generate(prompts, scored, use_tqdm=False)
        rows = [output.prompt_logprobs or [] for output in outputs]
        found.append(
            [
                ([], [row and {t: v.logprob for t, v in row.items()} for row in entry])
                for entry in rows
            ]
        )

    # Each rank rounds its partial sum to bfloat16.
    assert difference(found[1], found[0], tolerance=0.3) == ""
