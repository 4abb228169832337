"""A rank of torchrun that is killed while it generates: torchrun names the rank and ends the other
ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from live import ROOT, alive, children_of
from ports import free_port
from tiny_models import make_tiny

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 2000,
    "block_size": 16,
}
KILLED_S = 30.0

SCRIPT = """
import json, os, sys, threading
from gaudiserve import LLM, SamplingParams

folder, settings = json.loads(sys.argv[1])
params = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
with LLM(
    folder, **settings, tensor_parallel_size=2, distributed_executor_backend="external_launcher"
) as llm:
    def tell():
        print(json.dumps([int(os.environ["RANK"]), os.getpid()]), flush=True)

    llm.generate([{"prompt_token_ids": [9]}], SamplingParams(max_tokens=2), use_tqdm=False)
    threading.Timer(0.2, tell).start()
    llm.generate([{"prompt_token_ids": [9, 10]}] * 4, params, use_tqdm=False)
print("finished", flush=True)
"""


def test_a_killed_rank_of_torchrun_is_named_and_ends_the_other_rank(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path / "tiny", max_position_embeddings=2000))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", "2", "--master-port", str(free_port())),
            *(str(script), json.dumps([folder, SETTINGS])),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        pids = dict(json.loads(run.stdout.readline()) for _ in range(2))
        family = children_of(run.pid)
        start = time.monotonic()

        os.kill(pids[1], signal.SIGKILL)
        output, errors = run.communicate(timeout=60)

        assert time.monotonic() - start < KILLED_S, errors
        assert run.returncode != 0 and "finished" not in output
        assert re.search(rf"rank\s*: 1 .*\n.*exitcode\s*: -9 \(pid: {pids[1]}\)", errors), errors
        assert f"Signal 9 (SIGKILL) received by PID {pids[1]}" in errors
        assert not any(map(alive, [*family, *pids.values()]))
    finally:
        run.kill()
        run.wait()
