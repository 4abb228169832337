"""LLM(data_parallel_size=2) in a plain script gives the tokens of a single engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live import ROOT
from tiny_models import make_tiny

from config.errors import ConfigError
from gaudiserve import LLM, SamplingParams

SMALL = {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 64, "device": "cpu"}
PROMPTS = ["red", "green and blue", "a much longer prompt than the others", "x"]

SCRIPT = """
import json
from gaudiserve import LLM, SamplingParams

llm = LLM({folder!r}, data_parallel_size=2, max_model_len=128, num_threads=1, **{small!r})
outputs = llm.generate({prompts!r}, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def test_a_plain_script_gets_the_tokens_of_a_single_engine(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path / "llama"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=folder, small=SMALL, prompts=PROMPTS))

    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    with LLM(folder, max_model_len=128, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [list(output.outputs[0].token_ids) for output in outputs]
    assert "Traceback" not in done.stderr


def test_offline_inference_refuses_engines_on_other_hosts(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path / "llama"))
    flags = {"data_parallel_size_local": 1, "data_parallel_address": "127.0.0.1"}

    with pytest.raises(ConfigError, match="--data-parallel-size is 2 and 1 of these engines"):
        LLM(folder, data_parallel_size=2, **flags, **SMALL)
