"""torchrun starts a process with its own engine for each rank: all ranks give the tokens of a
single process, although requests arrive at different moments."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live import ROOT
from ports import free_port
from tiny_models import make_tiny

from gaudiserve import LLM, SamplingParams

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "block_size": 16}
SETTINGS = {**CPU, "max_num_seqs": 2}
PROMPTS = [{"prompt_token_ids": list(range(10, 10 + length))} for length in (21, 2, 40, 7, 33, 12)]
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 12, "temperature": 0, "ignore_eos": True},
    {"max_tokens": 9, "temperature": 0.8, "logprobs": 2, "n": 2, "ignore_eos": True},
    {"max_tokens": 20, "temperature": 1.0, "seed": 3, "stop": ["a", "b", "e"]},
    {"max_tokens": 9, "temperature": 0.8, "seed": 4, "structured_outputs": {"regex": "[a-f]{6}"}},
    {"max_tokens": 20, "temperature": 1.0, "seed": 5, "prompt_logprobs": 1},
    {"max_tokens": 9, "temperature": 0.8, "top_k": 5},
]

SCRIPT = """
import json, os, sys, time
from gaudiserve import LLM, SamplingParams

folder, settings, prompts, sampling, num_skipped = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
with LLM(
    folder, **settings, tensor_parallel_size=2, distributed_executor_backend="external_launcher"
) as llm:
    time.sleep(0.3 * rank)
    params = [SamplingParams(**fields) for fields in sampling]
    skipped = num_skipped * rank
    outputs = llm.generate(prompts[skipped:], params[skipped:], use_tqdm=False)
    again = llm.generate(prompts[:2], params[:2], use_tqdm=False)
tokens = [list(choice.token_ids) for output in outputs + again for choice in output.outputs]
print(json.dumps({"rank": rank, "tokens": tokens}), flush=True)
"""


def torchrun(
    folder: str, *, num_skipped: int = 0, num_processes: int = 2
) -> "subprocess.CompletedProcess[str]":
    """Run SCRIPT with torchrun; rank 1 skips the first `num_skipped` prompts."""
    words = json.dumps([folder, SETTINGS, PROMPTS, SAMPLING, num_skipped])
    script = Path(folder, "script.py")
    script.write_text(SCRIPT)
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(num_processes), "--master-port", str(free_port())),
            *(str(script), words),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2))


def test_two_ranks_of_torchrun_give_the_tokens_of_a_single_process(folder: str) -> None:
    with LLM(folder, **SETTINGS) as llm:
        params = [SamplingParams(**item) for item in SAMPLING]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        outputs += llm.generate(PROMPTS[:2], params[:2], use_tqdm=False)
    expected = [list(choice.token_ids) for output in outputs for choice in output.outputs]

    done = torchrun(folder)

    assert done.returncode == 0, done.stderr
    found = {
        line["rank"]: line["tokens"] for line in map(json.loads, done.stdout.splitlines()) if line
    }
    assert found == {0: expected, 1: expected}


@pytest.mark.slow
def test_ranks_that_make_different_calls_end_with_an_error(folder: str) -> None:
    done = torchrun(folder, num_skipped=1)

    assert done.returncode != 0
    assert "all ranks must make the same calls" in done.stderr


@pytest.mark.slow
def test_more_processes_than_ranks_are_an_error_with_both_numbers(folder: str) -> None:
    done = torchrun(folder, num_processes=3)

    assert done.returncode != 0
    assert "the launcher started 3 processes, and the model is divided among 2" in done.stderr
