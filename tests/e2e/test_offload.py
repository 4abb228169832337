"""Offloaded KV blocks with separate processes: two ranks, and an engine that is killed."""

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from live import running
from tiny_models import make_tiny

from gaudiserve import LLM, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "offload.md"
TALKS = [[3 + (7 * i + i * i * talk) % 250 for i in range(100)] for talk in range(4)]
CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 16,
    "num_gpu_blocks_override": 12,
    "max_num_seqs": 1,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2))


def converse(llm: LLM) -> list[tuple[list[int], int]]:
    outputs = [
        llm.generate([{"prompt_token_ids": talk}], [GREEDY], use_tqdm=False)[0]
        for _ in range(2)
        for talk in TALKS
    ]
    return [
        (list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs
    ]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor_parallel_size": 2, "compare_ranks": True},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["tensor", "pipeline"],
)
def test_each_rank_offloads_its_part_and_finds_it_again(
    parallel: dict[str, Any], folder: str, tmp_path: Path
) -> None:
    ranks: dict[str, Any] = {
        **CPU,
        **parallel,
        "kv_offloading_size": 0.02,
        "kv_offloading_dir": str(tmp_path),
    }
    with LLM(folder, **CPU) as llm:
        expected = converse(llm)

    with LLM(folder, **ranks) as llm:
        found = converse(llm)
    parts = [{path.name for path in tmp_path.glob(f"kv-*/*-rank-{rank}/*/*.kv")} for rank in (0, 1)]
    # Rank 1 has lost a block, so no rank may use this block.
    next(tmp_path.glob("kv-*/*-rank-1/*/*.kv")).unlink()
    with LLM(folder, **ranks) as llm:
        again = converse(llm)

    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
    assert all(cached >= 64 for _, cached in found[len(TALKS) :])
    assert parts[0] == parts[1] and len(parts[0]) > 10
    assert sum(cached > 0 for _, cached in again[: len(TALKS)]) >= 1


CARD: dict[str, Any] = {
    "device": "hpu-emulator",
    "emulator_strict": True,
    "emulator_late_copy": 0.002,
    "max_num_batched_tokens": 32,
    "prompt_bs_bucket_max": 1,
    "bucketing_strategy": "exponential",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        CARD,
        {**CARD, "kv_cache_dtype": "fp8_inc"},
    ],
    ids=["fp8", "int8", "cards", "cards-fp8"],
)
def test_two_ranks_copy_blocks_in_the_format_of_their_cache(
    settings: dict[str, Any], folder: str, tmp_path: Path
) -> None:
    ranks: dict[str, Any] = {**CPU, **settings, "tensor_parallel_size": 2, "compare_ranks": True}
    with LLM(folder, **ranks) as llm:
        expected = converse(llm)

    places = {"kv_offloading_size": 0.02, "kv_offloading_dir": str(tmp_path)}
    with LLM(folder, **ranks, **places) as llm:
        found = converse(llm)
        counts = llm._client.stats.kv_offload

    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert all(cached >= 64 for _, cached in found[len(TALKS) :])
    assert all(cached < 64 for _, cached in expected)
    assert counts["loaded"] > 10


def test_the_documented_server_finds_blocks_in_files_after_an_engine_kill(
    folder: str, tmp_path: Path
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (command,) = re.findall(r"^gaudiserve serve .*", page, re.MULTILINE)
    words = shlex.split(command)[3:]
    flags = [
        "--served-model-name=tiny",
        *(f"--{name.replace('_', '-')}={value}" for name, value in CPU.items()),
        *(word.replace("/var/lib/kv", str(tmp_path / "kv")) for word in words),
    ]
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    with running(folder, tmp_path / "log", *flags) as live:

        def ask(talk: list[int]) -> dict[str, Any]:
            answer = live.http.post("/v1/completions", json={**body, "prompt": talk})
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        def fetched() -> float:
            name = "gaudiserve:kv_offload_fetched_blocks_total"
            lines = live.ask("/metrics").text.splitlines()
            return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name))

        first = [ask(talk)["choices"][0]["text"] for talk in TALKS + TALKS]
        assert fetched() == 0
        assert 'gaudiserve:kv_offload_bytes_total{direction="in"' in live.ask("/metrics").text
        os.kill(live.find("gaudiserve: engine"), signal.SIGKILL)
        again = [ask(talk)["choices"][0]["text"] for talk in TALKS]
        count = fetched()

    assert again == first[: len(TALKS)]
    assert count > 0
